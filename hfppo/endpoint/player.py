"""Episodes that a program of the user plays, with the policy behind an endpoint."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from numbers import Real
from typing import Any

from transformers import PreTrainedTokenizerBase

from hfppo.endpoint.command import Command
from hfppo.endpoint.session import Call, Session
from hfppo.environments.agents import Agents, EnvironmentPool
from hfppo.environments.chat_format import make_chat_format
from hfppo.environments.environment import finite_reward
from hfppo.environments.episodes import Ask, Episode, EpisodePlayer, TurnSampler, columns_for
from hfppo.rewards.reward_func import is_async
from hfppo.sample import Ended, Turn
from hfppo.support.calls import MOST_THREADS, call_with_limit

Agent = Callable[..., Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentPlayer(EpisodePlayer):
    """Plays episodes with a program of the user, which asks the policy over HTTP.

    Args:
        is_judge: whether the run has no reward function, so that the agent must return numbers.
    """

    is_judge: bool = field(kw_only=True)
    first_patience = 1.0  # some agents need long before their first call

    @property
    def room(self) -> int | None:  # type: ignore[override]
        """See `EpisodePlayer`; an agent keeps its thread or process to its end."""
        agent = self.agents.agent
        return None if is_async(agent) and not isinstance(agent, Command) else MOST_THREADS

    def review(self, episodes: Sequence[Episode]) -> None:
        """Warn of agents that have failed.

        Raises:
            RuntimeError: all agents of a rollout have failed.
        """
        if errors := [episode.error for episode in episodes if episode.error is not None]:
            failed = f"the agent has failed in {len(errors)} of {len(episodes)} episodes"
            if len(errors) == len(episodes) >= self.args.rollout_size_per_process:
                raise RuntimeError(f"{failed}; the first error: {errors[0]!r}") from errors[0]
            logger.warning("%s, which have no score; the first error:", failed, exc_info=errors[0])

    def sample_turns(self, sample: TurnSampler, calls: Sequence[Any], greedy: bool) -> list[Turn]:
        """Sample the answers to some calls."""
        calls = [call for call in calls if isinstance(call, Call)]
        if not calls:
            return []  # all that was asked is withdrawn
        for call in calls:
            call.is_taken = True
        seeds = None if greedy else [call.seed for call in calls]
        return sample([call.prompt for call in calls], seeds, [call.budget for call in calls])

    async def play_one(self, episode: Episode, ask: Ask) -> Episode:
        """Play an episode, from the start of the agent to its end."""
        from hfppo.endpoint.server import this_server  # needs the extra `endpoint`

        agent, server, value, error = self.agents.agent, this_server(), None, None
        session = Session(episode, ask, self.chat_format, self.args, self.max_prompt)
        key = server.begin(session)
        try:
            async with asyncio.timeout(self.args.tool_timeout) as limit:
                given = {"base_url": server.url, "api_key": key, **columns_for(agent, episode.row)}
                value = await call_with_limit(partial(agent, **given), None, "")
                self.check(value, session)
        except (Exception, SystemExit) as raised:
            error = raised
        finally:
            await asyncio.wrap_future(server.end(key))
        if limit.expired():
            session.limit = Ended.UNFINISHED
        called, episode.ended = bool(session.answered), session.ended
        if not called:
            await session.fill()
        elif error is not None and episode.ended is not Ended.STOPPED:
            value, error = 0.0, None  # the policy has reached a limit, which must not be better than a bad answer
        session.write()
        episode.turns *= called
        episode.text, episode.error = episode.messages, error
        episode.failed = error is not None or not called
        episode.counts["failed_agents"] = int(error is not None)
        episode.final_reward = value if isinstance(value, Real) else None
        by_id = value if isinstance(value, Mapping) and error is None else {}
        episode.turn_rewards = {call.end: x for name, x in by_id.items() if (call := session.call_of(name))}
        episode.row = replace(episode.row, columns={**episode.row.columns, "outputs": value})
        return episode

    def check(self, value: object, session: Session) -> None:
        """Raise if the agent's value cannot be used.

        Raises:
            ValueError: it is neither a finite number nor has one for each of some answers' ids, and no reward function
                reads anything else.
        """
        if isinstance(value, Mapping):
            for name, reward in value.items():
                if session.call_of(name) is not None:
                    finite_reward("agent", reward)
                elif self.is_judge:
                    raise ValueError(f"agent gave a reward to {name!r}, which is the id of no answer in its episode")
        elif isinstance(value, Real) or (self.is_judge and value is not None):
            finite_reward("agent", value)


def load_program(
    agent: Agent, tools: object, factory: object, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> Agents:
    """Return an agent in place of the tools and environments of a run.

    Args:
        tools, factory: the arguments that an agent replaces.
        options: arguments of the chat template.
    Raises:
        ImportError: the server's packages are not installed.
        TypeError, ValueError: the agent or the chat template cannot be used.
    """
    if tools or factory is not None:
        raise ValueError(
            "agent plays the episodes by itself; leave tools and environment_factory out, and let the agent offer them"
        )
    if inspect.isclass(agent) or not callable(agent):
        raise TypeError(f"agent={agent!r} cannot be called; pass a function, or a Command with a list of texts")
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        raise ImportError("agent needs a server; install it with: pip install 'hfppo[endpoint]'")
    try:
        chat_format = make_chat_format(tokenizer, options, with_tools=True)
    except ValueError as error:
        logger.info("the agent cannot offer tools to the policy: %s", error)
        chat_format = make_chat_format(tokenizer, options, with_tools=False)
    return Agents({}, {None: EnvironmentPool("agent", None, {})}, chat_format, by_column=False, agent=agent)
