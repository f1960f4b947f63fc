"""The model card of a run: the README.md of what is saved and pushed.

PEFT writes the metadata that it knows (library, base model, tags) into whatever card is there; what the run has to say
is written around it. A card is written anew each time, except that its metadata keep what nothing here decides: a
license or a tag that was added by hand stays.
"""

import html
import json
import math
import re
import shlex
import sys
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, get_token
from huggingface_hub.utils import yaml_dump
from peft import PeftModel
from transformers import TrainerState
from transformers.modelcard import TrainingSummary
from transformers.utils import is_in_notebook

from hfppo.config import PPOConfig
from hfppo.models.critic import CRITIC_FOLDER
from hfppo.saving.adapter_card import CARD, as_list, is_repository, read_card
from hfppo.support.secrets import hide_in_command, hide_in_text

TAGS = ("ppo", "hfppo", "reinforcement-learning", "generated_from_trainer")
PACKAGES = ("hfppo", "transformers", "torch", "datasets")  # PEFT adds itself

# Fields that say where and how a run goes, not what it learns; matched by the beginning of their names.
NOT_SHOWN = (
    *("output_dir", "run_name", "project", "trackio_", "report_to", "log_", "logging_", "disable_tqdm", "debug"),
    *("push_to_hub", "hub_", "save_", "resume_from_checkpoint", "do_", "local_r", "use_cpu", "accelerator_config"),
    *("dataloader_", "ddp_", "gradient_checkpointing", "activation_checkpointing"),
)
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
        repo_id: where the folder is pushed to, for the code that loads it.
        chat: whether the prompts are lists of messages.
        given: `language`, `license`, `tags`, `model_name`, `finetuned_from`, `tasks`, `dataset_tags`, `dataset` and
            `dataset_args`, as `transformers.Trainer.create_model_card` takes them.
    """
    before = read_card(folder)
    name = given.pop("model_name", None) or Path(args.output_dir).absolute().name
    evaluations = last_evaluations(state, args)
    data = metadata(before, name, given, evaluations, model.config.name_or_path)
    sections = [
        f"# {plain(name)}",
        about(folder, data, model),
        loading(repo_id or name, args, chat),
        evaluation_table(evaluations),
        steps(args, state),
        rewards_table(reward_weights),
        configuration(args),
        command(),
        "### Framework versions\n\n" + "\n".join(f"- {package} {version(package)}" for package in PACKAGES),
    ]
    secrets = [secret for secret in (args.hub_token, get_token()) if secret]
    text = hide_in_text("\n\n".join(section for section in sections if section), secrets)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n", ignore_metadata_errors=True)
    Path(folder).mkdir(parents=True, exist_ok=True)
    card.save(Path(folder) / CARD)
    model.create_or_update_model_card(str(folder))


def metadata(
    before: Any, name: str, given: dict[str, Any], evaluations: list[Evaluation], base: str | None
) -> ModelCardData:
    """The YAML block, but for what PEFT puts in."""
    kept = {} if before is None else before.data.to_dict()
    for made_anew in ("model-index", "model_name"):
        kept.pop(made_anew, None)
    base = base if is_repository(base) else None
    summary = TrainingSummary(  # which looks the base's license up
        name,
        **{
            **given,
            "license": given.get("license") or kept.get("license"),
            "finetuned_from": given.get("finetuned_from") or base,
            "tags": [*as_list(given.get("tags")), *as_list(kept.get("tags")), *TAGS],
        },
    )
    data = {**kept, **summary.create_metadata(), "library_name": "peft"}
    del data["model-index"]  # made for metrics of classification
    results = eval_results(as_list(summary.dataset), as_list(data.get("datasets")), evaluations)
    return ModelCardData(**data, model_name=name, eval_results=results, ignore_metadata_errors=True)


def eval_results(names: list[str], ids: list[str], evaluations: list[Evaluation]) -> list[EvalResult] | None:
    """The evaluation named "eval" as the Hub indexes it, which asks for a dataset's id."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=ids[0],
            dataset_name=[*names, *ids][0],
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
        )
        for evaluation in evaluations
        if evaluation.name == "eval" and ids
        for metric, value in evaluation.metrics.items()
        if math.isfinite(value) and "/" not in metric
    ] or None


def last_evaluations(state: TrainerState, args: PPOConfig) -> list[Evaluation]:
    """The last evaluation under each name, of the weights that are saved."""
    history = state.log_history
    end = max((i for i, entry in enumerate(history) if "train_runtime" in entry), default=None)
    best = best_step(state, args)
    found: dict[str, Evaluation] = {}
    for i, entry in enumerate(history):
        if best is not None and i < end and entry["step"] != best:
            continue  # of weights that were put aside for the best ones
        for key in entry:
            name = key.removesuffix("_samples_per_second")
            if name == key or name == "train":
                continue
            metrics = {k.removeprefix(f"{name}_"): v for k, v in entry.items() if k.startswith(f"{name}_")}
            numbers = {k: v for k, v in metrics.items() if k not in SPEED and isinstance(v, int | float)}
            found.pop(name, None)  # to stand last
            found[name] = Evaluation(name, int(entry["step"]), numbers)
    return list(found.values())


