"""Write the model card of a run, the README.md of the saved and pushed folder.

The text comes from `card_template.md` and is rewritten each time. Other metadata are kept, such as a license or a tag
that was added by hand.
"""

import html
import json
import math
import re
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeGuard, cast

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import HFValidationError, validate_repo_id, yaml_dump
from transformers import Trainer, TrainerState
from transformers.modelcard import TrainingSummary

import hfppo
from hfppo.config import PPOConfig
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import CRITIC_FOLDER
from hfppo.support.log_entries import numbers_of

REWARD_CURVE = "reward.svg"
TEMPLATE = Path(__file__).with_name("card_template.md")
TAGS = ("ppo", "hfppo", "reinforcement-learning", "generated_from_trainer", "transformers")
PACKAGES = ("transformers", "peft", "accelerate", "torch", "datasets")

# Prefixes of fields about what one process writes, reads or shows, and of all fields that do not change the result.
OUTPUT = (
    "output_dir", "run_name", "project", "trackio_", "report_to", "log_", "disable_tqdm", "debug", "push_to_hub",
    "hub_", "resume_from_checkpoint", "local_r", "dataloader_",
)  # fmt: skip
NOT_SHOWN = (
    *OUTPUT, "logging_", "save_", "do_", "use_cpu", "accelerator_config", "ddp_", "gradient_checkpointing",
    "activation_checkpointing", "include_for_metrics",
)  # fmt: skip
SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def write_card(
    trainer: Trainer, folder: Path, reward_weights: dict[str, float], chat: bool, ask_hub: bool, **given: Any
) -> None:
    """Write the model card of a run into a folder.

    Args:
        reward_weights: the reward functions' names and weights.
        chat: whether the prompts are lists of messages.
        ask_hub: whether to ask the Hub for the license of the base.
        given: the keywords of `transformers.Trainer.create_model_card`, such as `tags` and `license`.
    """
    model, args, state = cast(ActorCritic, trainer.model), cast(PPOConfig, trainer.args), trainer.state
    name = given.pop("model_name", None) or Path(args.output_dir).absolute().name
    evaluations = last_evaluations(state, args)
    path, method = folder / REPOCARD_NAME, model.active_peft_config.peft_type.value
    before = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path.is_file() else {}
    data = build_metadata(before, name, method, given, model.config.name_or_path, ask_hub)
    configuration = yaml_dump(changed_settings(args)).strip()
    folder.mkdir(parents=True, exist_ok=True)
    if curve := draw_reward(state.log_history):
        (folder / REWARD_CURVE).write_text(curve, encoding="utf-8")
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        escape=escape,
        title=name,
        adapter=method.replace("LORA", "LoRA"),
        base=data.base_model,
        architecture=type(model.get_base_model()).__name__,
        critic_folder=None if model.critic is None else CRITIC_FOLDER,
        privileged=model.critic is not None and model.critic.privileged,
        source=json.dumps(trainer.hub_model_id or folder.absolute().name, ensure_ascii=False),
        chat=chat,
        chat_options={option: repr(x) for option, x in cast(dict, args.chat_template_kwargs or {}).items()},
        args=args,
        evaluations=evaluations,
        metrics=sorted({metric for evaluation in evaluations.values() for metric in evaluation} - {"step"}),
        global_step=state.global_step,
        best_step=best_step(state, args),
        rewards=reward_weights,
        configuration=configuration,
        fence="`" * (3 + configuration.count("`")),  # longer than any fence inside
        versions=installed_versions(),
        curve=REWARD_CURVE if curve else None,
    )
    card.save(path)


