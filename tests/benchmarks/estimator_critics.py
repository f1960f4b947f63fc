"""The explained variance of a critic after a run, beside the highest that is possible; see `estimators.py`.

Explained variance is 1 − Var(R − V)/Var(R), where R is the sum of the later scores: the exact values below know no KL
penalty, so it is left out. It is measured over each third of the episodes: of the turns of a game, at the first token
of each, else of the tokens. The highest that is possible is that of the exact values over the same states, so that
chance moves both alike.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from estimator_tasks import TASKS
from lake_game import CHEST_REWARD, FELL, FOUND_CHEST, HOLE_REWARD, STEP_REWARD, TURNS, exact_values, state_of
from torch import Tensor
from value_maps import MoveCounter

from hfppo import PPOTrainer, Rollout
from hfppo.functional import explained_variance
from hfppo.models.actor_critic import Want

PARTS = ("start", "middle", "end")  # thirds of an episode


def measure_critic(trainer: PPOTrainer, task: str) -> dict[str, tuple[float, float | None]]:
    """Return the explained variance over each third, and the highest that is possible; None where it is not known.

    Episodes of one or two tokens have no last third.

    Args:
        trainer: evaluated just before; the same prompts get the same completions once more.
    """
    columns = trainer.eval_dataset[: TASKS[task].num_critic_eval]
    trainer.ppo_state.kl_coef = 0.0  # the run is over
    rollout = trainer.rollout(columns.pop("prompt"), **columns)
    asked = rollout.mask if rollout.context is None else first_tokens(rollout)
    third = (3 * (asked.cumsum(dim=1) - 1) // asked.sum(dim=1, keepdim=True))[asked]
    returns = sum_later_rewards(rollout)[asked]
    values = rollout.values[asked]
    exact = EXACT[task](trainer, rollout) if task in EXACT else None
    return {
        part: (
            explained_variance(values, returns, third == i),
            None if exact is None else explained_variance(exact, returns, third == i),
        )
        for i, part in enumerate(PARTS)
    }


def sum_later_rewards(rollout: Rollout) -> Tensor:
    """Return the sum of the rewards from each token on, (B, T)."""
    return rollout.rewards.flip(1).cumsum(dim=1).flip(1)


def first_tokens(rollout: Rollout) -> Tensor:
    """Return a mask, (B, T), of the first token of each turn."""
    before = torch.nn.functional.pad(rollout.mask, (1, 0))[:, :-1]
    return rollout.mask & ~before


def game_values(trainer: PPOTrainer, rollout: Rollout, past: bool) -> Tensor:
    """Return the exact value of the state before each turn of the lake game, (B · 32,).

    The policy has the shares of moves that the evaluation counted in each state, at all turns alike. Turns that were
    no move are not counted.

    Args:
        past: add the rewards of the turns before, which the game pays at its end. The words of the turns tell them, so
            that a critic which counts chests and holes could reach this value.
    """
    assert isinstance(trainer.compute_metrics, MoveCounter)
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    rows, columns = first_tokens(rollout).nonzero(as_tuple=True)
    before = rollout.prompt_ids.shape[1] + columns[:, None] + torch.arange(-3, 0)  # a word, a cell, the key
    texts = np.array(trainer.processing_class.batch_decode(ids[rows[:, None], before])).reshape(-1, TURNS)
    states = np.vectorize(state_of)(texts)
    values = exact_values(trainer.compute_metrics.policy)[np.arange(TURNS, 0, -1), states]
    if past:
        values += [list(accumulate(map(reward_of, game[1:]), initial=0.0)) for game in texts]
    return torch.from_numpy(values.flatten())


def reward_of(observation: str) -> float:
    """Return the reward of the turn that an observation answers."""
    return STEP_REWARD + {FOUND_CHEST: CHEST_REWARD, FELL: HOLE_REWARD}.get(observation.split()[0], 0.0)


@torch.no_grad()
def answer_values(trainer: PPOTrainer, rollout: Rollout) -> Tensor:
    """Return the exact value of each token's state in the arithmetic task, (N,).

    It is the probability of what remains of the right answer while all before is right, then 0.
    """
    tokenizer = trainer.processing_class
    answers = [answer + tokenizer.eos_token for answer in trainer.eval_dataset["answer"]]
    right = tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")
    mask = right["attention_mask"].bool()
    logprobs = trainer.model(
        torch.cat([rollout.prompt_ids, right["input_ids"]], dim=1),
        torch.cat([rollout.prompt_mask, mask], dim=1),
        completion_mask=mask,
        want=Want(trainer.args.temperature, values=False),
    ).logprobs
    remaining = logprobs.flip(1).cumsum(dim=1).flip(1).exp()
    width = max(mask.shape[1], rollout.mask.shape[1])

    def widen(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)

    same = widen(right["input_ids"], tokenizer.pad_token_id) == widen(rollout.completion_ids, tokenizer.pad_token_id)
    right_so_far = torch.nn.functional.pad(same.cumprod(dim=1), (1, 0), value=1)[:, :-1]
    return (widen(remaining, 0.0) * right_so_far)[:, : rollout.mask.shape[1]][rollout.mask]


# The exact values of the rollout's states, by task, in the order of its rows.
EXACT: dict[str, Callable[[PPOTrainer, Rollout], Tensor]] = {
    "lake": partial(game_values, past=False),
    "lake_replayed": partial(game_values, past=False),
    "lake_final_reward": partial(game_values, past=True),
    "arithmetic": answer_values,
    "arithmetic_groups": answer_values,
}
