"""Token tables from a checkpoint, for any prompt.

A checkpoint may come from anyone. Only JSON and safetensors are read from it, so that nothing in it runs as code. Of
the run's arguments for loading the base only the dtype is used, and the revision that the adapter names.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerState, TrainingArguments
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
from hfppo.setup import check_lengths, prepare_dataset
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
    base: str | None = None  # id or path of the base; None: the one that the adapter names
    ref_model: str | None = None  # id or path of the reference; None: the base


@dataclass(frozen=True)
class FixedCompletion(Sampler):
    """A sampler that always returns the same completion."""

    ids: list[int]
    eos_ids: list[int]

    def __call__(self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None) -> Completions:
        """See `Sampler`; the log-probs are 0, because nothing was sampled."""
        ids = torch.tensor([self.ids])
        truncated = torch.tensor([self.ids[-1] not in self.eos_ids])
        return Completions(ids, torch.ones_like(ids, dtype=torch.bool), truncated, torch.zeros(ids.shape))


def trace_prompt(checkpoint: str | Path, question: Question) -> tuple[Trace, PPOConfig]:
    """Return the trace of a prompt by the models of a checkpoint, and the settings of its run.

    Raises:
        ValueError: the folder is not a checkpoint of PPOTrainer, a part of it cannot be loaded, or prompt and
            completion are too long for its models.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a checkpoint such as out/checkpoint-120")
    check_files(folder, state_file(folder, 0).name, CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, TRAINER_STATE_NAME)
    with blame_file(state_file(folder, 0)) as path:
        saved = json.loads(path.read_text())
        state, run = PPOState.from_state_dict(saved["state"]), RunDescription(**saved["run"])
    # TrainerState would refuse fields of another version of transformers.
    with blame_file(folder / TRAINER_STATE_NAME) as path:
        step = json.loads(path.read_text())["global_step"]
    args = rebuild_settings(run, question)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = load_actor_critic(folder, args, question)
    for part, found in hash_frozen_weights(model).items():
        if run.structure.get(part, found) != found:  # earlier versions wrote fewer
            logger.warning("%s is not the run's, unless that was quantised; give --base or --ref_model", part)
    eos_ids = eos_token_ids(tokenizer, model.causal_lm.generation_config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = eos_ids[0]
    accelerator = Accelerator()
    if question.completion is None:
        sampler = make_sampler(model, eos_ids, tokenizer.pad_token_id, args, accelerator)
    else:
        sampler = FixedCompletion(completion_ids(question.completion, tokenizer, eos_ids), eos_ids)
        args = copy.copy(args)  # `dataclasses.replace` would set up the device again
        args.max_completion_length = len(sampler.ids)
    rewards = RewardFunctions(lambda completions, **_: [question.score] * len(completions))
    collector = Collector(model, sampler, rewards, tokenizer, accelerator, args)
    prompt = [{"role": "user", "content": question.prompt}] if question.chat else question.prompt
    prompts = prepare_dataset(Dataset.from_dict({"prompt": [prompt]}), "prompt", tokenizer, args)
    check_room(model, prompts.longest, args)
    rollout, _ = collector.collect(collector.eval_rows(prompts), state, TrainerState(), Meter(), training=False)
    table = TokenTable.from_rollout(rollout, 0, tokenizer, args.kl_estimator)
    table = table if question.score is not None else remove_score(table)
    return Trace.from_rollout(rollout, 0, table, state.rollouts, step, state.kl_coef), args


def check_files(folder: Path, *names: str) -> None:
    """Refuse a folder that lacks one of the files, or whose weights were cut short.

    Raises:
        ValueError: names the files.
    """
    if missing := [name for name in names if not (folder / name).is_file()]:
        found = list_checkpoints(folder)
        way_out = f"its last one is {found[-1]}" if found else "copy the whole checkpoint, or take another one"
        raise ValueError(f"{folder} is not a checkpoint of PPOTrainer: it has no {', '.join(missing)}; {way_out}")
    for name in names:
        if name.endswith(".safetensors"):
            with blame_file(folder / name) as path, safe_open(path, "pt"):  # compares the header with the file's size
                pass


@contextmanager
def blame_file(path: Path) -> Iterator[Path]:
    """Name the file in errors that reading it raises.

    Raises:
        ValueError: the content is not as PPOTrainer writes it.
    """
    try:
        yield path
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not as PPOTrainer writes it ({error!r}); take another checkpoint") from error


def rebuild_settings(run: RunDescription, question: Question) -> PPOConfig:
    """Return those settings of a checkpoint's run that a rollout of one prompt depends on."""
    known = {f.name for f in fields(PPOConfig)} - {f.name for f in fields(TrainingArguments)} | {"seed"}
    values = {name: value for name, value in {**run.settings, **run.structure}.items() if name in known}
    init_kwargs = values.get("model_init_kwargs") or {}
    values |= {
        "model_init_kwargs": {"dtype": init_kwargs["dtype"]} if "dtype" in init_kwargs else None,
        "policy_mode": "decoupled",  # log π_old is this model's, whatever sampled in the run
        "use_vllm": False,
        "reward_weights": None,  # the given score is the only reward
        "total_episodes": None,  # depends on a batch size that is not taken over
        "per_device_train_batch_size": values["num_generations"],  # divides into groups
        "output_dir": ".",
        "report_to": "none",
    }
    return PPOConfig(**values if question.seed is None else {**values, "seed": question.seed})


def load_actor_critic(folder: Path, args: PPOConfig, question: Question) -> ActorCritic:
    """Load actor, reference and critic of a checkpoint onto the device.

    Raises:
        ValueError: the critic is missing, or the base cannot be loaded.
    """
    if args.needs_critic:
        check_files(folder, f"{CRITIC_FOLDER}/{CRITIC_CONFIG}", f"{CRITIC_FOLDER}/{CRITIC_WEIGHTS}")
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


def check_room(model: ActorCritic, prompt_length: int, args: PPOConfig) -> None:
    """Refuse a prompt and a completion that are longer than a model of the checkpoint allows.

    Raises:
        ValueError: names the lengths and the model.
    """
    trunk = None if model.critic is None else cast(PeftModel | None, model.critic.trunk)
    try:
        for name, part in (("the base", model.causal_lm), ("ref_model", model.ref_model), ("the critic", trunk)):
            if part is not None:
                check_lengths(name, part, prompt_length, args)
    except ValueError as error:
        raise ValueError(
            f"a prompt of {prompt_length} tokens and a completion of up to {args.max_completion_length} are too "
            f"long; shorten the prompt or --completion ({error})"
        ) from error


def completion_ids(text: str, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> list[int]:
    """Return the token ids of a written completion, with the end of sequence that the policy would add."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # The tokenizer's EOS if it has one: chat models end their turns with it, and texts with another one.
    eos_id = eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return ids if ids and ids[-1] in eos_ids else [*ids, eos_id]


def remove_score(table: TokenTable) -> TokenTable:
    """Return a copy of a table without the score and the numbers computed from it."""
    rows = [replace(row, reward=None, return_=None, advantage=None, counted=True) for row in table.rows]
    return replace(table, score=None, rows=rows)
