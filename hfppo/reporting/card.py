"""Write the model card of a run, the README.md of the saved and pushed folder.

The text comes from `card_template.md` and is written anew each time. Other metadata are kept, such as a license or a
tag that was added by hand. PEFT adds library, base model, tags and its version.
"""

import html
import json
import re
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import yaml_dump
from peft import PeftModel
from transformers import TrainerState
from transformers.modelcard import TrainingSummary

from hfppo.config import PPOConfig
from hfppo.models.adapter_card import CARD, as_list, is_repository, read_card
from hfppo.models.critic import CRITIC_FOLDER

TEMPLATE = Path(__file__).with_name("card_template.md")
TAGS = ("ppo", "hfppo", "reinforcement-learning", "generated_from_trainer")
PACKAGES = ("hfppo", "transformers", "torch", "datasets")  # PEFT adds itself

# Prefixes of fields that do not change the result.
NOT_SHOWN = (
    "output_dir", "run_name", "project", "trackio_", "report_to", "log_", "logging_", "disable_tqdm", "debug",
    "push_to_hub", "hub_", "save_", "resume_from_checkpoint", "do_", "local_r", "use_cpu", "accelerator_config",
    "dataloader_", "ddp_", "gradient_checkpointing", "activation_checkpointing", "include_for_metrics",
)  # fmt: skip
SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation."""

    name: str  # Trainer's `metric_key_prefix`
    step: int
    metrics: dict[str, float]


def write_card(
    folder: str | Path,
    model: PeftModel,
    args: PPOConfig,
    state: TrainerState,
    reward_weights: dict[str, float],
    repo_id: str | None = None,
    chat: bool = False,
    **given: Any,
) -> None:
    """Write the model card of a run into a folder.

    Args:
        reward_weights: the reward functions' names and weights.
        repo_id: the repository that the folder is pushed to, for the code that loads it.
        chat: whether the prompts are lists of messages.
        given: `language`, `license`, `tags`, `model_name`, `finetuned_from`, `tasks`, `dataset_tags`, `dataset` and
            `dataset_args`, as `transformers.Trainer.create_model_card` takes them.
    """
    folder = Path(folder)
    name = given.pop("model_name", None) or Path(args.output_dir).absolute().name
    evaluations = last_evaluations(state, args)
    data = build_metadata(read_card(folder), name, given, model.config.name_or_path)
    base = data.get("base_model")
    settings = json.loads(json.dumps(args.to_dict(), default=str))
    chat_options = {option: repr(value) for option, value in (settings["chat_template_kwargs"] or {}).items()}
    configuration = yaml_dump(changed_settings(args, settings)).strip()
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=escape(name),
        adapter=model.active_peft_config.peft_type.value.replace("LORA", "LoRA"),
        base=base if is_repository(base) else None,
        architecture=escape(type(model.get_base_model()).__name__),
        critic_folder=CRITIC_FOLDER if (folder / CRITIC_FOLDER).is_dir() else None,
        source=json.dumps(repo_id or name, ensure_ascii=False),
        chat_options=chat_options if chat else None,
        max_new_tokens=args.max_completion_length,
        evaluations=[replace(evaluation, name=escape(evaluation.name)) for evaluation in evaluations],
        metrics={metric: escape(metric) for metric in sorted({m for e in evaluations for m in e.metrics})},
        global_step=state.global_step,
        world_size=args.world_size,
        best_step=best_step(state, args),
        best_metric=escape(args.metric_for_best_model),
        rewards=[(escape(function), weight) for function, weight in reward_weights.items()],
        configuration=configuration,
        fence="`" * (3 + configuration.count("`")),  # longer than any fence inside
        versions={package: version(package) for package in PACKAGES},
    )
    folder.mkdir(parents=True, exist_ok=True)
    card.save(folder / CARD)
    model.create_or_update_model_card(str(folder))


def escape(text: Any) -> str:
    """Return text as one line without markup, for Markdown and its tables."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#~|$])", r"\\\1", line)


def changed_settings(args: PPOConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not at their defaults and that can change the result."""
    changed = (field for field in fields(args) if field.init and getattr(args, field.name) != field.default)
    return {field.name: settings[field.name] for field in changed if not field.name.startswith(NOT_SHOWN)}


def build_metadata(before: Any, name: str, given: dict[str, Any], base: str | None) -> ModelCardData:
    """Return the metadata of the card, except for PEFT's."""
    kept = {} if before is None else before.data.to_dict()
    kept.pop("model-index", None)
    summary = TrainingSummary(  # asks the Hub for the license of the base
        name,
        **{
            **given,
            "license": given.get("license") or kept.get("license"),
            "finetuned_from": given.get("finetuned_from") or (base if is_repository(base) else None),
            "tags": [*as_list(given.get("tags")), *as_list(kept.get("tags")), *TAGS],
        },
    )
    data = {**kept, **summary.create_metadata(), "library_name": "peft"}
    del data["model-index"]  # made for metrics of classification
    return ModelCardData(**data, ignore_metadata_errors=True)


def last_evaluations(state: TrainerState, args: PPOConfig) -> list[Evaluation]:
    """Return the last evaluation under each name, if it belongs to the saved weights."""
    history = state.log_history
    end = max((i for i, entry in enumerate(history) if "train_runtime" in entry), default=None)
    best = best_step(state, args)
    found: dict[str, Evaluation] = {}
    for i, entry in enumerate(history):
        if best is not None and i < end and entry["step"] != best:
            continue  # these weights were replaced by the best ones
        for key in entry:
            name = key.removesuffix("_samples_per_second")
            if name == key or name == "train":
                continue
            metrics = {k.removeprefix(f"{name}_"): v for k, v in entry.items() if k.startswith(f"{name}_")}
            numbers = {k: v for k, v in metrics.items() if k not in SPEED and isinstance(v, int | float)}
            found.pop(name, None)  # so that the latest comes last
            found[name] = Evaluation(name, int(entry["step"]), numbers)
    return list(found.values())


def best_step(state: TrainerState, args: PPOConfig) -> int | None:
    """Return the step of the weights that Trainer loaded at the end of training; None if it loaded none.

    Trainer loads the best checkpoint; `best_global_step` may be a step without a checkpoint.
    """
    ended = any("train_runtime" in entry for entry in state.log_history)
    if not (ended and args.load_best_model_at_end and state.best_model_checkpoint):
        return None
    return int(state.best_model_checkpoint.rpartition("-")[2])
