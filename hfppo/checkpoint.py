"""What a checkpoint holds beside Trainer's own files: the state of PPO on each process."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer
from transformers import TrainingArguments

from hfppo.config import PPOConfig
from hfppo.data.prompts import Prompts
from hfppo.data.stream import PromptStream
from hfppo.metrics import Meter
from hfppo.models.actor_critic import ActorCritic
from hfppo.rollout import Rollout
from hfppo.run_state import PPOState
from hfppo.saving.adapter_config import describe_adapter, differing

logger = logging.getLogger(__name__)

# The fields that say which rows a rollout has and how it is cut: with others, a checkpoint cannot be gone on with.
STRUCTURE = (
    "num_mini_batches",
    "num_ppo_epochs",
    "num_generations",
    "advantage_estimator",
    "policy_mode",
    "temperature",
    "seed",
)

# Trainer's own fields of which a resumed run is told when they have changed, as it is of all of ours.
TRAINER_FIELDS = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16"),
)

# What an optimiser's groups say of themselves that no step or schedule changes.
OWN_SETTINGS = ("weight_decay", "betas", "eps")


def state_file(checkpoint: str | Path, process: int) -> Path:
    """The JSON file of a process; the rollout's tensors lie beside it as safetensors."""
    return Path(checkpoint) / f"ppo_state_{process}.json"


@dataclass(frozen=True)
class RunDescription:
    """What a checkpoint says of the run that wrote it."""

    structure: dict[str, Any]  # what a run must share that goes on with it
    settings: dict[str, Any]  # what it had better share


def describe_run(
    args: PPOConfig,
    prompts: Prompts | PromptStream | None,
    model: ActorCritic,
    peft_config: PeftConfig,
    reward_funcs: list[str],
) -> RunDescription:
    """What is said of a run that is made of these."""
    digest = hashlib.sha256(json.dumps(prompts.head.ids).encode()).hexdigest() if prompts is not None else None
    inherited = {f.name for f in fields(TrainingArguments)}
    values = json.loads(json.dumps(args.to_dict(), default=str))  # without secrets, and with dtypes as text
    own = [f.name for f in fields(args) if f.name not in inherited and f.name not in STRUCTURE]
    return RunDescription(
        structure={
            # The product alone, so that a run that is short of memory can go on in smaller pieces.
            "per_device_train_batch_size × gradient_accumulation_steps": (
                args.per_device_train_batch_size * args.gradient_accumulation_steps
            ),
            **{name: getattr(args, name) for name in STRUCTURE},
            "optim": values["optim"],
            "number of processes": args.world_size,
            "prompts (SHA-256 of their token ids)": digest,
            **hashes(model),
            "peft_config": describe_adapter(peft_config),
            "critic": None if model.critic is None else model.critic.kind,
        },
        settings={**{name: values[name] for name in (*own, *TRAINER_FIELDS)}, "reward_funcs": reward_funcs},
    )


def hashes(model: ActorCritic) -> dict[str, str | None]:
    """What base and reference are known by; None: the reference is the base."""
    reference = None if model.ref_model is None else fingerprint(model.ref_model)
    return {
        "base (SHA-256 of some of its weights)": fingerprint(model.base_model),
        "reference (SHA-256 of some of its weights)": reference,
    }


def fingerprint(base: nn.Module) -> str:
    """A hash of the first numbers of each frozen weight; the same for a base in float32 and in bfloat16."""
    hashed = hashlib.sha256()
    for parameter in base.parameters():
        if not parameter.requires_grad:
            first = parameter.detach().flatten()[:16].cpu().bfloat16()
            hashed.update(first.view(torch.int16).numpy().tobytes())
    return hashed.hexdigest()


def save_ppo_state(
    checkpoint: str | Path,
    process: int,
    run: RunDescription,
    state: PPOState,
    metrics: dict[str, Any],
    rollout: Rollout | None,
) -> None:
    """Write one process's state: where PPO stands, metrics not yet logged, and the rollout still in use."""
    path = state_file(checkpoint, process)
    content = {"run": asdict(run), "state": state.state_dict(), "metrics": metrics, "rollout": rollout is not None}
    if rollout is not None:
        save_rollout(path.with_suffix(".safetensors"), rollout)
    path.write_text(json.dumps(content))


def save_rollout(path: Path, rollout: Rollout) -> None:
    """Write a rollout's tensors as safetensors."""
    # Copies, because with policy_mode="bypass" two fields are one tensor, which safetensors refuses.
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in rollout.tensors().items()}
    save_file(tensors, path)


def check_checkpoint(checkpoint: str | Path, process: int, run: RunDescription) -> None:
    """Refuse a checkpoint that this run cannot go on with.

    Raises:
        ValueError: names what differs, both values, and what to do.
    """
    path = state_file(checkpoint, process)
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {path.name}: it was not written by PPOTrainer, by fewer processes, or with "
            "save_only_model=True; to start anew from its weights, pass it as model"
        )
    saved = RunDescription(**json.loads(path.read_text())["run"])
    for name, wanted in run.structure.items():
        before, now = differing(saved.structure.get(name, wanted), wanted)  # earlier versions wrote less
        if before != now:
            raise ValueError(
                f"{checkpoint} was written with {name}={before!r}, this run has {now!r}: it cannot be gone on "
                f"with; set it back, or start anew from its weights by passing it as model"
            )
    current = json.loads(json.dumps(run.settings))
    for name, now in current.items():
        if (before := saved.settings.get(name, now)) != now:
            logger.warning("resuming with %s=%r, the checkpoint was written with %r", name, now, before)


@contextmanager
def own_rates(optimizer: Optimizer, scheduler: Any) -> Iterator[None]:
    """Inside, an optimiser and its scheduler are loaded; this run's learning rates, decay, β and ε outlast that.

    Trainer would go on with the checkpoint's, whatever the configuration says now. Where they are the same, nothing is
    touched.
    """
    given = [{name: group[name] for name in OWN_SETTINGS if name in group} for group in optimizer.param_groups]
    rates = [group.get("initial_lr") for group in optimizer.param_groups]
    yield
    changed = False
    for group, own, rate in zip(optimizer.param_groups, given, rates, strict=True):
        group.update(own)
        loaded = group.get("initial_lr")  # what the schedule multiplies; ReduceLROnPlateau has none
        if rate is not None and loaded is not None and not math.isclose(rate, loaded, rel_tol=1e-6):
            group["lr"] = group["lr"] * rate / loaded if loaded else rate
            group["initial_lr"] = rate
            changed = True
    if changed:
        names = {"base_lrs": "initial_lr", "_last_lr": "lr"}
        now = {name: [group[of_group] for group in optimizer.param_groups] for name, of_group in names.items()}
        scheduler.load_state_dict(scheduler.state_dict() | now)


def load_ppo_state(
    checkpoint: str | Path, process: int, run: RunDescription, meter: Meter
) -> tuple[PPOState, Rollout | None]:
    """Read what `save_ppo_state` wrote. A `kl_coef` that was changed since takes the place of the saved β."""
    path = state_file(checkpoint, process)
    content = json.loads(path.read_text())
    meter.load_state_dict(content["metrics"])
    rollout = Rollout(**load_file(path.with_suffix(".safetensors"))) if content["rollout"] else None
    state = PPOState.from_state_dict(content["state"])
    if run.settings["kl_coef"] != content["run"]["settings"]["kl_coef"]:
        state.kl_coef = run.settings["kl_coef"]
    return state, rollout
