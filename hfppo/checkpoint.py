"""PPO's state in a checkpoint: one file per process, next to Trainer's own files.

A run resumes on another number of processes if the rollout of all of them has the same size. Each process then reads
all files, and takes its part of the rows.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainingArguments

from hfppo.config import PPOConfig
from hfppo.data.chat_template import RunDate
from hfppo.metrics import Sums, UpdateStep, merge
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.adapter_config import describe_adapter, find_differences
from hfppo.models.adapter_switch import REFERENCE
from hfppo.prompt_maker import TRAIN, PromptMaker
from hfppo.rollout import Rollout
from hfppo.state import PPOState

logger = logging.getLogger(__name__)

# A resumed run must share these fields: they determine a rollout's rows and how they are split.
STRUCTURE = (
    "num_mini_batches", "num_ppo_epochs", "num_generations", "advantage_estimator", "rollouts_ahead", "policy_mode",
    "temperature", "seed", "critic_layers", "value_range", "value_loss",
    "critic_update",
)  # fmt: skip

WHOLE = "DDP or one process"

AHEAD = ".ahead.safetensors"  # suffix of the file with the adapter that samples ahead

PROCESSES, ENGINE = "number of processes", "engine"

PROMPTS = "prompts (SHA-256 of lengths and token ids)"

# Fields of TrainingArguments whose change is logged on resume; changes of PPOConfig's own fields always are.
TRAINER_FIELDS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs",
    "weight_decay", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "fp16",
)  # fmt: skip


@dataclass(frozen=True)
class RunDescription:
    """Description of the run that wrote a checkpoint."""

    structure: dict[str, Any]  # a resumed run must share these
    settings: dict[str, Any]  # a resumed run should share these; each change is logged
    date: str  # the date of the chat templates, in ISO format

    @property
    def run_date(self) -> RunDate:
        """`date` as a RunDate."""
        return RunDate(date.fromisoformat(self.date))


def describe_run(
    model: ActorCritic, peft_config: PeftConfig, reward_funcs: list[str], prompt_maker: PromptMaker, engine: str
) -> RunDescription:
    """Describe the run: the values that a resumed run must share, and the values it should share.

    Args:
        engine: "FSDP", "DEEPSPEED", or another of accelerate's `DistributedType`.
    """
    args, agents, critic = prompt_maker.args, prompt_maker.agents, model.critic
    own_adapter = critic.peft_config if critic is not None and critic.has_own_adapter else None
    inherited = {f.name for f in fields(TrainingArguments)}
    values = json.loads(json.dumps(args.to_dict(), default=str))  # without secrets, and with dtypes as text
    own = [f.name for f in fields(args) if f.name not in {*inherited, *STRUCTURE, "num_critic_epochs"}]
    # ZeRO's optimizer is in parts, and groups are selected by each process from its own.
    keeps_number = args.deepspeed_plugin is not None or args.selects_groups
    return RunDescription(
        structure={
            # Only the product: a run that is short of memory can resume with smaller micro-batches.
            "per_device_train_batch_size × gradient_accumulation_steps × number of processes": (
                args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            ),
            **({PROCESSES: args.world_size} if keeps_number else {}),
            ENGINE: engine if engine in ("FSDP", "DEEPSPEED") else WHOLE,  # each saves its optimizer in its own form
            **{name: values[name] for name in STRUCTURE},
            "num_critic_epochs": args.critic_epochs if args.needs_critic else None,
            "optim": values["optim"],
            PROMPTS: hash_prompts(prompt_maker),
            **hash_frozen_weights(model),
            "tools": None if agents is None else {str(name): pool.schemas for name, pool in agents.pools.items()},
            "peft_config": describe_adapter(peft_config),
            "critic": critic and critic.kind,
            "critic_peft_config": own_adapter and describe_adapter(own_adapter),
        },
        settings={
            **{name: values[name] for name in (*own, *TRAINER_FIELDS)},
            "reward_funcs": reward_funcs,
            PROCESSES: args.world_size,
        },
        date=prompt_maker.date.day.isoformat(),
    )


def hash_prompts(prompt_maker: PromptMaker) -> str | None:
    """Return a hash of the training prompts, or of a stream's first ones."""
    prompts = prompt_maker.prompts.get(TRAIN)
    return None if prompts is None else prompts.head.digest()


