"""Episodes: several turns of the model, and between them the answers of tools and an environment.

An episode continues as soon as its own tools have answered: it joins the sampler's next batch, without the episodes
that still wait. A row's episode depends only on its own seeds. Processes do not wait for each other between turns,
except with sharded models, whose processes compute together.
"""

import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from hfppo.config import PPOConfig
from hfppo.data.chat_template import Message, Schema, render_one, template_options
from hfppo.data.prompts import EMPTY_PROMPT, Row
from hfppo.environments.agents import Agents
from hfppo.environments.chat_format import ChatFormat, check_template, parse_turn, text_message
from hfppo.environments.environment import (
    Environment,
    TextEnvironment,
    Tool,
    finite_reward,
    joined,
    text_of,
    tools_of,
)
from hfppo.environments.tool_calls import TIMEOUT, Answer, ToolCall, run_calls
from hfppo.generation.sampler import Completions
from hfppo.state import stream_seed
from hfppo.support.background import Background, Tasks
from hfppo.support.calls import finish_in_thread
from hfppo.support.padding import pad_right

# Completes prompts, each with its seed and its maximum number of tokens; greedily without seeds.
TurnSampler = Callable[[list[list[int]], list[int] | None, list[int]], Completions]

T = TypeVar("T")
# Steps of an episode. It yields calls of its tools and environment, and receives their Futures. It yields itself to
# have its next turn sampled, and receives completions and its row in them.
Steps = Generator[Any, Any, T]

PATIENCE = 0.03  # seconds that ready episodes wait for others at least, so that quick tools keep batches whole

logger = logging.getLogger(__name__)

UNFINISHED, CUT, DROPPED = "unfinished", "cut", "dropped_result"  # the limits that end an episode


