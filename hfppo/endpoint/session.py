"""The calls of one episode of an agent, token by token.

Sampled tokens are never tokenized again. A request that begins with a conversation that was served before, up to and
including the policy's answer, continues its tokens; only the messages after it are rendered. Any other request begins
a conversation of its own.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from hfppo.config import PPOConfig
from hfppo.data.chat_template import Message
from hfppo.data.prompts import EMPTY_PROMPT
from hfppo.endpoint.chat import Answer, Refusal, Request, key_of
from hfppo.environments.chat_format import ChatFormat, parse_turn, text_message
from hfppo.environments.episodes import Episode
from hfppo.generation.stop_strings import StopStrings
from hfppo.sample import Ended, Turn
from hfppo.state import stream_seed


@dataclass(eq=False)
class Call:
    """One call of the policy, and its answer."""

    request: Request
    prompt: list[int]  # all tokens that the policy reads
    start: int  # tokens with which the conversation has begun
    seed: int
    budget: int  # maximum number of tokens
    before: "Call | None" = None  # the call that it continues
    sampling: asyncio.Future[Turn] = field(default_factory=asyncio.Future)
    is_taken: bool = False  # by the sampler
    clients: int = 0  # that wait for the answer
    turn: Turn | None = None
    answer: Answer | None = None
    end: int = 0  # of the answer on the tape: the position of its last token

    @property
    def tokens(self) -> list[int]:
        """The tokens that the policy has read and sampled."""
        assert self.turn is not None
        return self.prompt + self.turn.ids

    @property
    def is_missed(self) -> bool:
        """Whether the client has left without an answer."""
        return self.answer is None and not self.clients


@dataclass
class Session:
    """The calls of one episode. They come in the server's event loop.

    Args:
        ask: samples the policy's answer to a call.
        max_prompt: maximum number of tokens with which a conversation begins; None: no limit.
    """

    episode: Episode
    ask: Callable[[Call], Coroutine[Any, Any, Turn]]
    chat_format: ChatFormat
    args: PPOConfig
    max_prompt: int | None
    calls: list[Call] = field(default_factory=list)  # in the order of their requests
    served: dict[tuple[str, ...], Call] = field(default_factory=dict)  # by the conversation with the answer
    limit: Ended | None = None  # that the latest request has met
    is_over: bool = False

    @property
    def answered(self) -> list[Call]:
        """The calls whose answers have reached the agent."""
        return [call for call in self.calls if call.answer is not None]

    def call_of(self, name: object) -> Call | None:
        """Return the call whose answer has this id, as its API writes it; None if there is none."""
        return next((call for call in self.answered if call.answer and str(name).endswith(call.answer.id)), None)

    @property
    def ended(self) -> Ended:
        """How the episode ended, as far as is known."""
        is_cut = any(call.turn.truncated for call in self.answered[-1:] if call.turn is not None)
        return self.limit or (Ended.CUT if is_cut else Ended.STOPPED)

    async def answer(self, request: Request, client_left: asyncio.Future, is_retry: bool = False) -> Answer:
        """Return the policy's answer to a request, and record it.

        A call whose client has left is not sampled, or its answer not recorded, unless the client asks the same again.

        Args:
            is_retry: whether the client says that it has asked before.
        Raises:
            Refusal: the request cannot be answered.
        """
        call = self.find_missed(request, is_retry) or self.begin(request)
        call.clients += 1
        await asyncio.wait({call.sampling, client_left}, return_when=asyncio.FIRST_COMPLETED)
        call.clients -= 1
        if not call.sampling.done():
            if not call.clients and not call.is_taken:
                call.sampling.cancel()
                self.calls.remove(call)
            raise Refusal(499, "the client has left")
        if self.is_over:
            raise Refusal(401, "the episode is over")
        return call.answer or self.record(call, call.sampling.result())

    def find_missed(self, request: Request, is_retry: bool) -> Call | None:
        """Return a call with the same request whose answer the client has missed; None if there is none."""
        equal = [call for call in self.calls if call.request == request]
        missed = [call for call in equal if call.is_missed] or (equal if is_retry else [])
        return missed[-1] if missed else None

    async def end(self) -> None:
        """Answer no more requests."""
        self.is_over = True
        for call in self.calls:
            call.sampling.cancel()

    def begin(self, request: Request) -> Call:
        """Begin to sample the answer to a request.

        Raises:
            Refusal: a limit is reached, or the chat template cannot render the request.
        """
        most = self.args.max_tool_calling_iterations
        if most is not None and sum(not call.is_missed for call in self.calls) >= most:
            self.limit = Ended.UNFINISHED
            raise Refusal(400, f"the episode has had its max_tool_calling_iterations={most} calls", "too_many_calls")
        if request.tools and self.chat_format.role != "tool":
            raise Refusal(
                400,
                "the policy's tokenizer cannot render or parse tool calls; set chat_template and response_template of "
                "processing_class, as docs/calculator.md does",
            )
        try:
            before, prompt = self.read(request)
        except (TemplateError, TypeError, ValueError) as error:
            raise Refusal(400, f"the chat template cannot render the messages: {error}") from error
        call = self.make_call(request, prompt, before)
        call.sampling = asyncio.create_task(self.ask(call))
        self.calls.append(call)
        return call

    def read(self, request: Request) -> tuple[Call | None, list[int]]:
        """Return the call that a request continues, if there is one, and the tokens that the policy reads."""
        keys = request.keys
        known = (self.served.get(keys[:count]) for count in range(len(keys), 0, -1))
        if (before := next(filter(None, known), None)) is not None:
            if not (replies := request.messages[len(before.request.messages) + 1 :]):
                raise Refusal(400, "the messages end with the policy's own answer; append one that it can answer")
            with suppress(ValueError):  # the template renders earlier messages differently when these follow
                closed = before.tokens[-1] in self.chat_format.eos_ids
                return before, before.tokens + self.chat_format.reply_ids(replies, closed)
        if not (prompt := self.render(request)):
            raise Refusal(400, "the messages have no tokens")
        return None, prompt

    def render(self, request: Request) -> list[int]:
        """Return the tokens of a whole request."""
        safe = [{**one, "content": self.chat_format.neutralize(one["content"])} for one in request.messages]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return self.chat_format.rendered(safe, tools=request.tools or None, **options)["input_ids"]

    def make_call(self, request: Request, prompt: list[int], before: Call | None) -> Call:
        """Return a call with its seed and budget.

        The seed depends on the tokens, so that parallel calls may come in any order.

        Raises:
            Refusal: there is no room for an answer.
        """
        most, length = self.args.max_completion_length, len(prompt)
        start = length if before is None else before.start
        if length - start >= most and self.args.max_prompt_length is not None:  # goes on as a prompt, if it fits
            before, start = None, length
        self.check_room(length - start + 1, most)
        if before is None:
            self.check_room(length, self.max_prompt)
        asked = sum(call.prompt == prompt for call in self.calls)
        limits = [start + most - length, self.args.max_turn_length, request.max_tokens]
        seed = stream_seed(self.episode.row.seed, *prompt, asked)
        return Call(request, prompt, start, seed, min(limit for limit in limits if limit), before)

    def check_room(self, length: int, most: int | None) -> None:
        """Raise Refusal if so many tokens are too many."""
        if most is not None and length > most:
            self.limit = Ended.DROPPED if self.answered else None
            begins = f"this model's maximum context length is {most} tokens"  # words that litellm and others look for
            raise Refusal(400, f"{begins}, and the messages need {length}; shorten them", "context_length_exceeded")

    def record(self, call: Call, turn: Turn) -> Answer:
        """Keep the answer to a call, and return it."""
        call.turn, stop = cut_at_stop(turn, StopStrings(self.chat_format.tokenizer, call.request.stop))
        message = self.message(call.request, call.turn, call.prompt)
        if stop is not None:
            message["content"] = message["content"].partition(stop)[0]
        finish = "length" if call.turn.truncated else "tool_calls" if message.get("tool_calls") else "stop"
        call.answer = Answer(message, finish, len(call.prompt), len(call.turn.ids))
        self.served[(*call.request.keys, key_of(message))] = call
        self.limit = None
        return call.answer

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

    async def fill(self) -> None:
        """Let the policy say one token, which fills the place of an episode without a call."""
        request = Request(EMPTY_PROMPT)
        prompt = self.render(request) or self.chat_format.eos_ids[:1]  # some templates make no tokens of it
        call = Call(request, prompt, len(prompt), self.episode.row.seed, budget=1)
        self.calls.append(call)
        self.record(call, replace(await self.ask(call), truncated=False))

    def write(self) -> None:
        """Write the tape of the answered calls on the episode, in the order of their requests.

        Of two calls that continue the same one, the second begins a conversation with the tokens so far.
        """
        episode = self.episode
        last: list[Call] = []  # of each conversation
        for call in self.answered:
            assert call.turn is not None
            assert call.answer is not None
            new, messages, number = call.prompt, call.request.messages, len(last)
            if call.before in last:
                number = last.index(call.before)
                new, messages = new[len(call.before.tokens) :], messages[len(call.before.request.messages) + 1 :]
            last[number : number + 1] = [call]
            if episode.turns == 0:
                columns = {**episode.row.columns, "prompt": messages}
                episode.row = replace(episode.row, prompt_ids=new, columns=columns)
                new, messages = [], []
            episode.append(new)
            episode.append(call.turn.ids, call.turn.logprobs)
            call.end = len(episode.ids) - 1
            episode.conversation += [number] * (len(new) + len(call.turn.ids))
            episode.messages += [*messages, call.answer.message]
            episode.turns += 1


def cut_at_stop(turn: Turn, stops: StopStrings) -> tuple[Turn, str | None]:
    """Return a turn up to the token that completes the first stop string, and that string.

    The end is a stopping time, so the log-probs stay true.
    """
    if not stops.strings or not (end := stops.end(turn.ids)):
        return turn, None
    text = stops.tokenizer.decode(turn.ids[:end])
    first = min((string for string in stops.strings if string in text), key=text.index, default=None)
    return Turn(turn.ids[:end], turn.logprobs[:end]), first