def draw_reward(history: list[dict[str, float]]) -> str | None:
    """Return the reward by optimizer steps as an SVG picture; None without two finite rewards that differ."""
    numbers = [(x["step"], x["reward"]) for x in map(numbers_of, history) if math.isfinite(x.get("reward", math.nan))]
    steps, rewards = zip(*numbers, strict=True) if numbers else ((), ())
    if len(set(steps)) < 2 or len(set(rewards)) < 2:
        return None
    low, high, first, last = min(rewards), max(rewards), min(steps), max(steps)
    points = (
        f"{60 + 520 * (x - first) / (last - first):.1f},{150 - 130 * (y - low) / (high - low):.1f}" for x, y in numbers
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 180" font-family="sans-serif" font-size="12">'
        f'<g fill="gray"><text x="2" y="24">{high:.3g}</text><text x="2" y="154">{low:.3g}</text>'
        f'<text x="60" y="172">reward per completion, steps {first} to {last}</text></g>'
        f'<polyline fill="none" stroke="#2b74be" stroke-width="2" points="{points}"/></svg>'
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of hfppo and of `PACKAGES`."""
    return {"hfppo": hfppo.__version__, **{package: version(package) for package in PACKAGES}}


def escape(text: object) -> str:
    """Return text as one line without markup, for Markdown and its tables."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#~|$])", r"\\\1", line)


def changed_settings(args: PPOConfig) -> dict[str, Any]:
    """Return the settings that change the result and are not at their defaults, as plain values without secrets."""
    plain = json.loads(json.dumps(args.to_dict(), default=str))
    changed = [f for f in fields(args) if f.init and getattr(args, f.name) != f.default]
    unset = {f.name for f in changed if f.default is None and plain[f.name] is False}  # None became False
    return {f.name: plain[f.name] for f in changed if f.name not in unset and not f.name.startswith(NOT_SHOWN)}


def build_metadata(
    kept: dict[str, Any], name: str, method: str, given: dict[str, Any], base: str | None, ask_hub: bool
) -> ModelCardData:
    """Return the metadata of the card.

    The Hub refuses a base model that is not one of its repositories (huggingface/transformers#33922).

    Args:
        kept: the metadata of the card before.
        method: PEFT's name of the adapter's method.
    """
    bases = (given.get("finetuned_from"), base, kept.pop("base_model", None))
    base = next(filter(is_repository, bases), None)
    tags = {*TAGS, method.lower(), *as_list(kept.get("tags")), *as_list(given.get("tags"))}
    tags = {tag for tag in tags if not tag.startswith("base_model:")}
    given = {
        **given,
        "license": given.get("license") or kept.get("license"),
        "finetuned_from": base if ask_hub else None,
        "tags": sorted(tags if base is None else {*tags, f"base_model:adapter:{base}"}),
    }
    made = TrainingSummary(name, **given).create_metadata()  # asks the Hub for the license of the base
    data = {**kept, **made, "base_model": base, "library_name": "peft", "pipeline_tag": "text-generation"}
    del data["model-index"]  # made for metrics of classification
    return ModelCardData(**data, ignore_metadata_errors=True)


def is_repository(name: object) -> TypeGuard[str]:
    """Return whether a name may be a Hub repository: it has the right form and is not a local folder."""
    if not isinstance(name, str) or not name or Path(name).is_dir():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def as_list(value: str | list[str] | None) -> list[str]:
    """Return None as an empty list, and a string as a list of one."""
    return [value] if isinstance(value, str) else value or []


def last_evaluations(state: TrainerState, args: PPOConfig) -> dict[str, dict[str, float]]:
    """Return step and metrics of the last evaluation of the saved weights, by Trainer's `metric_key_prefix`."""
    history, best, rate = state.log_history, best_step(state, args), "_samples_per_second"
    end = max((i for i, entry in enumerate(history) if "train_runtime" in entry), default=0)
    found: dict[str, dict[str, float]] = {}
    for i, entry in enumerate(history):
        if best is not None and i < end and entry["step"] != best:
            continue  # the best weights have replaced these
        for name in (key.removesuffix(rate) for key in entry if key.endswith(rate) and not key.startswith("train_")):
            numbers = numbers_of(entry)
            metrics = {key.removeprefix(f"{name}_"): x for key, x in numbers.items() if key.startswith(f"{name}_")}
            found[name] = {"step": entry["step"], **{k: x for k, x in metrics.items() if k not in SPEED}}
    return found


def best_step(state: TrainerState, args: PPOConfig) -> int | None:
    """Return the step of the weights that Trainer loaded at the end of training; None if it loaded none.

    Trainer loads the best checkpoint; `best_global_step` may be a step without a checkpoint.
    """
    ended = any("train_runtime" in entry for entry in state.log_history)
    if not (ended and args.load_best_model_at_end and state.best_model_checkpoint):
        return None
    return int(state.best_model_checkpoint.rpartition("-")[2])