def hash_frozen_weights(model: ActorCritic) -> dict[str, str | None]:
    """Return a hash of the base, and one of the reference; None: the reference is the base."""
    base = {name: x for name, x in model.base_model.named_parameters() if not x.requires_grad}
    of_base = [x for name, x in base.items() if REFERENCE not in name.split(".")]
    reference = model.ref_model.parameters() if model.ref_model is not None else base.values()
    return {
        "base (SHA-256 of some of its weights)": fingerprint(of_base),
        "reference (SHA-256 of some of its weights)": None if model.reference_is_base else fingerprint(reference),
    }


def fingerprint(weights: Iterable[Tensor]) -> str:
    """Return a hash of the first numbers of each weight; float32 and bfloat16 copies of a base share it."""
    hashed = hashlib.sha256()
    for weight in weights:
        first = weight.detach().flatten()[:16].cpu().bfloat16()
        hashed.update(first.view(torch.int16).numpy().tobytes())
    return hashed.hexdigest()


def saved_run(checkpoint: str | Path, process: int = 0) -> RunDescription | None:
    """Return the description of the run that wrote a checkpoint; None if it was not a PPOTrainer.

    Args:
        process: whose file is read if it exists, and else that of process 0, which says the same.
    """
    found = [path for n in (process, 0) if (path := state_file(checkpoint, n)).is_file()]
    return RunDescription(**read_state(found[0])["run"]) if found else None


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of a process's JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def starting_values(settings: dict[str, Any]) -> dict[str, Any]:
    """Return β and clips with which a run of these settings begins."""
    low, high = settings["cliprange"], settings["cliprange_high"]
    return {"kl_coef": settings["kl_coef"], "cliprange": low, "cliprange_high": low if high is None else high}


def state_file(checkpoint: str | Path, process: int) -> Path:
    """Return the path of a process's JSON file; the rollout's safetensors file is next to it."""
    return Path(checkpoint) / f"ppo_state_{process}.json"


@dataclass(frozen=True)
class Standing:
    """What a checkpoint of the run has beyond Trainer's files."""

    state: PPOState
    metrics: Sums  # not logged yet
    steps: list[UpdateStep]  # steps made on the rollout in use
    rollout: Rollout | None  # the rollout in use; None if the next one is due
    # The rollout that is sampled ahead, as plain values, and the weights that sample it; None if there is none.
    ahead: tuple[dict[str, Any], Mapping[str, Tensor]] | None


