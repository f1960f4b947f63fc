"""Samplers and reward functions that answer from a script."""

import math
from dataclasses import replace

import torch
from transformers import TrainerState

from hfppo.collect.collector import Collected
from hfppo.data.prompts import Row
from hfppo.generation.sampler import Completions, Sampler, completions_from
from hfppo.rewards.functions import RewardFunctions, Scored
from hfppo.rewards.reward_func import RewardBatch
from hfppo.rollout import Rollout
from hfppo.state import PPOState

SIGNS = {sign: i for i, sign in enumerate("0123456789+=请问？是的不对，等于！", start=2)} | {".": 1}  # "." is EOS


def ids_of(text: str) -> list[int]:
    return [SIGNS[sign] for sign in text]


class Scripted(Sampler):
    """A sampler that answers with given token ids, in turn; what does not end with EOS counts as cut."""

    def __init__(self, *completions: str | list[int]):
        self.completions = [ids_of(c) if isinstance(c, str) else c for c in completions]
        self.asked = 0

    def __call__(self, prompt_ids, prompt_mask, seeds) -> Completions:
        numbers = range(self.asked, self.asked + len(prompt_ids))
        self.asked += len(prompt_ids)
        chosen = [self.completions[n % len(self.completions)] for n in numbers]
        width = max(len(ids) for ids in chosen)
        assert all(ids[-1] == 1 or len(ids) == width for ids in chosen), "only the longest can be cut"
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in chosen])
        return completions_from(ids, torch.zeros(ids.shape), [1])


def answering(trainer, *completions):
    """The trainer with a scripted sampler."""
    trainer.collector = replace(trainer.collector, sampler=Scripted(*completions))
    return trainer


def score(funcs, weights=None, texts=("12", "3", ""), **columns) -> Scored:
    """Score completions that end with EOS."""
    ids = [[SIGNS.get(sign, 2) for sign in text + "."] for text in texts]  # of any text
    batch = RewardBatch(["1+1="] * len(texts), list(texts), ids, token_mask(ids), columns, TrainerState())
    return RewardFunctions(funcs if isinstance(funcs, list | tuple) else [funcs], weights)(batch)


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

    def __call__(self, *args) -> Completions:
        completions = self.sampler(*args)
        off = completions.logprobs.clone()
        off[:, 0] -= math.log(3.0)
        return replace(completions, logprobs=off)


def off_trainer(make_trainer, mode, **config):
    trainer = make_trainer({"policy_mode": mode, "kl_coef": 0.0, **config})
    trainer.collector = replace(trainer.collector, sampler=Off(trainer.collector.sampler))
    return trainer


def token_mask(ids):
    """The (B, T) mask of lists of token ids."""
    lengths = torch.tensor([len(row) for row in ids])
    return torch.arange(int(lengths.max())) < lengths[:, None]
