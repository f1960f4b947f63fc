"""What the models in a checkpoint say about a prompt.

A checkpoint may come from anyone. Only JSON and safetensors are read from it, so that nothing in it runs as code; of
the arguments its run loaded the base with, the dtype alone is taken over, and the revision that the adapter names.
"""

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftConfig, PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from hfppo.collect.collector import Collector
from hfppo.config import PPOConfig
from hfppo.generation import Completions, Sampler, eos_token_ids, make_sampler
from hfppo.metrics import Meter
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import CRITIC_CONFIG, CRITIC_FOLDER, CRITIC_WEIGHTS, find_critic
from hfppo.models.loading import load_reference
from hfppo.ppo_checkpoint import RunDescription, hash_frozen_weights, state_file
from hfppo.rewards.functions import RewardFunctions
from hfppo.run_state import PPOState
from hfppo.saving.folders import list_checkpoints
from hfppo.setup import check_lengths, prompts_of
from hfppo.token_trace.record import Trace, traces_of
from hfppo.token_trace.table import TokenTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What is asked of a checkpoint."""

    prompt: str
    completion: str | None = None  # a completion to look at; None: the policy makes one
    score: float | None = None  # what the completion is taken to earn; None: not known
    seed: int | None = None  # of the completion; None: the run's
    chat: bool = False  # whether the prompt is a user's message
    base: str | None = None  # the base, where it is not where the adapter says
    ref_model: str | None = None  # the reference, where it was not the base


@dataclass(frozen=True)
class FixedCompletion(Sampler):
    """A sampler that always says the same."""

    ids: list[int]
    eos_ids: list[int]

    def __call__(self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None) -> Completions:
        """See `Sampler`; its log-probs are 0, since nothing was sampled."""
        ids = torch.tensor([self.ids])
        truncated = torch.tensor([self.ids[-1] not in self.eos_ids])
        return Completions(ids, torch.ones_like(ids, dtype=torch.bool), truncated, torch.zeros(ids.shape))


def trace_prompt(checkpoint: str | Path, question: Question) -> tuple[Trace, PPOConfig]:
    """What a checkpoint's actor, reference and critic say about a prompt, and the settings of its run.

    Raises:
        ValueError: not a checkpoint of PPOTrainer, one whose parts cannot be loaded, or a question too long for its
            models; says what to do.
    """
    folder = check_folder(Path(checkpoint))
    with readable(state_file(folder, 0)) as path:
        saved = json.loads(path.read_text())
        state, run = PPOState.from_state_dict(saved["state"]), RunDescription(**saved["run"])
    # Not by TrainerState, which another version of transformers may have written.
    with readable(folder / TRAINER_STATE_NAME) as path:
        step = json.loads(path.read_text())["global_step"]
    args = settings(run, question)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = load_actor_critic(folder, args, question)
    for what, now in hash_frozen_weights(model).items():
        if run.structure.get(what, now) != now:  # earlier versions wrote less
            logger.warning("%s is not the run's, unless that was quantised; give --base or --ref_model", what)
    eos_ids = eos_token_ids(tokenizer, model.causal_lm.generation_config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = eos_ids[0]
    accelerator = Accelerator()
    sampler = make_sampler(model, eos_ids, tokenizer.pad_token_id, args, accelerator)
    if question.completion is not None:
        sampler = FixedCompletion(completion_ids(question.completion, tokenizer, eos_ids), eos_ids)
    collector = Collector(model, sampler, RewardFunctions(scorer(question.score)), tokenizer, accelerator, args)
    prompt = [{"role": "user", "content": question.prompt}] if question.chat else question.prompt
    prompts = prompts_of(Dataset.from_dict({"prompt": [prompt]}), "prompt", tokenizer, args)
    limit = len(sampler.ids) if isinstance(sampler, FixedCompletion) else args.max_completion_length
    check_room(model, prompts.longest, limit, args)
    rollout, _ = collector.collect(collector.eval_rows(prompts), state, TrainerState(), Meter(), training=False)
    table = TokenTable.from_rollout(rollout, 0, tokenizer, args.kl_estimator)
    table = table if question.score is not None else without_score(table)
    return traces_of(rollout, [table], state.rollouts, step, state.kl_coef)[0], args


def check_folder(folder: Path) -> Path:
    """The folder, if it is a checkpoint.

    Raises:
        ValueError: it is not there, or not a checkpoint of PPOTrainer.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a checkpoint such as out/checkpoint-120")
    needed = (state_file(folder, 0).name, CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, TRAINER_STATE_NAME)
    if missing := [name for name in needed if not (folder / name).is_file()]:
        inside = list_checkpoints(folder)
        hint = f"; its last one is {inside[-1]}" if inside else ""
        raise ValueError(f"{folder} is not a checkpoint of PPOTrainer: it has no {', '.join(missing)}{hint}")
    for weights in (folder / SAFETENSORS_WEIGHTS_NAME, folder / CRITIC_FOLDER / CRITIC_WEIGHTS):
        if weights.is_file():  # not every run has a critic
            with readable(weights), safe_open(weights, "pt"):  # compares its header with its length
                pass
    return folder


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """Inside, a file of a checkpoint is read; what is wrong in it becomes an error that names it."""
    try:
        yield path
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not as PPOTrainer writes it ({error!r}); take another checkpoint") from error