@dataclass(frozen=True)
class PPOCheckpoint:
    """Checks, writes and reads one process's part of a checkpoint."""

    run: RunDescription
    process: int

    def check(self, checkpoint: str | Path) -> None:
        """Log each setting that has changed since the checkpoint.

        Raises:
            ValueError: this run cannot resume from it.
        """
        saved = saved_run(checkpoint, self.process)
        needed = [self.process] if saved is None else self._sources(saved)
        if missing := [path.name for n in needed if not (path := state_file(checkpoint, n)).is_file()]:
            raise ValueError(
                f"{checkpoint} has no {missing[0]}: it was written by another trainer, into another folder, or with "
                "save_only_model=True; to start anew from its weights, pass it as model"
            )
        assert saved is not None
        for name, wanted in self.run.structure.items():
            default = wanted if name == ENGINE else getattr(PPOConfig, name, None)  # newer than the checkpoint
            before, now = find_differences(saved.structure.get(name, default), wanted)
            if before != now:
                raise ValueError(
                    f"{checkpoint} was written with {name}={before!r}, this run has {now!r}, so it cannot resume; set "
                    "it back, or start anew from the checkpoint's weights by passing it as model"
                )
        current = json.loads(json.dumps(self.run.settings))
        for name, now in current.items():
            if (before := saved.settings.get(name, now)) != now:
                logger.warning("resuming with %s=%r, the checkpoint was written with %r", name, now, before)

    def moved_to(self, prompt_maker: PromptMaker) -> "PPOCheckpoint":
        """Return a copy for prompts that were made again for another date."""
        structure = {**self.run.structure, PROMPTS: hash_prompts(prompt_maker)}
        return replace(self, run=replace(self.run, structure=structure, date=prompt_maker.date.day.isoformat()))

    def save(self, checkpoint: str | Path, standing: Standing) -> None:
        """Write the run's state."""
        path, ahead = state_file(checkpoint, self.process), None
        if standing.rollout is not None:
            stored = standing.rollout.stored_tensors()
            # Copies, because with policy_mode="bypass" two fields are one tensor, which safetensors refuses.
            tensors = {name: x.clone(memory_format=torch.contiguous_format) for name, x in stored.items()}
            save_file(tensors, path.with_suffix(".safetensors"))
        if standing.ahead is not None:
            ahead, weights = standing.ahead
            save_file(dict(weights), path.with_suffix(AHEAD))
        content = {
            "run": asdict(self.run),
            "state": asdict(standing.state),
            "metrics": standing.metrics,
            "steps": [asdict(step) for step in standing.steps],
            "rollout": standing.rollout is not None,
            "ahead": ahead,
        }
        path.write_text(json.dumps(content), encoding="utf-8")

    def load(self, checkpoint: str | Path) -> Standing:
        """Read what `save` wrote; this run's β and clips replace the saved ones where their settings have changed."""
        saved = saved_run(checkpoint, self.process)
        assert saved is not None
        paths, moved = [state_file(checkpoint, n) for n in self._sources(saved)], self._has_moved(saved)
        contents = [read_state(path) for path in paths]
        content, metrics, rollout = contents[0], contents[0]["metrics"], None
        if content["rollout"]:
            rollouts = [Rollout(**load_file(path.with_suffix(".safetensors"))) for path in paths]
            rollout = rollouts[0]
            if moved:
                rows = torch.arange(sum(map(len, rollouts)))
                rollout = Rollout.join(rollouts).select(rows[self._own_part(len(rows))])
        if moved:  # the first process continues the sums of all
            metrics = {} if self.process else merge(content["metrics"] for content in contents)
        state = PPOState.from_state_dict(content["state"])
        before, now = (starting_values(run.settings) for run in (saved, self.run))
        state = replace(state, **{name: value for name, value in now.items() if value != before[name]})
        steps = [UpdateStep(**step) for step in content["steps"]]
        ahead = None
        if content.get("ahead") is not None:  # earlier versions had none
            plain = self._own_order([one["ahead"] for one in contents]) if moved else content["ahead"]
            ahead = (plain, load_file(paths[0].with_suffix(AHEAD)))
        return Standing(state, metrics, steps, rollout, ahead)

    def _sources(self, saved: RunDescription) -> list[int]:
        """The processes whose files this one reads: itself, or all if their number has changed."""
        return [*range(saved.settings[PROCESSES])] if self._has_moved(saved) else [self.process]

    def _has_moved(self, saved: RunDescription) -> bool:
        """Return whether the checkpoint was written by another number of processes."""
        now = self.run.settings[PROCESSES]
        return bool(saved.settings.get(PROCESSES, now) != now)

    def _own_part(self, count: int) -> slice:
        """Return this process's part of so many rows or prompts of all processes."""
        size = count // self.run.settings[PROCESSES]
        return slice(self.process * size, (self.process + 1) * size)

    def _own_order(self, plain: list[dict[str, Any]]) -> dict[str, Any]:
        """Return this process's part of the rollout that is sampled ahead, from the parts of all processes."""
        choices = [one["choice"] for one in plain]
        first, end = choices[0]["positions"][0], choices[-1]["positions"][1]
        taken = [choice["positions"][0] - first + i for choice in choices for i in choice["taken"]]
        uniform = [drawn for choice in choices for drawn in choice["uniform"]]
        own = self._own_part(len(taken))
        measures = {} if self.process else merge(choice["measures"] for choice in choices)
        part = {"positions": [first, end], "taken": taken[own], "uniform": uniform[own], "measures": measures}
        return {**plain[0], "choice": {**choices[0], **part}}
