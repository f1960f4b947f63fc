"""Token tables from a checkpoint, for any prompt.

A checkpoint may come from anyone, so only JSON and safetensors are read from it, and nothing in it runs as code. The
base is loaded in the run's dtype, at the revision that the adapter names.
"""

import json
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hfppo.checkpoint import RunDescription, hash_frozen_weights, state_file
from hfppo.collect.collector import Collector
from hfppo.config import PPOConfig
from hfppo.environments.agents import OF_TURNS
from hfppo.generation import configured_sampling, make_sampler
from hfppo.generation.sampler import Sampler, completion_ids, eos_token_ids
from hfppo.models.loading import load_base_of, load_tokenizer
from hfppo.parts import TrainerInputs, load_parts
from hfppo.sample import Turn
from hfppo.saving.checkpoint_folders import find_last_intact
from hfppo.saving.manifest import find_damage
from hfppo.state import PPOState
from hfppo.token_trace.record import Trace
from hfppo.token_trace.table import TokenTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A prompt for a checkpoint, and how to complete and score it."""

    prompt: str
    completion: str | None = None  # the completion to trace; None: sample one
    score: float | None = None  # score of the completion; None: unknown
    seed: int | None = None  # seed of the sampled completion; None: the run's
    chat: bool = False  # whether the prompt is a user's message
    base: str | None = None  # id or path of the base; None: the base that the adapter names
    ref_model: str | None = None  # id or path of the reference; None: the base


@dataclass(frozen=True)
class FixedCompletion(Sampler):
    """A sampler that always returns the same completion."""

    ids: list[int]
    eos_ids: list[int]

    def __call__(
        self, prompts: list[list[int]], seeds: list[int] | None, budgets: list[int] | None = None
    ) -> list[Turn]:
        """See `Sampler`; the log-probs are 0, because nothing was sampled."""
        turn = Turn(self.ids, [0.0] * len(self.ids), truncated=self.ids[-1] not in self.eos_ids)
        return [turn] * len(prompts)


def trace_prompt(checkpoint: str | Path, question: Question) -> tuple[Trace, PPOConfig]:
    """Return the trace of a prompt by the models of a checkpoint, and the settings of its run.

    Args:
        checkpoint: a checkpoint, or the output folder of a run: its last one.
    Raises:
        ValueError: the folder is not a complete checkpoint of PPOTrainer, the base cannot be loaded, or prompt and
            completion are too long for a model.
    """
    folder = find_checkpoint(Path(checkpoint))
    saved = json.loads(state_file(folder, 0).read_text(encoding="utf-8"))
    state, run = PPOState.from_state_dict(saved["state"]), RunDescription(**saved["run"])
    step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    peft_config = PeftConfig.from_pretrained(str(folder))
    peft_config.inference_mode = False
    base = load_base(folder, peft_config, run, question)
    eos_ids = eos_token_ids(tokenizer, base.generation_config)
    written = None if question.completion is None else completion_ids(question.completion, tokenizer, eos_ids)
    args = rebuild_settings(run, question, written)
    prompt = [{"role": "user", "content": question.prompt}] if question.chat else question.prompt
    inputs = TrainerInputs(
        model=base,
        reward_funcs=lambda completions, **_: [question.score] * len(completions),
        args=args,
        eval_dataset=Dataset.from_dict({"prompt": [prompt]}),
        processing_class=tokenizer,
        peft_config=peft_config,
        ref_model=question.ref_model,
        critic=str(folder),
        date=run.run_date,
    )
    parts = load_parts(inputs)
    parts.model.load_adapter(str(folder), "default", is_trainable=True)
    for part, found in hash_frozen_weights(parts.model).items():
        if run.structure[part] != found:
            logger.warning("%s is not the run's, unless that was quantised; give --base or --ref_model", part)
    model, accelerator = parts.model.to(args.device), Accelerator(mixed_precision=mixed_precision(run))
    sampler = make_sampler(model, args, accelerator, configured_sampling(args, tokenizer, parts.eos_ids))
    if written is not None:
        sampler = FixedCompletion(written, parts.eos_ids)
    collector = Collector(model, sampler, parts.rewards, tokenizer, accelerator, args)
    rows = collector.eval_rows(parts.prompt_maker.prompts["eval_dataset"].head)
    rollout = collector.collect(rows, state, TrainerState(), training=False).rollout
    table = TokenTable.from_rollout(rollout, 0, tokenizer, args.reward_kl_estimator)
    if question.score is None:
        table = remove_score(table)
    return Trace.from_rollout(rollout, 0, table, state.rollouts, step, state.kl_coef), args


def find_checkpoint(folder: Path) -> Path:
    """Return a checkpoint, or the last complete one of an output folder.

    Raises:
        ValueError: the folder is not a complete checkpoint of PPOTrainer, and contains none.
    """
    damage = find_damage(folder)
    if damage is None and not state_file(folder, 0).is_file():
        damage = f"has no {state_file(folder, 0).name}"
    if damage is None:
        return folder
    if (last := find_last_intact(folder)) is not None:
        return find_checkpoint(Path(last))
    raise ValueError(
        f"{folder} is not a whole checkpoint of PPOTrainer: it {damage}; give a whole one, such as out/checkpoint-120"
    )


def load_base(folder: Path, config: PeftConfig, run: RunDescription, question: Question) -> PreTrainedModel:
    """Load the base of a checkpoint, in the dtype that the run asked for.

    Args:
        config: the configuration of the checkpoint's adapter.
    Raises:
        ValueError: it cannot be loaded.
    """
    if question.base is not None:
        config = replace(config, base_model_name_or_path=question.base, revision=None)
    weights = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    dtype = (run.settings["model_init_kwargs"] or {}).get("dtype", "auto")
    try:
        return load_base_of(str(folder), config, weights, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the base {config.base_model_name_or_path!r} of {folder} cannot be loaded; start in the folder that "
            f"the path is relative to, or give --base ({error})"
        ) from error


def mixed_precision(run: RunDescription) -> str:
    """Return the autocast of a run; on a CPU, which has none in float16, "no" in its place."""
    if run.settings["bf16"]:
        return "bf16"
    return "fp16" if run.settings["fp16"] and torch.cuda.is_available() else "no"


def rebuild_settings(run: RunDescription, question: Question, written: list[int] | None) -> PPOConfig:
    """Return the settings of a checkpoint's run that matter to a rollout of one prompt.

    Args:
        written: token ids of a given completion.
    """
    known = {f.name for f in fields(PPOConfig)} - {f.name for f in fields(TrainingArguments)} | {"seed"}
    values = {name: value for name, value in {**run.settings, **run.structure}.items() if name in known}
    values |= dict.fromkeys(OF_TURNS)  # one turn, without tools and environments
    values |= {
        "model_init_kwargs": None,
        "policy_mode": "decoupled",  # log π_old is this model's, whichever sampler the run had
        "use_vllm": False,
        "reward_weights": None,  # the given score is the only reward
        "total_episodes": None,  # depends on the batch size, which is replaced
        "per_device_train_batch_size": values["num_generations"],  # divides into groups
        "max_completion_length": values["max_completion_length"] if written is None else len(written),
        "seed": values["seed"] if question.seed is None else question.seed,
        "output_dir": ".",
        "report_to": "none",
    }
    return PPOConfig(**values)


def remove_score(table: TokenTable) -> TokenTable:
    """Return a copy of a table without the score and the numbers computed from it."""
    rows = [replace(row, reward=None, td_error=None, return_=None, advantage=None, counted=True) for row in table.rows]
    return replace(table, score=None, rows=rows)
