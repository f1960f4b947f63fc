"""Tools and environments that misbehave: each is refused, becomes text for the model, or ends the run by name."""

import asyncio
import functools
import json
import math
import re
import sys
import time

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from helpers.agents import EOS, PROMPTS, Counting, Doors, add, call, count_messages, hide_async, tool
from helpers.processes import ROOT
from hfppo import Result
from hfppo.rewards.reward_func import plain_name


def raises(error):
    def body(x):
        raise error

    return body


def forever(x):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


async def sleeps(x):
    await asyncio.sleep(60)


def exits(x):
    sys.exit(3)


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def later(body):
    return tool(body, asynchronous=True)


FAST = {"tool_timeout": 0.2}
FAILED, LATE = "tools/failure_frequency", "tools/timeout_frac"
# What a tool does, what the model is told, and the metric that counts it.
TOLD = {
    "raises": (tool(raises(ValueError("bad"))), "{'error': 'bad'}", FAILED),
    "recurses without end": (tool(lambda x: exec("f()", d := {"f": lambda: d["f"]()})), "maximum recursion", FAILED),
    "exits": (tool(exits), "{'error': '3'}", FAILED),
    "hangs and swallows": (tool(forever), "longer than tool_timeout=0.2", LATE),
    "hangs in a coroutine": (later(sleeps), "longer than tool_timeout=0.2", LATE),
    "raises in a coroutine": (later(raises(ValueError("late"))), "late", FAILED),
    "returns None": (tool(lambda x: None), "None", None),
    "returns a list": (tool(lambda x: [1, 2]), "[1, 2]", None),
    "returns content blocks": (tool(lambda x: [{"type": "text", "text": t} for t in "ab"]), "ab", None),
    "returns a result of content blocks": (tool(lambda x: Result([{"type": "text", "text": "ab"}])), "ab", None),
    "returns an image": (tool(lambda x: [{"type": "image", "url": "a"}]), "'url': 'a'", None),
    "returns no text": (tool(lambda x: ""), "", None),
    "returns control tokens": (tool(lambda x: f"{EOS}<assistant>"), "<eos><assistant>", None),
    "returns characters that the tokenizer lacks": (tool(lambda x: "\x00\ud800Ä"), "", None),
    "cannot be printed": (tool(lambda x: Unprintable()), "no text", FAILED),
}


@pytest.mark.parametrize("kind", TOLD)
def test_the_model_is_told(play, kind):
    func, text, metric = TOLD[kind]
    played = play([call("use", number=1), "a"], tools=[func], config=FAST if metric == LATE else {})
    (answer,) = played.said()
    assert text in answer
    assert played.roles() == "ata"
    assert played.text(mask=played.rollout.context).count(EOS) == 1  # the template's
    assert metric is None or played.metrics[metric] == 1.0
    assert played.metrics["tools/call_frequency"] == 1.0


# What the model writes, and the number of calls that are run and that fail, in one turn.
CALLS = {
    "an unknown tool": (call("missing", x=1), 1, "tools/unknown_frac"),
    "an argument missing": (call("add", a=1), 1, FAILED),
    "a call without its end": ("<call>add(a=1,b=2", 0, None),
    "two starts of a call": ("<call><call>add(a=1,b=2)</call>", 0, None),
}


@pytest.mark.parametrize("kind", CALLS)
def test_what_the_model_writes_wrongly(play, kind):
    written, calls, metric = CALLS[kind]
    played = play([written, "a"], tools=[add])
    assert played.metrics["tools/call_frequency"] in (calls, 1.0)
    if metric is not None:
        assert played.metrics[metric] == 1.0
        assert "error" in played.said()[0]


HALF = "a\ud800"  # JSON can write half a character, which neither tokenizers nor UTF-8 take
PARSED = [{"name": HALF, "arguments": {HALF: 1}}, {"name": "use", "arguments": {"number": [HALF]}}]


@pytest.mark.parametrize("function", PARSED, ids=["names", "an argument"])
def test_half_a_character_that_the_model_writes_is_replaced(play, monkeypatch, function):
    seen, parse = [], PreTrainedTokenizerFast.parse_response
    call = {"role": "assistant", "content": HALF, "tool_calls": [{"type": "function", "function": function}]}
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "parse_response",
        lambda self, ids, **given: call if "b" in self.decode(ids) else parse(self, ids, **given),
    )
    played = play(["b", "a"], tools=[tool(lambda x: seen.append(x) or x)])
    assert played.roles() == "ata"
    json.dumps([played.transcript.completions, seen], ensure_ascii=False).encode()
    assert "a?" in repr(played.transcript.completions)


def test_half_a_character_in_the_text_of_reset_is_replaced(play):
    def reset(self, **row):
        Counting.reset(self)
        return HALF

    played = play(["1", "2", "3"], environment_factory=environment(reset=reset))
    assert played.transcript.prompts[0][-1]["content"] == "go 0 a?"


def environment(base=Counting, **methods):
    return type("Odd", (base,), methods)


def hangs(self, *args, **row):
    time.sleep(60)


def divide(self, *args, **row):
    return 1 / 0


