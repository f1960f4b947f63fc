"""TRL's GRPOTrainer on a workload of `ppo_workload`; the GPU kit runs it beside hfppo."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from ppo_workload import Clock, Stopwatch, Workload, adapter_for, common_config, prompts_for, tokenizer_for
from transformers import GenerationMixin, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

NOT_TRLS = ("num_mini_batches", "num_ppo_epochs", "total_episodes", "local_rollout_forward_batch_size", "kl_coef")


@contextmanager
def timed_phases(watch: Stopwatch) -> Iterator[None]:
    """Have the stopwatch follow sampling, the rest of a rollout, and the update, for the block."""
    phases = [
        (GenerationMixin, "generate", "sampling"),
        (GRPOTrainer, "_prepare_inputs", "passes and scores"),
        (GRPOTrainer, "training_step", "update"),
        (torch.optim.AdamW, "step", "optimizer"),
    ]
    with ExitStack() as stack:
        for owner, method, phase in phases:
            stack.enter_context(patch.object(owner, method, watch.timed(getattr(owner, method), phase)))
        yield


def measure(
    workload: Workload,
    folder: Path,
    model: PreTrainedModel,
    reward: Any,
    rollouts: int,
    num_generations: int,
) -> dict[str, Any]:
    """Train for some rollouts, and return what the clock measured after the first."""
    watch = Stopwatch()
    clock = Clock(watch, workload.steps)

    def count(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        clock.tokens.append(sum(map(len, completion_ids)))
        return [0.0] * len(completion_ids)

    config = common_config(workload, rollouts, folder)
    beta = config["kl_coef"]
    args = GRPOConfig(
        **{name: value for name, value in config.items() if name not in NOT_TRLS},
        max_completion_length=workload.new_tokens,
        max_steps=rollouts * workload.steps,
        steps_per_generation=workload.mini_batches * config["gradient_accumulation_steps"],
        num_iterations=workload.epochs,
        num_generations=num_generations,
        beta=beta,
        reward_weights=[1.0, 0.0],
    )
    tokenizer = tokenizer_for(workload)
    reward_tokenizer = tokenizer_for(workload)
    reward_tokenizer.eos_token = None  # as for hfppo's side
    prompts = prompts_for(workload)[: workload.prompts // num_generations]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward, count],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": tokenizer.batch_decode(prompts)}),
        processing_class=tokenizer,
        reward_processing_classes=[reward_tokenizer, None],
        peft_config=adapter_for(workload),
        callbacks=[clock],
    )
    with timed_phases(watch):
        trainer.train()
    return clock.measured()
