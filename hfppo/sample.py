"""One completion, from its prompt to its scores: ragged lists with an entry per token, until `pad` makes tensors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from hfppo.data.chat_template import Message
from hfppo.data.prompts import Row
from hfppo.rollout import Sequences
from hfppo.support.padding import pad_left, pad_right

Text = str | list[Message]  # or a conversation
Ids = list[int]  # of tokens


class Ended(StrEnum):
    """How a completion ended. Every member but the first is a limit."""

    STOPPED = "stopped"  # EOS, a stop, or the environment
    CUT = "cut"  # a limit of tokens within a turn
    UNFINISHED = "unfinished"  # a limit of turns
    DROPPED = "dropped_result"  # an answer of a tool or environment did not fit


@dataclass(frozen=True)
class Turn:
    """The tokens that a sampler adds to a prompt."""

    ids: list[int]  # EOS included
    logprobs: list[float]  # log π_rollout of each token at the sampling temperature, nats
    truncated: bool = False  # whether a limit ended the turn, not EOS or a stop

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.logprobs):
            raise ValueError(
                f"a turn of {len(self.ids)} tokens has {len(self.logprobs)} log-probs; a sampler returns at least one "
                "token, and a log-prob for each"
            )

    @classmethod
    def up_to_end(cls, ids: Sequence[int], logprobs: Sequence[float], eos_ids: Sequence[int], stop: int = 0) -> "Turn":
        """Return the tokens up to the first EOS or the `stop`-th token; a turn without either is truncated.

        Padding is not read, because it may be EOS too.

        Args:
            stop: number of tokens up to the end of the first stop string; 0 if there is none.
        """
        end = next((n for n, token in enumerate(ids, 1) if token in eos_ids or n == stop), None)
        return cls(list(ids[:end]), list(logprobs[:end]), truncated=end is None)


@dataclass
class Sample:
    """One completion. `ids`, `sampled` and `logprobs` have an entry per token.

    A completion of one turn is an episode of one turn.
    """

    row: Row  # dataset row, prompt and seeds; an environment may have added its text to the prompt
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # False on context, the tokens of tools and environments
    logprobs: list[float] = field(default_factory=list)  # log π_rollout, nats; 0 on context
    conversation: list[int] = field(default_factory=list)  # number of each token's, of an agent; see `Sequences`
    text: Text = ""  # the completion that reward functions get
    turns: int = 0
    ended: Ended | None = None  # None while the completion is sampled
    environment: Any = None
    failed: bool = False  # whether it has no score: its environment's state is unknown, or its prompt too long
    turn_rewards: dict[int, float] = field(default_factory=dict)  # of tools and environments, by a turn's last token
    final_reward: object = None  # the value of `get_reward`; None if there is no such method
    counts: Counter[str] = field(default_factory=Counter)  # calls of tools and their failures by kind
    # From the reward functions.
    scores: dict[str, float | list[float]] = field(default_factory=dict)  # NaN where a function is left out
    extra: dict[str, object] = field(default_factory=dict)  # entries of the columns that log_extra added
    fallbacks: dict[str, bool] = field(default_factory=dict)  # whether a tolerant function's score replaces an error
    score: float = 0.0  # weighted sum of `scores`, penalties included
    token_rewards: list[float] = field(default_factory=list)  # `score` by token
    scored: bool = True  # False if no function that counts has a score

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append the tokens of a turn, or context, which has no log-probs."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the completion."""
        return self.ended is not Ended.STOPPED

    @property
    def open_ended(self) -> bool:
        """Whether the critic can value the last state. No value belongs to the state after a turn's last token."""
        return self.ended is Ended.CUT or (self.ended is Ended.UNFINISHED and not self.sampled[-1])

    @property
    def last_sampled(self) -> int:
        """Position of the last sampled token, where a score is placed."""
        return len(self.sampled) - 1 - self.sampled[::-1].index(True)


def pad(samples: Sequence[Sample], pad_id: int, several_turns: bool) -> Sequences:
    """Return samples as tensors, prompts padded on the left and completions on the right.

    Args:
        several_turns: whether completions may have context.
    """
    prompt_ids, prompt_mask = pad_left([sample.row.prompt_ids for sample in samples], pad_id)
    of_critic = [ids for sample in samples if (ids := sample.row.critic_prompt_ids) is not None]
    critic_prompt_ids, critic_prompt_mask = pad_left(of_critic, pad_id) if of_critic else (None, None)
    completion_ids, real = pad_right([sample.ids for sample in samples], torch.int64, pad_id)
    mask, _ = pad_right([sample.sampled for sample in samples], torch.bool)
    logprobs, _ = pad_right([sample.logprobs for sample in samples], torch.float32)
    conversation, _ = pad_right([sample.conversation for sample in samples], torch.int64)
    return Sequences(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        mask=mask,
        truncated=torch.tensor([sample.truncated for sample in samples]),
        rollout_logprobs=logprobs,
        context=real & ~mask if several_turns else None,
        conversation=conversation if conversation.numel() else None,
        critic_prompt_ids=critic_prompt_ids,
        critic_prompt_mask=critic_prompt_mask,
    )
