"""What tests train with and compare afterwards."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, TrainerCallback

from helpers.tiny import CHAT_TEMPLATE, LORA, tiny_model
from hfppo import ActorCritic, ClipMetricsCallback, PPOCallback, PPOConfig, PPOTrainer, Rollout, Transcript
from hfppo.learn.micro_batches import Counts, MiniBatchSize
from hfppo.models.adapter_switch import CRITIC

PROMPTS = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)]})


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """Return the entries of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def count_digits(completions, **kwargs) -> list[float]:
    """A reward that a few steps can raise: the share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def stops_at_kl(target: float) -> ClipMetricsCallback:
    """Ends the use of a rollout with the first step whose KL exceeds the target."""
    return ClipMetricsCallback(target, by="approx_kl", then="stop")


SMALL = {
    "per_device_train_batch_size": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "max_steps": 8,
    "seed": 3,
}


SUMS = Dataset.from_list([{"prompt": f"请问{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(3, 7)])


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters with a chat template."""
    made = character_tokenizer()
    made.chat_template = CHAT_TEMPLATE
    return made


def small_trainer(output_dir: str | Path, config: dict | None = None, **kwargs: Any) -> PPOTrainer:
    """Return a trainer with `SMALL` settings; keyword arguments of PPOTrainer, and `config` for PPOConfig's fields."""
    args = PPOConfig(**{"output_dir": str(output_dir), **SMALL, **(config or {})})
    model = kwargs.pop("model", None)
    given = {"reward_funcs": count_digits, "train_dataset": SUMS, "peft_config": LORA, **kwargs}
    given.setdefault("processing_class", chat_tokenizer())
    return PPOTrainer(model=tiny_model() if model is None else model, args=args, **given)


class Keep(PPOCallback):
    """Keeps every rollout with its texts and its metrics."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.transcripts: list[Transcript] = []
        self.metrics: list[dict[str, float]] = []

    def on_rollout_end(self, args, state, control, *, rollout, transcript, metrics, **kwargs):
        self.rollouts.append(rollout)
        self.transcripts.append(transcript)
        self.metrics.append(metrics)


class Killed(TrainerCallback):
    """Ends a run in a step, before the step is logged or saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt  # a signal does nothing in a process that a script has put into the background


def assert_same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Both have the same names, and under each the same bits."""
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def assert_same_run(expected: PPOTrainer, found: PPOTrainer) -> None:
    """Weights, moments, PPO's state and logs are equal to the last bit."""
    assert_same_end(found, expected)
    assert found.ppo_state == expected.ppo_state
    assert logs(found) == logs(expected)


def untimed_logs(trainer) -> list[dict[str, float]]:
    """What was logged, without times and Trainer's summary of the run."""
    timed = ("time/", "train_", "_runtime", "_per_second", "total_flos")
    history = trainer.state.log_history
    return [{name: x for name, x in log.items() if not any(part in name for part in timed)} for log in history]


def trained_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trainable weights by name."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def disturb(model: torch.nn.Module) -> torch.nn.Module:
    """Move every trained weight, so that adapters and value head say something."""
    torch.manual_seed(0)
    for weight in trained_state(model).values():
        torch.nn.init.normal_(weight, std=0.1)
    return model


def frozen_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the frozen tensors, one for each storage."""
    frozen = (p.detach() for p in model.parameters() if not p.requires_grad)
    return list({p.untyped_storage().data_ptr(): p for p in frozen}.values())


def critic_state(model: ActorCritic) -> dict[str, torch.Tensor]:
    """The critic's trained weights, by their names in its file."""
    return {saved: model.get_parameter(name).detach() for saved, name in model.critic_names().items()}


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights of actor and critic in a saved folder."""
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "critic/critic.safetensors")


def critic_values(model: ActorCritic, ids: torch.Tensor) -> torch.Tensor:
    """Return V of each prefix of (1, L) token ids, (L,), by the whole forward of the critic alone."""
    with model.adapters.use(CRITIC):
        return model.critic(model.critic_trunk(input_ids=ids).last_hidden_state[0])


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the tensors' bytes, in order."""
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def final_state(trainer) -> dict[str, torch.Tensor]:
    state = trained_state(trainer.model)
    for i, moments in trainer.optimizer.state_dict()["state"].items():
        state.update({f"optimizer.{i}.{name}": tensor for name, tensor in moments.items()})
    return state


def logs(trainer) -> list[dict[str, float]]:
    """The logs of the training's steps, without times."""
    return [entry for entry in untimed_logs(trainer) if "loss" in entry]


def trainable(trainer) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in trained_state(trainer.model).items()}


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def size_of(rollout: Rollout) -> MiniBatchSize:
    """The counts of a mini-batch on one process."""
    counts = [Counts(float(mask.sum()), float(mask.any(dim=1).sum())) for mask in (rollout.loss_mask, rollout.fitted)]
    return MiniBatchSize(*counts)


def gradients(trainer, rollout: Rollout, num_micro_batches: int) -> dict[str, torch.Tensor]:
    """The gradients of one optimiser step on the whole rollout, cut into micro-batches."""
    trainer.model.zero_grad()
    trainer.ppo_state.rollouts = 1
    size = size_of(rollout)
    for micro in rollout.micro_batches(num_micro_batches):
        inputs = {"batch": micro}
        trainer.compute_loss(trainer.model, inputs, num_items_in_batch=size).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_end(trainer, expected) -> None:
    """Both runs end with the same trained weights and moments of the optimizer, bit for bit."""
    assert_same_tensors(final_state(trainer), final_state(expected))
