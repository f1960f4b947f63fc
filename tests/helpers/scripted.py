"""Samplers and reward functions that answer from a script."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import TrainerState

from hfppo.collect.collector import Collected
from hfppo.data.prompts import Row
from hfppo.generation.sampler import Sampler
from hfppo.rewards.functions import RewardFunctions, score_table
from hfppo.rewards.reward_func import Numbers, RewardBatch
from hfppo.rollout import Rollout
from hfppo.sample import Ended, Sample, Turn
from hfppo.state import PPOState
from hfppo.support.padding import pad_right

SIGNS = {sign: i for i, sign in enumerate("0123456789+=请问？是的不对，等于！", start=2)} | {".": 1}  # "." is EOS


def ids_of(text: str) -> list[int]:
    return [SIGNS[sign] for sign in text]


class Scripted(Sampler):
    """A sampler that answers with given token ids, in turn; what does not end with EOS counts as cut."""

    def __init__(self, *completions: str | list[int]):
        self.completions = [ids_of(c) if isinstance(c, str) else c for c in completions]
        self.asked = 0

    def __call__(self, prompts, seeds) -> list[Turn]:
        numbers = range(self.asked, self.asked + len(prompts))
        self.asked += len(prompts)
        chosen = [self.completions[n % len(self.completions)] for n in numbers]
        return [Turn.up_to_end(ids, [0.0] * len(ids), [1]) for ids in chosen]


class Padded(NamedTuple):
    """Turns as tensors, (B, T) each but `truncated`, (B,)."""

    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    truncated: Tensor


def padded_turns(turns: list[Turn]) -> Padded:
    """Turns as tensors, padded with 0."""
    ids, mask = pad_right([turn.ids for turn in turns], torch.int64)
    logprobs, _ = pad_right([turn.logprobs for turn in turns], torch.float32)
    return Padded(ids, mask, logprobs, torch.tensor([turn.truncated for turn in turns]))


def answering(trainer, *completions):
    """The trainer with a scripted sampler."""
    trainer.collector = replace(trainer.collector, sampler=Scripted(*completions))
    return trainer


@dataclass(frozen=True)
class Scored:
    """What reward functions have written on samples."""

    samples: list[Sample]
    metrics: Numbers

    def of(self, name: str) -> list:
        return [getattr(sample, name) for sample in self.samples]

    @property
    def per_function(self) -> Tensor:
        return score_table(self.samples)

    @property
    def extra(self) -> dict[str, list]:
        return {name: [sample.extra[name] for sample in self.samples] for name in self.samples[0].extra}

    @property
    def failed(self) -> dict[str, list[bool]]:
        return {name: [sample.fallbacks[name] for sample in self.samples] for name in self.samples[0].fallbacks}


def finished(prompt, text, ids: list[int], prompt_ids: tuple[int, ...] = (), **columns) -> Sample:
    """A completion of one turn that ends with EOS."""
    row = Row({"prompt": prompt, **columns}, list(prompt_ids), number=0, group=0, seed=0)
    return Sample(row, ids, [True] * len(ids), [0.0] * len(ids), text=text, turns=1, ended=Ended.STOPPED)


def reward_batch(texts, tokenizer=None, **columns) -> RewardBatch:
    """Completions of 1+1= that end with EOS."""
    ids = [[SIGNS.get(sign, 2) for sign in text + "."] for text in texts]  # of any text
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    given = zip(texts, ids, rows or [{}] * len(texts), strict=True)
    return RewardBatch([finished("1+1=", text, own, **row) for text, own, row in given], tokenizer, TrainerState())


def score(funcs, weights=None, texts=("12", "3", ""), **columns) -> Scored:
    """Score completions that end with EOS."""
    batch = reward_batch(texts, **columns)
    numbers = RewardFunctions(funcs if isinstance(funcs, list | tuple) else [funcs], weights)(batch)
    return Scored(list(batch.samples), numbers)


def always(*rewards):
    """A reward function that returns the same for any completions."""

    def constant(**kwargs):
        return list(rewards)

    return constant


def training_rows(collector, prompts, rollout: int) -> list[Row]:
    """Return a process's rows of a rollout, by its number, with the next prompts of the order."""
    return collector.rows_of(collector.choose_prompts(prompts, PPOState(kl_coef=0.0, rollouts=rollout)), prompts)


def collect_first(trainer) -> Collected:
    rows = training_rows(trainer.collector, trainer._train_prompts, 0)
    return trainer.collector.collect(rows, trainer.ppo_state, trainer.state)


def first_rollout(trainer) -> Rollout:
    return collect_first(trainer).rollout


PROMPTS = [f"请问{n}+1=" for n in range(4)]


class Off(Sampler):
    """Another sampler's tokens, with log-probs that are off by ln 3 on each row's first token."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def __call__(self, *args) -> list[Turn]:
        turns = self.sampler(*args)
        return [replace(t, logprobs=[t.logprobs[0] - math.log(3.0), *t.logprobs[1:]]) for t in turns]


def off_trainer(make_trainer, mode, **config):
    trainer = make_trainer({"policy_mode": mode, "kl_coef": 0.0, **config})
    trainer.collector = replace(trainer.collector, sampler=Off(trainer.collector.sampler))
    return trainer
