"""Token tables from a checkpoint, for any prompt.

A checkpoint may come from anyone, so only JSON and safetensors are read from it, and nothing in it runs as code. The
base is loaded in the run's dtype, at the revision that the adapter names.
"""

import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hfppo.checkpoint import RunDescription, hash_frozen_weights, read_state, state_file
from hfppo.config import PPOConfig
from hfppo.data.chat_template import CLOCK
from hfppo.environments.agents import OF_TURNS
from hfppo.generation.sampler import Sampler, completion_ids, eos_token_ids
from hfppo.models.loading import load_base_of, load_tokenizer, name_in_errors
from hfppo.reporting.traces import Trace, first_traces
from hfppo.sample import Ids, Turn
from hfppo.saving.checkpoint_folders import find_last_intact
from hfppo.saving.manifest import find_damage
from hfppo.state import PPOState
from hfppo.trainer import PPOTrainer

logger = logging.getLogger(__name__)

# Settings that a trace does not have. It has one turn of `generate`, log π_old is this model's, and the given score is
# the only reward. Models are loaded already. A run's length depends on its batch size.
LEFT_OUT = {
    *OF_TURNS, "use_vllm", "rollouts_ahead", "policy_mode", "reward_weights", "model_init_kwargs", "total_episodes",
}  # fmt: skip


@dataclass(frozen=True)
class FixedCompletion(Sampler):
    """A sampler that always returns the same completion."""

    ids: list[int]  # EOS included

    def __call__(self, prompts: list[Ids], seeds: list[int] | None, budgets: list[int] | None = None) -> list[Turn]:
        """See `Sampler`; the log-probs are 0, because nothing was sampled."""
        return [Turn(self.ids, [0.0] * len(self.ids))] * len(prompts)


def trace_prompt(
    checkpoint: str | Path,
    prompt: str,
    *,
    critic_prompt: str | None = None,
    completion: str | None = None,
    score: float | None = None,
    seed: int | None = None,
    chat: bool = False,
    base: str | None = None,
    ref_model: str | None = None,
) -> tuple[Trace, PPOConfig]:
    """Return the trace of a prompt by the models of a checkpoint, and the settings of its run.

    Args:
        checkpoint: a checkpoint, or the output folder of a run: its last one.
        critic_prompt: what a critic that was trained with such a column reads in place of the prompt.
        completion: the completion to trace; None: sample one.
        score: score of the completion; None: unknown.
        seed: seed of the sampled completion; None: the run's.
        chat: whether the prompt is a user's message.
        base: id or path of the base; None: the base that the adapter names.
        ref_model: id or path of the reference; None: the base.
    Raises:
        ValueError: the folder is not a complete checkpoint of PPOTrainer, the base cannot be loaded, or prompt and
            completion are too long for a model.
    """
    folder = find_checkpoint(Path(checkpoint))
    saved = read_state(state_file(folder, 0))
    state, run = PPOState.from_state_dict(saved["state"]), RunDescription(**saved["run"])
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    peft_config = PeftConfig.from_pretrained(str(folder))
    peft_config.inference_mode = False
    model = load_base(folder, peft_config, run, base)
    changes: dict[str, Any] = {} if seed is None else {"seed": seed}
    if completion is not None:
        written = completion_ids(completion, tokenizer, eos_token_ids(tokenizer, model.generation_config))
        changes["max_completion_length"] = len(written)
    given = {"prompt": prompt, **({} if critic_prompt is None else {"critic_prompt": critic_prompt})}
    asked: dict[str, Any] = {name: [[{"role": "user", "content": x}] if chat else x] for name, x in given.items()}
    with TemporaryDirectory() as output_dir:  # nothing is written into it, but Trainer makes the folder
        trainer = PPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [score] * len(completions),
            args=TraceConfig(output_dir=output_dir, **{**rollout_settings(run), **changes}),
            eval_dataset=Dataset.from_dict(asked),
            processing_class=tokenizer,
            peft_config=peft_config,
            ref_model=ref_model,
            critic=str(folder),
        )
        trainer.ppo_state = state
        trainer.model.load_adapter(str(folder), "default", is_trainable=True)
        for part, found in hash_frozen_weights(trainer.model).items():
            if run.structure[part] != found:
                logger.warning("%s is not the run's, unless that was quantised; give --base or --ref_model", part)
        if completion is not None:
            trainer.collector = replace(trainer.collector, sampler=FixedCompletion(written))
        rollout = trainer.rollout(asked.pop("prompt"), **asked)
    step = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    (trace,) = first_traces(rollout, 1, tokenizer, trainer.args, state, step, "prompts")
    return trace if score is not None else remove_score(trace), trainer.args


def find_checkpoint(folder: Path) -> Path:
    """Return a checkpoint, or the last complete one of an output folder.

    Raises:
        ValueError: the folder is not a complete checkpoint of PPOTrainer, and contains none.
    """
    state = state_file(folder, 0)
    damage = find_damage(folder) or (None if state.is_file() else f"has no {state.name}")
    if damage is None:
        return folder
    if (last := find_last_intact(folder)) is not None:
        return find_checkpoint(Path(last))
    raise ValueError(
        f"{folder} is not a whole checkpoint of PPOTrainer: it {damage}; give a whole one, such as out/checkpoint-120"
    )


def load_base(folder: Path, config: PeftConfig, run: RunDescription, base: str | None) -> PreTrainedModel:
    """Load the base of a checkpoint, in the dtype that the run asked for.

    Args:
        config: the configuration of the checkpoint's adapter.
        base: id or path of another base.
    Raises:
        ValueError: it cannot be loaded.
    """
    if base is not None:
        config = replace(config, base_model_name_or_path=base, revision=None)
    weights = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    dtype = (run.settings["model_init_kwargs"] or {}).get("dtype", "auto")
    advice = "start in the folder that the path is relative to, or give --base"
    with name_in_errors(f"the base of {folder}, base_model_name_or_path", config.base_model_name_or_path, advice):
        return load_base_of(str(folder), config, weights, dtype=dtype, trust_remote_code=False)


class TraceConfig(PPOConfig):
    """The settings of a trace, which uses one GPU, however many there are."""

    n_gpu = 1


def rollout_settings(run: RunDescription) -> dict[str, Any]:
    """Return the settings of a checkpoint's run that matter to a rollout of one prompt."""
    inherited = {f.name for f in fields(TrainingArguments)} - {"bf16", "fp16", "seed"}
    saved = {**run.settings, **run.structure}
    values = {f.name: saved[f.name] for f in fields(PPOConfig) if f.name in saved.keys() - inherited - LEFT_OUT}
    values["policy_mode"] = "decoupled"
    values["chat_template_kwargs"] = {CLOCK: run.run_date, **(values.get("chat_template_kwargs") or {})}
    values["fp16"] = values["fp16"] and torch.cuda.is_available()  # a CPU has no autocast in float16
    values["use_cpu"] = not torch.accelerator.is_available()  # Trainer asks for it with bf16
    values["per_device_train_batch_size"] = values["num_generations"]  # divides into groups
    return values


def remove_score(trace: Trace) -> Trace:
    """Return a copy of a trace without the score and the numbers computed from it."""
    tokens = len(trace.completion_ids)
    unknown = dict.fromkeys(("reward", "td_error", "return_", "advantage"), [None] * tokens)
    return replace(trace, score=None, columns=trace.columns | unknown | {"counted": [True] * tokens})
