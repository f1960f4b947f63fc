"""Episodes: several turns of the model, and between them the answers of tools and an environment.

An episode continues as soon as its own tools have answered: it joins the sampler's next batch, without the episodes
that still wait. A row's episode depends only on its own seeds. Processes do not wait for each other between turns,
except with sharded models, whose processes compute together.
"""

import inspect
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from transformers.utils.logging import get_logger

from hfppo.config import PPOConfig
from hfppo.data.chat_template import Message, Schema, render_all, template_options
from hfppo.data.prompts import CRITIC_PROMPT, EMPTY_PROMPT, Row
from hfppo.environments.agents import COLUMN, Agents, EnvironmentPool
from hfppo.environments.chat_format import ChatFormat, check_template, parse_turn, text_message
from hfppo.environments.environment import TextEnvironment, finite_reward, joined, replace_halves, text_of, tools_of
from hfppo.environments.tool_calls import TIMEOUT, ToolCall, run_calls
from hfppo.sample import Ended, Ids, Sample, Turn
from hfppo.state import stream_seed
from hfppo.support.background import Questions
from hfppo.support.calls import call_with_limit

# Completes prompts, each with its seed and its maximum number of tokens; greedily without seeds.
TurnSampler = Callable[[list[Ids], list[int] | None, list[int]], list[Turn]]

Ask = Callable[[Any], Coroutine[Any, Any, Turn]]  # samples the next turn of an episode

READ = ("prompt_ids", "critic_prompt_ids")  # the prompts of a row, the actor's and the critic's

PATIENCE = 0.03  # seconds that ready episodes wait for others at least, so that quick tools keep batches whole

logger = get_logger(__name__)


@dataclass
class Episode(Sample):
    """A completion while it is played."""

    pool: EnvironmentPool = field(kw_only=True)  # the environment's instances
    messages: list[Message] = field(default_factory=list)  # turns and answers; `text` in the end
    lost: bool = False  # whether the environment's state is unknown, so that no other episode may use it
    error: BaseException | None = None  # of an agent that has failed

    def describe(self, method: str) -> str:
        """Return a method of the environment, and the row, for errors."""
        return f"{type(self.environment).__name__}.{method}, row {self.row.number},"

    def abandon(self) -> None:
        """End the episode without a score: the state of its environment is unknown."""
        self.failed = self.lost = True
        self.ended = Ended.STOPPED