def best_step(state: TrainerState, args: PPOConfig) -> int | None:
    """The step whose weights Trainer took back at the end of training, if it did.

    It takes back the best one that was saved; `best_global_step` may be a later one.
    """
    ended = any("train_runtime" in entry for entry in state.log_history)
    if not (ended and args.load_best_model_at_end and state.best_model_checkpoint):
        return None
    return int(state.best_model_checkpoint.rpartition("-")[2])


def about(folder: str | Path, data: ModelCardData, model: PeftModel) -> str:
    """What this is, and what else lies beside it."""
    kind = model.active_peft_config.peft_type.value.replace("LORA", "LoRA")
    base = data.get("base_model")
    if is_repository(base):
        of = f"[{plain(base)}](https://huggingface.co/{base})."
    else:
        name = code(type(model.get_base_model()).__name__)
        of = f"a {name} that is not on the Hub: loading needs it where `adapter_config.json` says."
    lines = [
        f"A {kind} adapter for {of} It was trained with Proximal Policy Optimization "
        "([PPO](https://arxiv.org/abs/1707.06347)) by hfppo."
    ]
    if (Path(folder) / CRITIC_FOLDER).is_dir():
        lines.append(f"The critic lies in `{CRITIC_FOLDER}/`; only training on needs it.")
    return " ".join(lines)


def steps(args: PPOConfig, state: TrainerState) -> str:
    """How long the training took, and which weights are saved."""
    text = f"{state.global_step} optimiser steps"
    if args.world_size > 1:
        text += f" on {args.world_size} processes"
    if (best := best_step(state, args)) is not None:
        text += f"; the weights are those after step {best}, the best by {code(args.metric_for_best_model)}"
    return f"## Training procedure\n\n{text}."


def loading(name: str, args: PPOConfig, chat: bool) -> str:
    """Code that loads the adapter and completes a prompt, without this package."""
    if chat:
        options = args.to_dict()["chat_template_kwargs"] or {}  # without secrets
        inputs = "\n".join(
            (
                'messages = [{"role": "user", "content": "…"}]',
                "inputs = tokenizer.apply_chat_template(",
                '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt",',
                *(f"    {option}={value!r}," for option, value in options.items()),
                ")",
            )
        )
    else:
        inputs = 'inputs = tokenizer("…", return_tensors="pt")'
    source = json.dumps(name, ensure_ascii=False)
    lines = (
        "from peft import AutoPeftModelForCausalLM",
        "from transformers import AutoTokenizer",
        "",
        f"model = AutoPeftModelForCausalLM.from_pretrained({source})",
        f"tokenizer = AutoTokenizer.from_pretrained({source})",
        inputs,
        f"output = model.generate(**inputs, max_new_tokens={args.max_completion_length})",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    )
    return "## How to load it\n\n" + fenced("\n".join(lines), "python")


def rewards_table(weights: dict[str, float]) -> str:
    """The reward functions."""
    return "### Rewards\n\n" + table(
        ["function", "weight"], [[code(name), number(weight)] for name, weight in weights.items()]
    )


def evaluation_table(evaluations: list[Evaluation]) -> str:
    """A column per evaluation, a row per metric."""
    if not evaluations:
        return ""
    heading = ["metric", *(f"{code(evaluation.name)}, step {evaluation.step}" for evaluation in evaluations)]
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)
    rows = [
        [code(name), *(number(evaluation.metrics.get(name)) for evaluation in evaluations)] for name in sorted(names)
    ]
    return "## Evaluation\n\n" + table(heading, rows)


def configuration(args: PPOConfig) -> str:
    """The fields that were set, as YAML that the recipes take."""
    values = json.loads(json.dumps(args.to_dict(), default=str))
    changed = {
        field.name: values[field.name]
        for field in fields(args)
        if field.init and not field.name.startswith(NOT_SHOWN) and values[field.name] != default_of(field)
    }
    intro = "### Configuration\n\nThe fields of `PPOConfig` that are not at their defaults:\n\n"
    return intro + fenced(yaml_dump(changed).strip(), "yaml")


def default_of(field: Field) -> Any:
    """A field's default as `to_dict` has it."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return value.value if isinstance(value, Enum) else value


def command() -> str:
    """How Python was started on each process, with a line for each option."""
    words = list(sys.orig_argv[1:])
    if not words or "-c" in words[:2] or is_in_notebook():
        return ""
    lines = ["python"]
    for word in hide_in_command([word for word in words if word != "-u"]):
        if word.startswith("--"):
            lines.append(f"    {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return "### Command\n\n" + fenced(" \\\n".join(lines), "bash")


def plain(text: Any) -> str:
    """Text as one line that Markdown shows to the letter."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#~|$])", r"\\\1", line)


def code(text: Any) -> str:
    """Text as a code span where that cannot break, else as plain text."""
    return f"`{text}`" if re.fullmatch(r"[\w./:,=+@-]([\w ./:,=+@-]*[\w./:,=+@-])?", str(text)) else plain(text)


def number(value: float | None) -> str:
    """Four digits, or nothing."""
    return "" if value is None else f"{value:.4g}"


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with numbers to the right."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
