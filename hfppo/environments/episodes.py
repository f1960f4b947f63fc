"""Episodes: several turns of the model, with what tools and an environment answer in between.

All rows that are not done take a turn together, in one call of the sampler. A row's episode depends on its own seeds
alone, and no process waits for another between turns, except with sharded models, whose processes compute together.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hfppo.data.chat_template import render, template_options
from hfppo.data.prompts import EMPTY_PROMPT, Row
from hfppo.environments.chat_format import ChatFormat, Message, parse_turn, text_message
from hfppo.environments.environment import (
    Result,
    TextEnvironment,
    check_reward,
    joined,
    plain_message,
    text_of,
    tools_of,
    wants_seed,
)
from hfppo.environments.pool import EnvironmentPool
from hfppo.environments.tool_calls import TIMEOUT, Answer, run_calls
from hfppo.generation.sampler import Completions
from hfppo.state import stream_seed
from hfppo.support.calls import finish_within, own_random_state

# Completes (rows, prompts with what came after them) with a budget of tokens for each.
TurnSampler = Callable[[list[list[int]], list[int] | None, list[int]], Completions]

logger = logging.getLogger(__name__)

UNFINISHED, CUT, DROPPED = "unfinished", "cut", "dropped_result"  # the limits that end an episode


@dataclass
class Episode:
    """One completion while it is played. Lists have an entry for each of its tokens so far."""

    row: Row  # with the prompt that the environment completed
    environment: Any = None
    tools: dict[str, Callable[..., Any]] = field(default_factory=dict)
    schemas: list[dict[str, Any]] = field(default_factory=list)  # of the tools, as the prompt shows them
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # False on context
    logprobs: list[float] = field(default_factory=list)
    values: list[float] | None = None  # where the sampler tells them
    rewards: dict[int, float] = field(default_factory=dict)  # by the position of a turn's last token, if it has one
    turns: int = 0
    active: bool = True
    limit: str | None = None  # the limit that ended it; None: none
    truncated: bool = False
    open_ended: bool = False  # whether the critic knows its last state
    failed: bool = False  # whether it has no score: its environment's state is unknown, or its prompt too long
    counts: Counter[str] = field(default_factory=Counter)  # calls and their failures by kind

    def append(self, ids: list[int], logprobs: list[float] | None, values: list[float] | None) -> None:
        """Append the tokens of a turn, or context, which has no log-probs."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        if self.values is not None or values is not None:
            self.values = (self.values or [0.0] * (len(self.ids) - len(ids))) + (values or [0.0] * len(ids))

    def end(self, limit: str | None = None, truncated: bool = False, open_ended: bool = False) -> None:
        """End the episode."""
        self.active, self.limit, self.truncated, self.open_ended = False, limit, truncated, open_ended

    def token_rewards(self, final: float) -> list[float]:
        """Return a reward for each token; `final` is added on the last sampled one."""
        rewards = [self.rewards.get(position, 0.0) for position in range(len(self.ids))]
        rewards[len(self.sampled) - 1 - self.sampled[::-1].index(True)] += final
        return rewards


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays episodes with the tools and environments of a run.

    Args:
        tools: those of all rows, by name.
        schemas: of a row's tools, by the name of its environment.
        max_prompt: tokens of a prompt with the text of `reset`; None: any. A row with a longer one has no score.
        max_tokens: of an episode, context included.
        max_turn: tokens of a turn of the model; None: any.
        max_rounds: rounds of tool calls, or steps of an environment; None: any.
        timeout: seconds for each call; None: any.
    """

    tools: dict[str, Callable[..., Any]]
    schemas: dict[str | None, list[dict[str, Any]]]
    pool: EnvironmentPool | None
    chat_format: ChatFormat
    max_prompt: int | None
    max_tokens: int
    max_turn: int | None
    max_rounds: int | None
    timeout: float | None
    by_column: bool  # whether the column `environment` names a row's environment

    def environment_name(self, columns: dict[str, Any]) -> str | None:
        """Return the name of a row's environment; None: the only one."""
        return columns["environment"] if self.by_column else None

    def tools_for(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """Return the tools of a row by name."""
        return self.tools | tools_of(environment) if environment is not None else self.tools

    def play(
        self,
        rows: Sequence[Row],
        sample: TurnSampler,
        greedy: bool,
        any_active: Callable[[bool], bool],
        timed: Callable[[], AbstractContextManager],
    ) -> list[Episode]:
        """Play an episode for each row.

        Args:
            greedy: take the likeliest tokens instead of sampling.
            any_active: whether a row is active on any process that must compute together with this one.
            timed: measures the time of tools and environments.
        Raises:
            RuntimeError: an environment cannot be reset; names the row.
            ValueError: a prompt has no tokens, or a reward is no number.
        """
        with timed():
            episodes = self.begin(rows)
        turn = 0
        while any_active(any(episode.active for episode in episodes)):
            active = [episode for episode in episodes if episode.active]
            playing = active or episodes[:1]  # an idle process of a sharded model computes along
            prompts = [episode.row.prompt_ids + episode.ids for episode in playing]
            seeds = [stream_seed(e.row.seed, turn) if turn else e.row.seed for e in playing]
            budgets = [self.budget(episode) for episode in playing]
            completions = sample(prompts, None if greedy else seeds, budgets)
            with timed():
                for i, episode in enumerate(active):
                    self.take_turn(episode, completions, i)
            turn += 1
        return episodes

    def budget(self, episode: Episode) -> int:
        """Return the most tokens of an episode's next turn."""
        if episode.failed:
            return 1  # for the place in the batch
        room = max(1, self.max_tokens - len(episode.ids))
        return room if self.max_turn is None else min(room, self.max_turn)

    # The beginning

    def begin(self, rows: Sequence[Row]) -> list[Episode]:
        """Reset an environment for each row, and complete the prompts by what it says."""
        names = [self.environment_name(row.columns) for row in rows]
        environments = [None] * len(rows) if self.pool is None else self.pool.take(names)
        return [self.open(row, environment) for row, environment in zip(rows, environments, strict=True)]

    def open(self, row: Row, environment: Any) -> Episode:
        """Return a new episode."""
        schemas = self.schemas[self.environment_name(row.columns)]
        said = None if environment is None else self.reset(row, environment)
        given = row.columns.get("prompt", EMPTY_PROMPT)
        prompt = list(map(plain_message, given))
        if said is not None:
            if not isinstance(content := prompt[-1].get("content"), str):
                raise TypeError(
                    f"row {row.number}: the prompt's last message has the content {content!r}, and the text of "
                    f"{type(environment).__name__}.reset cannot be appended to it; give text, or blocks of text alone"
                )
            prompt[-1] = {**prompt[-1], "content": content + said}
        row = replace(row, columns={**row.columns, "prompt": prompt})
        if any(message is not before for message, before in zip(prompt, given, strict=True)):
            own = template_options(schemas or row.columns.get("tools"), row.columns.get("chat_template_kwargs"))
            options = {**self.chat_format.options, **own}
            row = replace(row, prompt_ids=render(prompt, self.chat_format.tokenizer, options))
        if not row.prompt_ids:
            raise ValueError(
                f"row {row.number}: the prompt {prompt!r} has no tokens, and {type(environment).__name__}.reset gave "
                "it no text; return some, or write some into the prompt"
            )
        episode = Episode(row, environment, self.tools_for(environment), schemas)
        if self.max_prompt is not None and len(row.prompt_ids) > self.max_prompt:
            episode.row = replace(row, prompt_ids=row.prompt_ids[-self.max_prompt :])
            episode.failed = True
            logger.warning(
                "row %d: with the text of %s.reset the prompt has %d tokens, and max_prompt_length or the model's "
                "positions leave %d; it has no score",
                row.number,
                type(environment).__name__,
                len(row.prompt_ids),
                self.max_prompt,
            )
        return episode

    def reset(self, row: Row, environment: Any) -> str | None:
        """Reset a row's environment."""
        columns = dict(row.columns)
        if self.by_column:  # it names the factory, as in TRL
            del columns["environment"]
        if "seed" not in columns and wants_seed(environment.reset):
            columns["seed"] = row.environment_seed
        name = type(environment).__name__
        try:
            with own_random_state(row.environment_seed):
                late = f"it took longer than tool_timeout={self.timeout} seconds"
                said = finish_within(self.timeout, late, partial(environment.reset, **columns))
        except Exception as error:
            raise RuntimeError(f"{name}.reset failed for row {row.number}: {error!r}") from error
        said = joined(said)
        if said is not None and not isinstance(said, str):
            raise TypeError(
                f"{name}.reset returned {type(said).__name__} for row {row.number}; return text, content blocks of "
                "text, or None"
            )
        return said

    # A turn

    def take_turn(self, episode: Episode, completions: Completions, i: int) -> None:
        """Append the turn that was sampled in row i, and what answers it."""
        mask = completions.mask[i]
        ids = completions.ids[i][mask].tolist()
        values = None if completions.values is None else completions.values[i][mask].tolist()
        prefix = episode.row.prompt_ids + episode.ids
        episode.append(ids, completions.logprobs[i][mask].tolist(), values)
        episode.turns += 1
        cut = bool(completions.truncated[i])
        speaks_text = isinstance(episode.environment, TextEnvironment)
        if speaks_text:
            message, malformed = text_message(self.chat_format.tokenizer, ids), False
        else:
            message, malformed = parse_turn(self.chat_format.tokenizer, ids, prefix, episode.schemas)
        episode.messages.append(message)
        episode.counts["malformed"] += malformed and not cut and bool(episode.schemas)
        if episode.failed:
            episode.end()
        elif cut and not (speaks_text and len(episode.ids) < self.max_tokens):  # whatever it calls is not run
            episode.end(CUT, truncated=True, open_ended=True)
        elif speaks_text:
            self.step(episode, message["content"])
        elif episode.schemas and (calls := message.get("tool_calls")):
            self.call_tools(episode, [call["function"] for call in calls])
        else:
            episode.end()

    def step(self, episode: Episode, text: str) -> None:
        """Let a text environment answer a turn."""
        environment, end = episode.environment, len(episode.ids) - 1
        name = f"{type(environment).__name__}.step"
        try:
            with own_random_state(stream_seed(episode.row.seed, end)):
                late = f"{name} took longer than tool_timeout={self.timeout} seconds"
                taken = finish_within(self.timeout, late, partial(environment.step, text))
        except TimeoutError:
            episode.counts[TIMEOUT] += 1
            self.abandon(episode)
            return
        except Exception as error:
            raise RuntimeError(
                f"{name} failed in turn {episode.turns} of row {episode.row.number}: {error!r}; the turn was {text!r}"
            ) from error
        if not isinstance(taken, tuple) or len(taken) != 5:
            raise TypeError(
                f"{name}, row {episode.row.number}, gave {taken!r}; "
                "give observation, reward, terminated, truncated, info"
            )
        observation, reward, terminated, truncated, _ = taken
        episode.rewards[end] = check_reward(f"{name}, row {episode.row.number},", reward)
        if terminated:
            episode.end()
            return
        last = truncated or self.is_last(episode)
        self.reply(episode, [{"role": "user", "content": text_of(observation)}], last)

    def call_tools(self, episode: Episode, calls: list[dict[str, Any]]) -> None:
        """Let tools answer a turn."""
        end = len(episode.ids) - 1
        if self.max_rounds is not None and episode.turns > self.max_rounds:
            episode.end(UNFINISHED, truncated=True)  # after a turn's end the critic was never asked
            return
        answers = run_calls(calls, episode.tools, stream_seed(episode.row.seed, end), self.timeout)
        if any(isinstance(answer.value, Result) for answer in answers):
            episode.rewards[end] = sum(answer.reward for answer in answers)
        for answer in answers:
            episode.counts["calls"] += 1
            if answer.failure is not None:
                episode.counts[answer.failure] += 1
        if any(answer.failure == TIMEOUT and answer.of_environment for answer in answers):
            self.abandon(episode)
        elif any(answer.done for answer in answers):
            episode.messages += map(tool_message, answers)
            episode.end()
        else:
            self.reply(episode, list(map(tool_message, answers)), last=False)

    def reply(self, episode: Episode, replies: list[Message], last: bool) -> None:
        """Append an answer as context, or end the episode where it does not fit.

        Args:
            last: end the episode here; its last state is then the start of a turn that is not taken.
        """
        room = self.max_tokens - len(episode.ids)
        fits = self.chat_format.may_fit(replies, room)
        closed = episode.ids[-1] in self.chat_format.eos_ids
        ids = self.chat_format.reply_ids(replies, closed) if fits else []
        if not fits or len(ids) >= room + last:
            episode.end(DROPPED, truncated=True)
            return
        episode.messages += replies
        episode.append(ids, None, None)
        if last:
            episode.end(UNFINISHED, truncated=True, open_ended=True)

    def is_last(self, episode: Episode) -> bool:
        """Return whether an environment has made all the steps that the configuration allows."""
        return self.max_rounds is not None and episode.turns >= self.max_rounds

    def abandon(self, episode: Episode) -> None:
        """End an episode whose environment is in an unknown state: it has no score, and the environment goes."""
        episode.failed = True
        episode.end()
        if self.pool is not None:
            self.pool.discard(episode.environment)


def tool_message(answer: Answer) -> Message:
    """Return the message for an answer, as TRL writes it."""
    return {"role": "tool", "name": answer.name, "content": answer.text}


def completions_of(episodes: Sequence[Episode], pad_id: int) -> Completions:
    """Return the episodes as tensors."""

    def padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype, padding: float) -> Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=padding)

    mask = padded([e.sampled for e in episodes], torch.bool, False)
    real = torch.arange(mask.shape[1]) < torch.tensor([len(e.ids) for e in episodes])[:, None]
    values = [e.values for e in episodes if e.values is not None]
    return Completions(
        ids=padded([e.ids for e in episodes], torch.int64, pad_id),
        mask=mask,
        truncated=torch.tensor([e.truncated for e in episodes]),
        logprobs=padded([e.logprobs for e in episodes], torch.float32, 0.0),
        values=padded(values, torch.float32, 0.0) if values else None,
        context=real & ~mask,
        open_ended=torch.tensor([e.open_ended for e in episodes]),
        cut=torch.tensor([e.limit == CUT for e in episodes]),
    )