@dataclass(frozen=True)
class EpisodePlayer:
    """Plays episodes with the tools and environments of a run.

    Args:
        chat_format: its `eos_ids` end a turn of this model.
        max_prompt: maximum number of tokens of a prompt with the text of `reset`; None: no limit.
    """

    agents: Agents
    chat_format: ChatFormat
    args: PPOConfig
    max_prompt: int | None
    room = None  # number of episodes that run at once; None: all
    first_patience = math.inf  # seconds that the first ready episodes wait for others

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
        episodes = self.begin(rows)
        patience = self.first_patience
        played = [partial(self.play_one, episode) for episode in episodes]
        with warn_of_global_draws(), Questions(played, self.room) as questions:
            while any_active(questions.wait(patience, timed)):
                asked = questions.take()
                # Without a ready row, a process of a sharded model still joins the others' forward passes.
                waiting = [one.question for one in asked] or questions.results()[:1]
                turns = partial(self.sample_turns, sample, waiting, greedy)
                start = time.perf_counter()
                if at_once:
                    questions.answer_later(asked, turns)
                else:
                    questions.answer(asked, turns())
                # A longer wait leaves the sampler idle; a shorter one makes many small batches, each about as slow.
                patience = max(PATIENCE, (time.perf_counter() - start) / 2)
        self.give_back(episodes)
        self.review(episodes)
        return episodes

    def complete_prompts(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the prompts that their environments complete; their episodes are not played."""
        episodes = self.begin(rows)
        opened = [lambda _, episode=episode: self.open(episode) for episode in episodes]
        with Questions(opened) as questions:
            questions.wait()
        self.give_back(episodes)
        return [episode.row for episode in episodes]

    def begin(self, rows: Sequence[Row]) -> list[Episode]:
        """Return an episode for each row, with an instance of its environment."""
        pools = [self.agents.pool_of(row.columns) for row in rows]
        return [Episode(row, environment=pool.take(), pool=pool) for row, pool in zip(rows, pools, strict=True)]

    def review(self, episodes: Sequence[Episode]) -> None:
        """Look at episodes that are over; a subclass may warn or raise."""

    def give_back(self, episodes: Sequence[Episode]) -> None:
        """Make the environments of episodes idle."""
        for episode in episodes:
            if not episode.lost:
                episode.pool.idle.append(episode.environment)

    def sample_turns(self, sample: TurnSampler, episodes: Sequence[Episode], greedy: bool) -> list[Turn]:
        """Sample the next turn of some episodes."""
        prompts = [episode.row.prompt_ids + episode.ids for episode in episodes]
        seeds = [stream_seed(e.row.seed, e.turns) if e.turns else e.row.seed for e in episodes]
        return sample(prompts, None if greedy else seeds, [self.budget(episode) for episode in episodes])

    def budget(self, episode: Episode) -> int:
        """Return the maximum number of tokens of an episode's next turn."""
        if episode.failed:
            return 1  # fills the row's place in the batch
        room = max(1, self.args.max_completion_length - len(episode.ids))
        return min(room, self.args.max_turn_length or room)

    async def play_one(self, episode: Episode, ask: Ask) -> Episode:
        """Play an episode, from the reset of its environment to its final reward."""
        await self.open(episode)
        while episode.ended is None:
            await self.take_turn(episode, await ask(episode))
        get_reward = getattr(episode.environment, "get_reward", None)
        if get_reward is not None and not episode.failed:
            episode.final_reward = await call_with_limit(get_reward, None, "")
        episode.text = episode.messages
        return episode

    # The beginning

    async def open(self, episode: Episode) -> None:
        """Reset the environment, and append its text to the prompt."""
        text = "" if episode.environment is None else await self.reset(episode)
        row = episode.row = self.complete_prompt(episode.row, text or "", episode.pool.schemas)
        given = {name: ids for name in READ if (ids := getattr(row, name)) is not None}
        length, kind = max(map(len, given.values())), type(episode.environment).__name__
        if not all(given.values()):
            raise ValueError(f"row {row.number}: the prompt and the text of {kind}.reset are empty; write one of them")
        if self.max_prompt is not None and length > self.max_prompt:
            episode.row = replace(row, **{name: ids[-self.max_prompt :] for name, ids in given.items()})
            episode.failed = True
            logger.warning(
                "row %d: with the text of %s.reset the prompt has %d tokens, more than %d; it has no score",
                *(row.number, kind, length, self.max_prompt),
            )

    def complete_prompt(self, row: Row, text: str, schemas: list[Schema]) -> Row:
        """Return a row whose prompt ends with a text, in messages of plain text, which every chat template renders.

        The critic's prompt, if it has its own, ends with the text, too; its column stays as it is.
        """
        given = [row.columns.get("prompt", EMPTY_PROMPT)]
        if row.critic_prompt_ids is not None:
            given.append(row.columns[CRITIC_PROMPT] or given[0])
        columns = {**row.columns, "prompt": extended(given[0], text)}
        shown = [extended(prompt, self.chat_format.neutralize(text)) for prompt in given]
        if shown == given:
            return replace(row, columns=columns)
        rendered = [{**columns, "prompt": prompt, "tools": schemas or columns.get("tools")} for prompt in shown]
        rendered_ids = render_all(rendered, self.chat_format.tokenizer, self.chat_format.options)
        ids: dict[str, Any] = dict(zip(READ, rendered_ids, strict=False))
        return replace(row, columns=columns, **ids)

    async def reset(self, episode: Episode) -> str | None:
        """Reset the environment of an episode, and return its text."""
        columns = columns_for(episode.environment.reset, episode.row)
        if self.agents.by_column:
            del columns[COLUMN]
        return replace_halves(joined(await self.call(episode, "reset", **columns)))

    async def call(self, episode: Episode, method: str, /, *args: object, **kwargs: object) -> Any:
        """Call a method of an episode's environment.

        Raises:
            TimeoutError: it takes too long.
            RuntimeError: it raises any other error.
        """
        described = episode.describe(method)
        func = partial(getattr(episode.environment, method), *args, **kwargs)
        late = f"{described} took longer than tool_timeout={self.args.tool_timeout} seconds"
        try:
            return await call_with_limit(func, self.args.tool_timeout, late)
        except TimeoutError:
            raise
        except Exception as error:
            raise RuntimeError(f"{described} failed: {error!r}") from error

    # A turn

    async def take_turn(self, episode: Episode, turn: Turn) -> None:
        """Append a turn of the model, and the answer to it."""
        prefix, schemas = episode.row.prompt_ids + episode.ids, episode.pool.schemas
        episode.append(turn.ids, turn.logprobs)
        episode.turns += 1
        reads_text = isinstance(episode.environment, TextEnvironment)
        is_full = len(episode.ids) >= self.args.max_completion_length
        if reads_text:
            message, malformed = text_message(self.chat_format.tokenizer, turn.ids), False
        else:
            message, malformed = parse_turn(self.chat_format.tokenizer, turn.ids, prefix, schemas)
        episode.messages.append(message)
        episode.counts["malformed"] += malformed and not turn.truncated and bool(schemas)
        if episode.failed:
            episode.ended = Ended.STOPPED
        elif turn.truncated and (is_full or not reads_text):  # calls of a cut turn are not run
            episode.ended = Ended.CUT
        elif reads_text:
            await self.step(episode, message["content"])
        elif schemas and (calls := message.get("tool_calls")):
            await self.call_tools(episode, [call["function"] for call in calls])
        else:
            episode.ended = Ended.STOPPED

    async def step(self, episode: Episode, text: str) -> None:
        """Let a text environment answer a turn."""
        try:
            taken = await self.call(episode, "step", text)
        except TimeoutError:
            episode.counts[TIMEOUT] += 1
            episode.abandon()
            return
        described = episode.describe("step")
        if not isinstance(taken, tuple | list) or len(taken) != 5:
            raise ValueError(
                f"{described} returned {taken!r:.200}; return observation, reward, terminated, truncated, info"
            )
        observation, reward, terminated, truncated, _ = taken
        episode.turn_rewards[len(episode.ids) - 1] = finite_reward(described, reward)
        if terminated:
            episode.ended = Ended.STOPPED
        else:
            last = truncated or self.rounds_left(episode) <= 0
            self.reply(episode, [{"role": "user", "content": text_of(observation)}], last)

    async def call_tools(self, episode: Episode, calls: Sequence[ToolCall]) -> None:
        """Let tools answer a turn."""
        if self.rounds_left(episode) < 0:
            episode.ended = Ended.UNFINISHED
            return
        tools = {**self.agents.tools, **tools_of(episode.environment)}
        answers = await run_calls(calls, tools, self.args.tool_timeout)
        messages = [answer.message for answer in answers]
        results = [answer.result for answer in answers if answer.result is not None]
        failures = [answer.failure for answer in answers if answer.failure is not None]
        episode.counts.update(calls=len(answers), **Counter(failures))
        if results:
            episode.turn_rewards[len(episode.ids) - 1] = sum(result.reward for result in results)
        if any(answer.failure == TIMEOUT and answer.of_environment for answer in answers):
            episode.abandon()
        elif any(result.done for result in results):
            episode.messages += messages
            episode.ended = Ended.STOPPED
        else:
            self.reply(episode, messages, last=False)

    def rounds_left(self, episode: Episode) -> float:
        """Return how many rounds of tool calls, or steps of an environment, are allowed after this one.

        With none left `call_tools` ends the episode, or `step` with `reply`. An agent's limit is in `Session.begin`.
        """
        most = self.args.max_tool_calling_iterations
        return math.inf if most is None else most - episode.turns

    def reply(self, episode: Episode, replies: list[Message], last: bool) -> None:
        """Append an answer as context, or end the episode if it does not fit.

        Args:
            last: end the episode here, in the state in which another turn would start.
        """
        room = self.args.max_completion_length - len(episode.ids)
        own = template_options({**episode.row.columns, "tools": None})
        ids = self.chat_format.reply_ids(replies, episode.ids[-1] in self.chat_format.eos_ids, own)
        if len(ids) >= room + last:
            episode.ended = Ended.DROPPED
            return
        episode.messages += replies
        episode.append(ids)
        if last:
            episode.ended = Ended.UNFINISHED


def extended(prompt: list[Message], text: str) -> list[Message]:
    """Return a prompt as messages of plain text, the last of which ends with a text."""
    *before, last = ({**message, "content": joined(message.get("content"))} for message in prompt)
    return [*before, {**last, "content": last["content"] + text}]


def columns_for(func: Callable[..., object], row: Row) -> dict[str, Any]:
    """Return a row's columns, and those of its seeds that a function names as parameters."""
    seeds = {"seed": row.environment_seed, "episode_seed": row.seed}
    parameters = inspect.signature(func).parameters
    return {name: seed for name, seed in seeds.items() if name in parameters} | row.columns


def make_player(
    agents: Agents, eos_ids: list[int], args: PPOConfig, positions: int | None, player: Callable[..., EpisodePlayer]
) -> EpisodePlayer:
    """Return the player of a run.

    Args:
        eos_ids: tokens that end a turn.
        positions: the model's number of positions; None for any number.
        player: makes it.
    Raises:
        ValueError: the chat template does not fit, see `check_template`.
    """
    chat_format = replace(agents.chat_format, eos_ids=eos_ids)
    check_template(chat_format)
    limits = [args.max_prompt_length, positions and positions - args.max_completion_length]
    return player(agents, chat_format, args, min((x for x in limits if x is not None), default=None))


def global_random_states() -> str:
    """Return the states of the global generators of Python and NumPy."""
    return repr((random.getstate(), np.random.get_state(legacy=False)))


@contextmanager
def warn_of_global_draws() -> Iterator[None]:
    """Warn once if the block draws from global random numbers: calls that run at once do so in no fixed order."""
    before = global_random_states()
    yield
    if global_random_states() != before:
        logger.warning_once(
            "a tool, an environment or a library drew from the global random numbers of Python or NumPy; calls run at "
            "once, so another run with the same seed may draw others. Draw from random.Random(seed), with a seed that "
            "reset gets"
        )
