"""The conversation of one episode of an agent, token by token.

Sampled tokens are never tokenized again. A request that begins with the messages of the conversation so far, up to
and including the policy's last answer, continues its tokens; only the messages after it are rendered.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from hfppo.config import PPOConfig
from hfppo.data.chat_template import Message
from hfppo.endpoint.chat import Answer, Refusal, Request
from hfppo.environments.chat_format import ChatFormat, parse_turn, text_message
from hfppo.environments.episodes import Episode
from hfppo.generation.stop_strings import StopStrings
from hfppo.sample import Ended, Turn
from hfppo.state import stream_seed


@dataclass(frozen=True)
class Call:
    """One call of the policy."""

    prompt: list[int]
    seed: int
    budget: int  # maximum number of tokens


@dataclass
class Session:
    """The calls of one episode. All methods run in the server's event loop.

    Args:
        ask: samples the policy's answer to a call.
        max_prompt: maximum number of tokens of the prompt; None: no limit.
    """

    episode: Episode
    ask: Callable[[Call], Coroutine[Any, Any, Turn]]
    chat_format: ChatFormat
    args: PPOConfig
    max_prompt: int | None
    served: Request | None = None  # the conversation so far, the policy's last answer included
    last: tuple[Request, Answer] | None = None
    ended: Ended = Ended.STOPPED  # how the episode ended, as far as is known
    fault: Exception | None = None  # an error that ends the run
    is_over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sampling: dict[tuple[int, ...], asyncio.Task[Turn]] = field(default_factory=dict)  # by prompt

    async def answer(self, request: Request, client_left: asyncio.Future, is_retry: bool = False) -> Answer:
        """Return the policy's answer to a request, and record it.

        An answer whose client has left is not recorded, unless the client asks the same again.

        Args:
            is_retry: whether the client says that it has asked before.
        Raises:
            Refusal: the request cannot be answered.
        """
        async with self.lock:
            if is_retry and self.last is not None and self.last[0] == request:
                return self.last[1]  # the client left while it was sent
            new = self.new_tokens(request)
            call = self.call(request, new)
            task = self.find_task(call)
            await asyncio.wait({task, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Refusal(499, "the client has left")
            self.sampling = {}
            if self.is_over:
                raise Refusal(401, "the episode is over")
            answer = self.record(request, new, task.result(), call)
            self.last = request, answer
            return answer

    def find_task(self, call: Call) -> asyncio.Task[Turn]:
        """Return what samples an answer: for an earlier client that has left, or from now on."""
        key = tuple(call.prompt)
        for other in self.sampling.keys() - {key}:
            self.sampling.pop(other).cancel()
        return self.sampling.setdefault(key, self.sampling.get(key) or asyncio.create_task(self.ask(call)))

    async def end(self) -> None:
        """Answer no more requests."""
        self.is_over = True
        for task in self.sampling.values():
            task.cancel()
        async with self.lock:  # the request that is being answered ends
            pass

    def new_tokens(self, request: Request) -> list[int]:
        """Return what a request adds to the episode: the prompt at first, then context.

        Raises:
            Refusal: the episode is over, a limit is reached, or the chat template cannot render the request.
        """
        if self.is_over:
            raise Refusal(401, "the episode is over")
        most = self.args.max_tool_calling_iterations
        if most is not None and self.episode.turns >= most:
            self.ended = Ended.UNFINISHED
            raise Refusal(400, f"the episode has had its max_tool_calling_iterations={most} calls", "too_many_calls")
        if request.tools and self.chat_format.role != "tool":
            raise Refusal(
                400,
                "the policy's tokenizer cannot render or parse tool calls; set chat_template and response_template of "
                "processing_class, as docs/calculator.md does",
            )
        try:
            return self.prompt(request) if self.served is None else self.context(request, self.served)
        except (TemplateError, TypeError, ValueError) as error:
            raise Refusal(400, f"the chat template cannot render the messages: {error}") from error

    def prompt(self, request: Request) -> list[int]:
        """Return the tokens of the first request."""
        safe = [{**one, "content": self.chat_format.neutralize(one["content"])} for one in request.messages]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        ids = self.chat_format.rendered(safe, tools=request.tools or None, **options)["input_ids"]
        if not ids:
            raise Refusal(400, "the messages have no tokens")
        self.check_room(len(ids), self.max_prompt)
        return ids

    def context(self, request: Request, served: Request) -> list[int]:
        """Return the tokens of the messages after the policy's last answer."""
        episode, count = self.episode, len(served.messages)
        if request.tools != served.tools or request.keys[:count] != served.keys:
            self.fault = ValueError(describe_difference(request, served))
            raise Refusal(400, str(self.fault))
        if not (replies := request.messages[count:]):
            raise Refusal(400, "the messages end with the policy's own answer; append one that it can answer")
        ids = self.chat_format.reply_ids(replies, episode.ids[-1] in self.chat_format.eos_ids)
        self.check_room(len(episode.ids) + len(ids) + 1, self.args.max_completion_length)
        return ids

    def check_room(self, length: int, most: int | None) -> None:
        """Raise Refusal if so many tokens are too many."""
        if most is not None and length > most:
            self.ended = Ended.DROPPED if self.episode.turns else Ended.STOPPED
            message = f"the maximum context length is {most} tokens, and the messages need {length}; shorten them"
            raise Refusal(400, message, "context_length_exceeded")

    def call(self, request: Request, new: list[int]) -> Call:
        """Return the call for a request that adds some tokens."""
        episode, turns = self.episode, self.episode.turns
        before = episode.row.prompt_ids + episode.ids if turns else []
        room = self.args.max_completion_length - len(episode.ids) - (len(new) if turns else 0)
        limits = [room, self.args.max_turn_length, request.max_tokens]
        seed = stream_seed(episode.row.seed, turns) if turns else episode.row.seed
        return Call(before + new, seed, min(limit for limit in limits if limit))

    def record(self, request: Request, new: list[int], turn: Turn, call: Call) -> Answer:
        """Append the answer to the episode, and return it."""
        episode = self.episode
        turn, stop = cut_at_stop(turn, StopStrings(self.chat_format.tokenizer, request.stop))
        message = self.message(request, turn, call.prompt)
        if stop is not None:
            message["content"] = message["content"].partition(stop)[0]
        if self.served is None:
            columns = {**episode.row.columns, "prompt": request.messages}
            episode.row = replace(episode.row, prompt_ids=new, columns=columns)
        else:
            episode.messages += request.messages[len(self.served.messages) :]
            episode.append(new)
        episode.append(turn.ids, turn.logprobs)
        episode.messages.append(message)
        episode.turns += 1
        self.ended = Ended.CUT if turn.truncated else Ended.STOPPED
        self.served = replace(request, messages=[*request.messages, message])
        finish = "length" if turn.truncated else "tool_calls" if message.get("tool_calls") else "stop"
        return Answer(message, finish, len(call.prompt), len(turn.ids))

    def message(self, request: Request, turn: Turn, prompt: list[int]) -> Message:
        """Return an answer as a message; a cut one has no calls."""
        if not request.tools:
            return text_message(self.chat_format.tokenizer, turn.ids)
        message, malformed = parse_turn(self.chat_format.tokenizer, turn.ids, prompt, request.tools)
        self.episode.counts["malformed"] += malformed and not turn.truncated
        calls = message.pop("tool_calls", None)
        if calls and not turn.truncated:
            self.episode.counts["served_calls"] += len(calls)
            message["tool_calls"] = calls
        return message


def cut_at_stop(turn: Turn, stops: StopStrings) -> tuple[Turn, str | None]:
    """Return a turn up to the token that completes the first stop string, and that string.

    The end is a stopping time, so the log-probs stay true.
    """
    if not stops.strings or not (end := stops.end(turn.ids)):
        return turn, None
    text = stops.tokenizer.decode(turn.ids[:end])
    first = min((string for string in stops.strings if string in text), key=text.index, default=None)
    return Turn(turn.ids[:end], turn.logprobs[:end]), first


def describe_difference(request: Request, served: Request) -> str:
    """Return an error that shows where a request leaves the conversation of its episode."""
    advice = "An episode is one conversation, to which messages are appended"
    if request.tools != served.tools:
        return f"the agent has changed its tools within an episode. {advice}"
    pairs = zip([*request.keys, "nothing"], served.keys, strict=False)
    number, (given, known) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
    return (
        f"the agent has begun a second conversation in its episode: message {number} is {shorten(given)}, and was "
        f"{shorten(known)}. {advice}"
    )


def shorten(key: str) -> str:
    """Return the beginning and the end of a text."""
    return key if len(key) <= 200 else f"{key[:120]} … {key[-60:]}"
