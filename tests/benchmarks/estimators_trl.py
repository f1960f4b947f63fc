"""TRL's GRPOTrainer on a task of `estimators.py`, with the settings of hfppo's runs.

Model, LoRA, rewards, prompts of each rollout, groups, mini-batches, epochs, steps, rate and its schedule, clip,
optimizer, sampling and precision are the same. Mini-batches differ: TRL shuffles single completions into them once per
rollout, where hfppo keeps groups together and draws mini-batches anew in each epoch.
"""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hfppo.data.prompts import prompt_indices

SAME = (
    "output_dir",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "max_completion_length",
    "num_generations",
    "learning_rate",
    "seed",
    "save_strategy",
    "report_to",
    "use_cpu",
    "disable_tqdm",
)


def with_eos_penalty(reward: Callable[..., list[float]], eos: int, penalty: float) -> Callable[..., list[float]]:
    """Return a reward function that takes a penalty off completions without an end, as `missing_eos_penalty` does."""

    def score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        scores = reward(**columns)
        return [score - penalty * (ids[-1] != eos) for score, ids in zip(scores, completion_ids, strict=True)]

    return score


def grpo_trainer(
    settings: dict[str, Any],
    lora: LoraConfig,
    model: str,
    reward_funcs: Callable[..., list[float]],
    train_dataset: Dataset,
    eval_dataset: Dataset,
) -> GRPOTrainer:
    """Return the trainer.

    Raises:
        ValueError: the task has a KL penalty, which hfppo has in the reward and TRL in the loss.
    """
    if settings["kl_coef"]:
        raise ValueError(f"kl_coef={settings['kl_coef']}: TRL has its KL in the loss; take a task without")
    mini_batches, epochs = settings["num_mini_batches"], settings["num_ppo_epochs"]
    rollout = settings["per_device_train_batch_size"] * mini_batches
    prompts = settings["total_episodes"] // settings["num_generations"]
    args = GRPOConfig(
        **{name: settings[name] for name in SAME},
        lr_scheduler_type=settings.get("lr_scheduler_type", "linear"),  # the default of both trainers
        steps_per_generation=mini_batches,
        num_iterations=epochs,
        num_generations_eval=1,
        max_steps=settings["total_episodes"] // rollout * mini_batches * epochs,
        beta=0.0,
        logging_steps=mini_batches * epochs,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,  # the rows are in hfppo's order
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    return GRPOTrainer(
        model=model,
        reward_funcs=with_eos_penalty(reward_funcs, tokenizer.eos_token_id, settings.get("missing_eos_penalty", 0.0)),
        args=args,
        train_dataset=train_dataset.select(prompt_indices(range(prompts), len(train_dataset), settings["seed"])),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=lora,
    )