def step_with(*result):
    return lambda self, text: result


def rewarded(reward):
    return environment(step=step_with("b", reward, True, False, {}))


# An environment, and the error that ends the run.
ENDS = {
    "reset raises": (environment(reset=divide), RuntimeError, r"Odd.reset, row 0, failed"),
    "reset hangs": (environment(reset=hangs), TimeoutError, r"Odd.reset, row 0, took longer than tool_timeout=0.2"),
    "step raises": (environment(step=divide), RuntimeError, r"Odd.step, row 0, failed"),
    "step returns three values": (
        environment(step=step_with("b", 1.0, True)),
        ValueError,
        r"Odd.step, row 0, returned \('b', 1.0, True\); return observation, reward, terminated, truncated, info",
    ),
    "a reward that is NaN": (rewarded(math.nan), ValueError, r"Odd.step, row 0, gave the reward nan"),
    "a reward that is text": (rewarded("1"), ValueError, r"gave the reward '1'"),
    "a score that raises": (environment(Doors, get_reward=divide), ZeroDivisionError, "division"),
    "a score that is infinite": (
        environment(Doors, get_reward=lambda self: math.inf),
        ValueError,
        r"Odd.get_reward, row 0, gave the reward inf",
    ),
}


@pytest.mark.parametrize("kind", ENDS)
def test_an_environment_ends_the_run_by_name(play, kind):
    factory, error, words = ENDS[kind]
    with pytest.raises(error, match=words):
        play(["a", "b"], environment_factory=factory, config=FAST)


@pytest.mark.parametrize(
    ("base", "name", "scripts"),
    [(Counting, "step", (["1"], ["2", "3"])), (Doors, "look", ([call("look")], [call("look"), "a"]))],
)
def test_an_environment_that_hangs_leaves_its_row_without_a_score(play, base, name, scripts):
    @functools.wraps(getattr(base, name))
    def method(self, *given):
        return hangs(self) if self.start == 0 else getattr(base, name)(self, *given)

    def reset(self, start=0, **row):
        self.start = start
        return base.reset(self, start)

    played = play(*scripts, environment_factory=environment(base, reset=reset, **{name: method}), config=FAST, count=2)
    assert played.rollout.loss_mask.any(dim=1).tolist() == [False, True]
    assert played.metrics["unscorable_frac"] == 0.5
    pool = played.trainer.collector.player.agents.pools[None]
    assert (pool.first.start, [one.start for one in pool.idle]) == (0, [1])


@pytest.mark.parametrize(("longest", "room"), [(50, 50), (None, 256 - 120)], ids=["max_prompt_length", "positions"])
def test_a_prompt_that_reset_makes_too_long_leaves_its_row_without_a_score(play, caplog, longest, room):
    class Talkative(Counting):
        def reset(self, start=0, **row):
            super().reset(start)
            return "a" * 300 if start == 0 else f"{start}"

    class Judged(Talkative):
        def get_reward(self):
            assert self.next, "the row has no score"
            return 10.0

    config = {"max_prompt_length": longest}
    played = play(["1"], ["2", "3"], environment_factory=Judged, config=config, count=2)
    rollout = played.rollout
    assert rollout.prompt_mask.sum(dim=1).tolist() == [room, 9]
    assert rollout.mask.sum(dim=1).tolist() == [1, 4]  # one token for the place in the batch
    assert rollout.loss_mask.any(dim=1).tolist() == [False, True]
    assert rollout.scores.tolist() == [0.0, 12.0]
    assert played.metrics["unscorable_frac"] == 0.5
    assert len(played.trainer.collector.player.agents.pools[None].idle) == 2
    assert "row 0: with the text of Judged.reset the prompt has 3" in caplog.text
    assert f"more than {room}; it has no score" in caplog.text


def test_an_environment_that_never_ends_is_cut(play):
    played = play(["a"] * 40, environment_factory=environment(step=step_with("b", 0.1, False, False, {})))
    assert played.rollout.truncated.all()
    assert played.rollout.real.sum() <= 120
    assert played.metrics["turns/dropped_result_frac"] == 1


def untyped(x):
    """
    Use it.

    Args:
        x: a number
    """
    return x


def undocumented(x: int) -> str:
    return str(x)


class NoReset:
    def look(self) -> str:
        """Look."""
        return ""


class Clash(Doors):
    def add(self, a: int) -> str:
        """
        Add.

        Args:
            a: a number
        """
        return ""


def env(factory, **columns):
    """Arguments with environments, and with more columns of the dataset."""
    return {"environment_factory": factory, "dataset": Dataset.from_dict({**PROMPTS.to_dict(), **columns})}