def settings(run: RunDescription, question: Question) -> PPOConfig:
    """The configuration of a checkpoint's run, as far as a rollout of one prompt needs it."""
    known = {f.name for f in fields(PPOConfig)} - {f.name for f in fields(TrainingArguments)} | {"seed"}
    values = {name: value for name, value in {**run.settings, **run.structure}.items() if name in known}
    init_kwargs = values.get("model_init_kwargs") or {}
    values["model_init_kwargs"] = {"dtype": init_kwargs["dtype"]} if "dtype" in init_kwargs else None
    # π_old is this model whatever sampled in the run, and nothing but the score that was given rewards.
    values |= {"policy_mode": "decoupled", "use_vllm": False, "reward_weights": None, "output_dir": "."}
    values["total_episodes"] = None  # of a batch size that is not taken over
    values["per_device_train_batch_size"] = values["num_generations"]  # a size that divides into groups
    values |= {"report_to": "none"} | ({} if question.seed is None else {"seed": question.seed})
    return PPOConfig(**values)


def load_actor_critic(folder: Path, args: PPOConfig, question: Question) -> ActorCritic:
    """Actor, reference and critic of a checkpoint, on the device.

    Raises:
        ValueError: the critic is not there, or the base cannot be loaded.
    """
    if args.needs_critic and not (folder / CRITIC_FOLDER / CRITIC_CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CRITIC_FOLDER}/{CRITIC_CONFIG}, and advantage_estimator={args.advantage_estimator!r} "
            "needs the critic; copy the whole checkpoint, or take another one"
        )
    peft_config = PeftConfig.from_pretrained(str(folder))
    peft_config.inference_mode = False
    name = question.base or peft_config.base_model_name_or_path
    init_kwargs = cast(dict[str, Any], args.model_init_kwargs or {})
    try:
        revision = None if question.base else peft_config.revision
        base = AutoModelForCausalLM.from_pretrained(name, revision=revision, trust_remote_code=False, **init_kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the base {name!r} of {folder} cannot be loaded; start where that path leads to it, or give --base "
            f"({error})"
        ) from error
    critic = find_critic(str(folder)) if args.needs_critic else None
    model = ActorCritic(base, peft_config, critic, load_reference(question.ref_model))
    set_peft_model_state_dict(model, load_file(folder / SAFETENSORS_WEIGHTS_NAME))
    return model.to(args.device)


def check_room(model: ActorCritic, prompt_length: int, completion_length: int, args: PPOConfig) -> None:
    """Refuse a prompt and a completion that a model of a checkpoint has too few positions for.

    Raises:
        ValueError: names the lengths.
    """
    wanted = copy.copy(args)  # `replace` would set up the device again
    wanted.max_completion_length = completion_length
    trunk = None if model.critic is None else cast(PeftModel | None, model.critic.trunk)
    for name, part in (("the base", model.causal_lm), ("ref_model", model.ref_model), ("the critic", trunk)):
        try:
            if part is not None:
                check_lengths(name, part, prompt_length, wanted)
        except ValueError as error:
            raise ValueError(
                f"a prompt of {prompt_length} tokens and a completion of up to {completion_length} are too "
                f"long; shorten the prompt or --completion ({error})"
            ) from error


def completion_ids(text: str, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> list[int]:
    """The token ids of a completion that was written by hand, with the end of sequence that it would have."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The tokenizer's, where it has one: chat models end their turns with it, and texts with another.
    eos_id = eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return ids if ids and ids[-1] in eos_ids else [*ids, eos_id]


def scorer(score: float | None) -> Any:
    """A reward function that gives every completion the score."""

    def given(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [score] * len(completions)

    return given


def without_score(table: TokenTable) -> TokenTable:
    """A table of a completion whose score nobody has said, without the numbers that rest on it."""
    rows = [replace(row, reward=None, return_=None, advantage=None, counted=True) for row in table.rows]
    return replace(table, score=None, rows=rows)