@dataclass
class Episode:
    """One completion while it is played. Lists have an entry for each of its tokens so far."""

    row: Row  # with the prompt that the environment completed
    environment: Environment = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    schemas: list[Schema] = field(default_factory=list)  # the tools' JSON schemas that the prompt shows
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # False on context
    logprobs: list[float] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)  # keyed by the position of a turn's last token
    final_reward: object = None  # the value of `get_reward`; None if there is no such method
    turns: int = 0
    active: bool = True
    limit: str | None = None  # the limit that ended it; None: no limit
    truncated: bool = False
    open_ended: bool = False  # whether the critic values its last state
    failed: bool = False  # whether it has no score: its environment's state is unknown, or its prompt too long
    counts: Counter[str] = field(default_factory=Counter)  # calls and their failures by kind

    def append(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        """Append the tokens of a turn, or context, which has no log-probs."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def end(self, limit: str | None = None, truncated: bool = False, open_ended: bool = False) -> None:
        """End the episode."""
        self.active, self.limit, self.truncated, self.open_ended = False, limit, truncated, open_ended

    def abandon(self) -> None:
        """End the episode without a score: the state of its environment is unknown."""
        self.failed = True
        self.end()

    def token_rewards(self, final: float) -> list[float]:
        """Return a reward for each token; `final` is added on the last sampled one."""
        rewards = [self.rewards.get(position, 0.0) for position in range(len(self.ids))]
        rewards[len(self.sampled) - 1 - self.sampled[::-1].index(True)] += final
        return rewards


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays episodes with the tools and environments of a run.

    Args:
        chat_format: its `eos_ids` end a turn of this model.
        max_prompt: maximum number of tokens of a prompt with the text of `reset`; None: no limit.
        alone: whether the process does nothing else during the episodes.
    """

    agents: Agents
    chat_format: ChatFormat
    args: PPOConfig
    max_prompt: int | None
    alone: bool = True

    def play(
        self,
        rows: Sequence[Row],
        sample: TurnSampler,
        greedy: bool,
        any_active: Callable[[bool], bool],
        timed: Callable[[], AbstractContextManager],
        at_once: bool = False,
    ) -> list[Episode]:
        """Play an episode for each row.

        Args:
            greedy: take the likeliest tokens instead of sampling.
            any_active: whether a row is active on any process that must compute together with this one.
            timed: measures the time of tools and environments while nothing is sampled.
            at_once: whether several threads may call the sampler.
        Raises:
            RuntimeError: an environment fails.
            TimeoutError: `reset` takes too long.
            ValueError: a prompt has no tokens, or a reward is not a number.
        """
        names, environments = self.take_environments(rows)
        patience = math.inf  # the first batch has all rows
        with Background(rows[0].seed if self.alone else None) as background:
            tasks = Tasks([self.steps(*given) for given in zip(rows, names, environments, strict=True)], background)
            while any_active(tasks.wait(patience, timed)):
                playing = tasks.take_ready()
                # Without a ready row, a process of a sharded model still joins the others' forward passes.
                episodes = list(playing.values()) or list(tasks.results.values())[:1]
                turns = partial(self.sample_turns, sample, episodes, greedy)
                start = time.perf_counter()
                if not at_once:
                    tasks.give(playing, turns())
                elif playing:
                    tasks.give_later(playing, turns)
                # A longer wait leaves the sampler idle; a shorter one makes many small batches, each about as slow.
                patience = max(PATIENCE, (time.perf_counter() - start) / 2)
        return self.give_back(names, [tasks.results[i] for i in range(len(rows))])

    def complete_prompts(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the prompts that their environments complete; their episodes are not played."""
        names, environments = self.take_environments(rows)
        with Background(rows[0].seed) as background:
            tasks = Tasks([self.open(*given) for given in zip(rows, names, environments, strict=True)], background)
            tasks.wait(math.inf, nullcontext)
        return [episode.row for episode in self.give_back(names, [tasks.results[i] for i in range(len(rows))])]

    def take_environments(self, rows: Sequence[Row]) -> tuple[list[str | None], list[Environment]]:
        """Return the name and an instance of each row's environment."""
        names = [row.columns["environment"] if self.agents.by_column else None for row in rows]
        return names, self.agents.pool.take(names)

    def give_back(self, names: Sequence[str | None], episodes: list[Episode]) -> list[Episode]:
        """Return the environments of episodes to the pool, and the episodes."""
        for name, episode in zip(names, episodes, strict=True):
            if not episode.failed:
                self.agents.pool.give_back(name, episode.environment)
        return episodes

    def sample_turns(self, sample: TurnSampler, episodes: Sequence[Episode], greedy: bool) -> Completions:
        """Sample the next turn of some episodes."""
        prompts = [episode.row.prompt_ids + episode.ids for episode in episodes]
        seeds = [stream_seed(e.row.seed, e.turns) if e.turns else e.row.seed for e in episodes]
        return sample(prompts, None if greedy else seeds, [self.budget(episode) for episode in episodes])

    def steps(self, row: Row, name: str | None, environment: Environment) -> Steps[Episode]:
        """Play an episode; see `Steps`."""
        episode = yield from self.open(row, name, environment)
        while episode.active:
            completions, i = yield episode
            yield from self.take_turn(episode, completions, i)
        get_reward = getattr(environment, "get_reward", None)
        if get_reward is not None and not episode.failed:
            called: Future = yield get_reward
            episode.final_reward = called.result()
        return episode

    def budget(self, episode: Episode) -> int:
        """Return the maximum number of tokens of an episode's next turn."""
        if episode.failed:
            return 1  # fills the row's place in the batch
        room = max(1, self.args.max_completion_length - len(episode.ids))
        return min(room, self.args.max_turn_length or room)

    # The beginning

    def open(self, row: Row, name: str | None, environment: Environment) -> Steps[Episode]:
        """Reset the environment, and append its text to the prompt.

        Args:
            name: the environment's name.
        """
        schemas = self.agents.schemas[name]
        text = None if environment is None else (yield from self.reset(row, environment))
        row = self.complete_prompt(row, text, schemas)
        kind = type(environment).__name__
        if not row.prompt_ids:
            raise ValueError(f"row {row.number}: the prompt and the text of {kind}.reset are empty; write one of them")
        episode = Episode(row, environment, {**self.agents.tools, **tools_of(environment)}, schemas)
        length = len(row.prompt_ids)
        if self.max_prompt is not None and length > self.max_prompt:
            episode.row = replace(row, prompt_ids=row.prompt_ids[-self.max_prompt :])
            episode.failed = True
            told = row.number, kind, length, self.max_prompt
            logger.warning(
                "row %d: with the text of %s.reset the prompt has %d tokens, more than %d; it has no score", *told
            )
        return episode

    def complete_prompt(self, row: Row, text: str | None, schemas: list[Schema]) -> Row:
        """Return a row whose prompt ends with a text, in messages of plain text, which every chat template renders."""
        given = row.columns.get("prompt", EMPTY_PROMPT)
        *before, last = ({**message, "content": joined(message.get("content"))} for message in given)
        texts = text or "", self.chat_format.neutralize(text or "")
        prompt, shown = ([*before, {**last, "content": last["content"] + added}] for added in texts)
        row = replace(row, columns={**row.columns, "prompt": prompt})
        if shown == given:
            return row
        own = template_options(schemas or row.columns.get("tools"), row.columns.get("chat_template_kwargs"))
        options = {**self.chat_format.options, **own}
        return replace(row, prompt_ids=render_one(shown, self.chat_format.tokenizer, options))

    def reset(self, row: Row, environment: Environment) -> Steps[str | None]:
        """Reset a row's environment, and return its text."""
        columns = dict(row.columns)
        if self.agents.by_column:
            del columns["environment"]
        parameters = inspect.signature(environment.reset).parameters
        seeds = {"seed": row.environment_seed, "episode_seed": row.seed}
        columns = {**{name: seed for name, seed in seeds.items() if name in parameters}, **columns}
        described = f"{type(environment).__name__}.reset, row {row.number},"
        return joined((yield from self.call(described, partial(environment.reset, **columns))))

    def call(self, described: str, method: Callable[[], Any]) -> Steps[Any]:
        """Call a method of an environment.

        Args:
            described: the method and the row, for errors.
        Raises:
            TimeoutError: it takes too long.
            RuntimeError: it raises any other error.
        """
        late = f"{described} took longer than tool_timeout={self.args.tool_timeout} seconds"
        called: Future = yield partial(finish_in_thread, self.args.tool_timeout, late, method)
        try:
            return called.result()
        except TimeoutError:
            raise
        except Exception as error:
            raise RuntimeError(f"{described} failed: {error!r}") from error

    # A turn

    def take_turn(self, episode: Episode, completions: Completions, i: int) -> Steps[None]:
        """Append the turn that was sampled in row i, and the answer to it."""
        mask = completions.mask[i]
        ids = completions.ids[i][mask].tolist()
        prefix = episode.row.prompt_ids + episode.ids
        episode.append(ids, completions.logprobs[i][mask].tolist())
        episode.turns += 1
        cut = bool(completions.truncated[i])
        reads_text = isinstance(episode.environment, TextEnvironment)
        is_full = len(episode.ids) >= self.args.max_completion_length
        if reads_text:
            message, malformed = text_message(self.chat_format.tokenizer, ids), False
        else:
            message, malformed = parse_turn(self.chat_format.tokenizer, ids, prefix, episode.schemas)
        episode.messages.append(message)
        episode.counts["malformed"] += malformed and not cut and bool(episode.schemas)
        if episode.failed:
            episode.end()
        elif cut and (is_full or not reads_text):  # calls of a cut turn are not run
            episode.end(CUT, truncated=True, open_ended=True)
        elif reads_text:
            yield from self.step(episode, message["content"])
        elif episode.schemas and (calls := message.get("tool_calls")):
            yield from self.call_tools(episode, [call["function"] for call in calls])
        else:
            episode.end()

    def step(self, episode: Episode, text: str) -> Steps[None]:
        """Let a text environment answer a turn."""
        environment, end = episode.environment, len(episode.ids) - 1
        described = f"{type(environment).__name__}.step, row {episode.row.number},"
        try:
            taken = yield from self.call(described, partial(environment.step, text))
        except TimeoutError:
            episode.counts[TIMEOUT] += 1
            episode.abandon()
            return
        if not isinstance(taken, tuple | list) or len(taken) != 5:
            raise ValueError(
                f"{described} returned {taken!r:.200}; return observation, reward, terminated, truncated, info"
            )
        observation, reward, terminated, truncated, _ = taken
        episode.rewards[end] = finite_reward(described, reward)
        if terminated:
            episode.end()
            return
        is_last = truncated or self.rounds_left(episode) <= 0
        self.reply(episode, [{"role": "user", "content": text_of(observation)}], is_last)

    def call_tools(self, episode: Episode, calls: Sequence[ToolCall]) -> Steps[None]:
        """Let tools answer a turn."""
        end = len(episode.ids) - 1
        if self.rounds_left(episode) < 0:
            episode.end(UNFINISHED, truncated=True)  # the critic has no value for the state after a turn's end
            return
        called: Future = yield partial(run_calls, calls, episode.tools, self.args.tool_timeout)
        answers: list[Answer] = called.result()
        messages = [answer.message for answer in answers]
        results = [answer.result for answer in answers if answer.result is not None]
        failures = [answer.failure for answer in answers if answer.failure is not None]
        episode.counts.update(calls=len(answers), **Counter(failures))
        if results:
            episode.rewards[end] = sum(result.reward for result in results)
        if any(answer.failure == TIMEOUT and answer.of_environment for answer in answers):
            episode.abandon()
        elif any(result.done for result in results):
            episode.messages += messages
            episode.end()
        else:
            self.reply(episode, messages, last=False)

    def rounds_left(self, episode: Episode) -> float:
        """Return how many rounds of tool calls, or steps of an environment, are allowed after this one."""
        most = self.args.max_tool_calling_iterations
        return math.inf if most is None else most - episode.turns

    def reply(self, episode: Episode, replies: list[Message], last: bool) -> None:
        """Append an answer as context, or end the episode if it does not fit.

        Args:
            last: end the episode here, in the state in which another turn would start.
        """
        room = self.args.max_completion_length - len(episode.ids)
        own = template_options(None, episode.row.columns.get("chat_template_kwargs"))
        ids = self.chat_format.reply_ids(replies, episode.ids[-1] in self.chat_format.eos_ids, own)
        if len(ids) >= room + last:
            episode.end(DROPPED, truncated=True)
            return
        episode.messages += replies
        episode.append(ids)
        if last:
            episode.end(UNFINISHED, truncated=True, open_ended=True)


def make_player(agents: Agents, eos_ids: list[int], args: PPOConfig, positions: int | None) -> EpisodePlayer:
    """Return the player of a run.

    Args:
        eos_ids: tokens that end a turn.
        positions: the model's number of positions; None for any number.
    Raises:
        ValueError: the chat template does not fit, see `check_template`.
    """
    chat_format = replace(agents.chat_format, eos_ids=eos_ids)
    check_template(chat_format, "tool" if any(agents.schemas.values()) else "user")
    limits = [args.max_prompt_length, positions and positions - args.max_completion_length]
    return EpisodePlayer(agents, chat_format, args, min((x for x in limits if x is not None), default=None))


def completions_of(episodes: Sequence[Episode], pad_id: int) -> Completions:
    """Return the episodes as tensors."""
    ids, real = pad_right([e.ids for e in episodes], torch.int64, pad_id)
    mask, _ = pad_right([e.sampled for e in episodes], torch.bool)
    logprobs, _ = pad_right([e.logprobs for e in episodes], torch.float32)
    return Completions(
        ids=ids,
        mask=mask,
        truncated=torch.tensor([e.truncated for e in episodes]),
        logprobs=logprobs,
        context=real & ~mask,
        open_ended=torch.tensor([e.open_ended for e in episodes]),
        cut=torch.tensor([e.limit == CUT for e in episodes]),
    )