TEXTS = Dataset.from_dict({"prompt": ["go"]})
REFUSED = {
    "a tool without types": ({"tools": [untyped]}, TypeHintParsingException, "untyped"),
    "a tool without a docstring": ({"tools": [undocumented]}, DocstringParsingException, "undocumented"),
    "a class in place of a tool": ({"tools": [Doors]}, TypeError, "Doors.*pass functions or methods"),
    "a tool that is no function": ({"tools": ["add"]}, TypeError, "'add'"),
    "two tools of one name": ({"tools": [add, add]}, ValueError, "'add'"),
    "prompts of text": ({"tools": [add], "dataset": TEXTS}, ValueError, "conversations"),
    "an environment without reset": (env(NoReset), TypeError, r"NoReset.*reset"),
    "an environment in place of its class": (env(Doors()), TypeError, "'Doors' object is not callable"),
    "a tool with the name of a method": ({**env(Clash), "tools": [add]}, ValueError, "'add'"),
    "tools beside a text environment": ({**env(Counting), "tools": [add]}, ValueError, "Counting"),
    "no column for several environments": (env({"a": Doors}), ValueError, "'environment'"),
    "an unknown environment": (env({"a": Doors}, environment=[*"aaba"]), ValueError, r"row 2: environment='b'"),
    "no reward": ({"tools": None, "reward_funcs": None}, ValueError, "reward_funcs is empty"),
    "a discount by turn without turns": ({"config": {"gamma_turn": 0.9}}, ValueError, "gamma_turn=0.9"),
    "a column that the trainer fills": (env(Doors, environments=[*"abcd"]), ValueError, "'environments'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_anything_is_generated(make_agent, kind):
    options, error, words = REFUSED[kind]
    with pytest.raises(error, match=words):
        make_agent(**{"reward_funcs": count_messages, **options})


TEMPLATES = {
    "no template": (None, "chat_template"),
    "a template without results": (
        "{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}<eos>{% endfor %}",
        "leaves out name_of_a_tool, name_of_an_argument, value_of_an_argument, text_of_a_reply",
    ),
    "a template without the names of arguments": (
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}"
        "{{ c['function']['arguments'].values() | join }}{% endfor %}<eos>{% endfor %}",
        "leaves out name_of_an_argument;",
    ),
    "a template that raises": ("{{ raise_exception('no') }}", "cannot render"),
    "a template that rewrites earlier messages": (
        "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{{ m['tool_calls'] }}<eos>{% endfor %}",
        "differently",
    ),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_that_do_not_fit_are_refused(make_agent, kind, monkeypatch):
    template, words = TEMPLATES[kind]
    monkeypatch.setattr("helpers.agents.TEMPLATE", template)
    with pytest.raises(ValueError, match=rf"(?s){words}.*docs/calculator\.md"):
        make_agent(reward_funcs=count_messages, tools=[add])


def test_a_tokenizer_that_cannot_parse_calls_is_refused(make_agent, monkeypatch):
    monkeypatch.setattr("helpers.agents.RESPONSE", None)
    with pytest.raises(ValueError, match=r"response_template.*docs/calculator\.md"):
        make_agent(reward_funcs=count_messages, tools=[add])


def test_an_environment_with_a_plain_step_is_told_of_text_environments(make_agent):
    class Plain:
        def reset(self, **row):
            return "go"

        def step(self, text):
            return "b", 0.0, True, False, {}

    with pytest.raises(DocstringParsingException, match="step") as refused:
        make_agent(environment_factory=Plain)
    assert "derive Plain from TextEnvironment" in refused.value.__notes__[0]


def test_each_kind_has_its_outcome_in_the_page():
    page = (ROOT / "docs/notes/bad_tools.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", page, flags=re.MULTILINE))
    assert not {*TOLD, *CALLS, *ENDS, *REFUSED, *TEMPLATES} - rows.keys()
    assert [kind for kind, (_, *shown) in TOLD.items() if not all(part in rows[kind] for part in shown if part)] == []


async def look_up(word: str, times: int = 1) -> str:
    """
    Look a word up.

    Args:
        word: the word
        times: how often
    """
    await asyncio.sleep(0)
    return f"found {word}" * times


class Search:
    """A search engine with a connection."""

    def __init__(self):
        self.__name__ = "search"  # in letters of the tokenizer

    async def __call__(self, word: str) -> str:
        """
        Look a word up.

        Args:
            word: the word
        """
        return await look_up(word)

    def now(self, word: str) -> str:
        """
        Look a word up.

        Args:
            word: the word
        """
        return f"found {word}"


# A tool, and the names of its arguments.
CALLABLES = {
    "async def": (look_up, ["word", "times"]),
    "decorated": (hide_async(look_up), ["word", "times"]),
    "cached": (functools.lru_cache(Search().now), ["word"]),
    "a partial": (functools.partial(look_up, times=1), ["word"]),
    "a partial of a callable object": (functools.partial(Search()), ["word"]),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_tools_are_callables_of_every_kind(play, kind):
    func, arguments = CALLABLES[kind]
    name = plain_name(func)
    config = {"tool_timeout": 5.0, "max_completion_length": 200}
    played = play([call(name, word="a b"), "a"], tools=[func], config=config)
    (schema,) = played.trainer.collector.player.agents.pools[None].schemas
    assert schema["function"]["name"] == name
    assert list(schema["function"]["parameters"]["properties"]) == arguments
    assert schema["function"]["parameters"]["required"] == ["word"]
    assert played.transcript.completions[0][1] == {"role": "tool", "name": name, "content": "found a b"}
    assert played.metrics["tools/failure_frequency"] == 0.0
