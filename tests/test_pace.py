"""Episodes at their own pace: what runs at once, what waits for what, and what is left when something fails.

Tools wait for each other, not for the clock: a loop that does anything in another order does not end in time.
"""

import asyncio
import os
import random
import signal
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.agents import (
    Counting,
    Doors,
    Script,
    add,
    call,
    calling_tokenizer,
    collect,
    count_messages,
    tool,
)
from helpers.processes import FSDP2, run_two_processes
from hfppo import TextEnvironment
from hfppo.environments import episodes
from hfppo.generation.generate import TransformersSampler
from hfppo.support.calls import event_loop

FAR = 60  # seconds that no test waits


@pytest.fixture
def threads_end():
    """No thread of a test is left, at the latest when the calls that it has blocked return."""
    event_loop()  # has a thread until the process ends, and more for `asyncio.to_thread`
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + FAR
    while left := {thread for thread in set(threading.enumerate()) - before if "asyncio" not in thread.name}:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


pytestmark = pytest.mark.usefixtures("threads_end")


@pytest.fixture
def end(threads_end):
    """The end of the test, which calls that hang wait for."""
    event = threading.Event()
    yield event
    event.set()


def scripts(*numbers):
    """For each row a script that calls the tool with each of its numbers."""
    return [[*(call("use", number=n) for n in of_row), "a"] for of_row in numbers]


# What runs at once


@pytest.mark.parametrize("timeout", [None, FAR])
def test_tools_of_all_episodes_run_at_once(play, timeout):
    barrier = threading.Barrier(4)
    tools, config = [tool(lambda number: str(barrier.wait(FAR) < 4))], {"tool_timeout": timeout}
    played = play(*scripts([0], [1], [2], [3]), tools=tools, config=config, count=None)
    assert [played.said(row=row) for row in range(4)] == [["True"]] * 4


@pytest.mark.parametrize("method", ["reset", "step", "get_reward"])
def test_environments_of_all_episodes_run_at_once(play, method):
    barrier = threading.Barrier(4)

    class Meeting(Counting):
        def reset(self, **row):
            return super().reset(**row)

        def get_reward(self):
            return 0.5

    def wait(self, *args, **kwargs):
        barrier.wait(FAR)
        return usual(self, *args, **kwargs)

    usual = getattr(Meeting, method)
    setattr(Meeting, method, wait)
    played = play(["4"], environment_factory=Meeting, config={"max_tool_calling_iterations": 1}, count=None)
    assert played.rollout.scores.tolist() == [0.0] * 4


def test_calls_of_a_turn_follow_each_other_and_an_instance_has_one_thread_at_a_time(play):
    seen = []

    class Door(Doors):
        def use(self, number: int) -> str:
            """
            Use it.

            Args:
                number: a number
            """
            seen.append(("in", id(self), number))
            time.sleep(0.002)
            seen.append(("out", id(self), number))
            return str(number)

    played = play(["".join(call("use", number=n) for n in range(3)), "a"], environment_factory=Door, count=None)
    assert [played.said(row=row) for row in range(4)] == [["0", "1", "2"]] * 4
    instances = {instance for _, instance, _ in seen}
    assert len(instances) == 4
    for instance in instances:
        own = [(what, number) for what, of, number in seen if of == instance]
        assert own == [(what, number) for number in range(3) for what in ("in", "out")]


# What waits for what


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_episode_goes_on_while_the_tool_of_another_runs(play, asynchronous):
    """The tool of row 0 waits for the third tool of row 1."""
    third = threading.Event()

    def body(number):
        if number == 3:
            third.set()
        return str(number or third.wait(FAR))

    used = tool(partial(asyncio.to_thread, body) if asynchronous else body, asynchronous)
    played = play(*scripts([0], [1, 2, 3, 4]), tools=[used], count=2)
    assert [played.said(row=row) for row in range(2)] == [["True"], ["1", "2", "3", "4"]]
    assert played.trainer.collector.sampler.calls[:3] == [2, 1, 1]


class Napping(Counting):
    """Some steps, drawn by the seed, take a while."""

    nap = 0.0

    def reset(self, seed=0, **row):
        self.luck = random.Random(seed)
        return super().reset(**row)

    def step(self, text):
        time.sleep(self.nap * self.luck.choice([0, 0, 0, 1]))
        return super().step(text)


def test_slow_steps_change_no_episode(play, monkeypatch):
    """A model samples with `generate`, in batches that leave out the rows that wait."""
    batches = []

    def counted(self, prompts, *args, **kwargs):
        batches[-1].append(len(prompts))
        return sample(self, prompts, *args, **kwargs)

    sample = TransformersSampler.__call__
    monkeypatch.setattr(TransformersSampler, "__call__", counted)
    config = {"max_turn_length": 3, "max_completion_length": 60}
    runs = []
    for nap, patience in ((0.0, FAR), (0.2, 0.0)):
        monkeypatch.setattr(episodes, "PATIENCE", patience)
        batches.append([])
        factory = type("Napping", (Napping,), {"nap": nap})
        runs.append(play(environment_factory=factory, config=config, count=None))
    quick, slow = runs
    assert slow.transcript.completions == quick.transcript.completions
    assert slow.rollout.completion_ids.equal(quick.rollout.completion_ids)
    torch.testing.assert_close(slow.rollout.rollout_logprobs, quick.rollout.rollout_logprobs)
    whole, smaller = batches
    assert sum(smaller) == sum(whole)
    assert len(smaller) > len(whole)


def test_quick_tools_leave_the_batches_whole(play):
    played = play(*scripts(*[[0, 1, 2]] * 4), tools=[tool(str)], count=None)
    assert played.trainer.collector.sampler.calls == [4, 4, 4, 4]


def test_an_idle_process_computes_along_until_all_are_done(make_agent):
    trainer = make_agent(["a"], ["b"], environment_factory=Doors)
    collector = trainer.collector
    rows = collector.eval_rows(trainer._train_prompts)[:2]
    budgets, told = [], []

    def sample(prompts, seeds, of_rows):
        budgets.append(len(of_rows))
        return collector.ask_sampler(prompts, seeds, of_rows) if len(budgets) == 1 else None

    def any_active(own):
        told.append(own)
        return len(told) < 4

    played = collector.player.play(rows, sample, False, any_active, nullcontext)
    assert told == [True, False, False, False]
    assert budgets == [2, 1, 1]
    assert [episode.turns for episode in played] == [1, 1]


# A sampler that several threads may call


class Engine(Script):
    """A script in place of a vLLM server. The second turn of row 0 takes until the fourth of row 1 is sampled."""

    shared = True

    def __init__(self, tokenizer, *turns):
        super().__init__(tokenizer, *turns)
        self.second, self.asked, self.fourth = threading.Event(), threading.Event(), threading.Event()
        self.waited = []

    def load(self, adapter, old):
        pass

    def awake(self):
        return nullcontext()

    def generate(self, prompts, sampling, adapter):
        turns = self(prompts, None, [fields["max_tokens"] for fields in sampling])
        if self.taken[1] == 2:
            self.second.set()
        if self.taken[1] == 4:
            self.fourth.set()
        if len(prompts) == 1 and prompts[0][: len(self.prompts[0])] == self.prompts[0]:
            self.asked.set()
            self.waited.append(self.fourth.wait(FAR))
        return [(turn.ids, turn.logprobs) for turn in turns]


def test_a_server_samples_what_is_ready_whatever_else_it_samples(play, monkeypatch):
    engine = Engine(calling_tokenizer(), *scripts([0], [1, 2, 3]))
    monkeypatch.setattr("hfppo.generation.vllm_server.ServerEngine", lambda *args: engine)

    def body(number):
        return {0: engine.second, 2: engine.asked}[number].wait(FAR) if number in (0, 2) else "at once"

    config = {"use_vllm": True, "vllm_mode": "server"}
    played = play(tools=[tool(body)], config=config, count=2)
    assert engine.waited == [True]
    assert [played.roles(row) for row in range(2)] == ["ata", "atatata"]
    assert engine.calls == [2, 1, 1, 1, 1]
    assert played.metrics["time/environments"] > 0


# What is left when something fails


class Broken(RuntimeError):
    pass


def test_an_environment_error_ends_the_run_while_a_tool_runs(make_agent, end):
    """By its own traceback; the pending tool is neither waited for nor does it keep its instance."""
    pending, returned = threading.Event(), []

    class Odd(TextEnvironment):
        def reset(self, start=0, **row):
            self.start = start
            return ""

        def step(self, text):
            if self.start == 0:
                pending.set()
                returned.append(end.wait(FAR))
            elif pending.wait(FAR):
                raise Broken("bad")
            return "", 1.0, True, False, {}

    trainer = make_agent(["a"], environment_factory=Odd)
    with pytest.raises(RuntimeError, match=r"Odd.step, row 1, failed: Broken\('bad'\)") as error:
        collect(trainer, 2)
    assert "raise Broken" in "".join(traceback.format_exception(error.value))
    assert returned == []
    assert trainer.collector.player.agents.pools[None].idle == []
    Odd.step = lambda self, text: ("", 1.0, True, False, {})
    trainer.collector = replace(trainer.collector, sampler=Script(trainer.processing_class, ["a"]))
    assert collect(trainer, 2)[0].scores.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_sampler_that_fails_ends_the_run_while_a_tool_runs(make_agent, end, at_once):
    asked, returned = [], []
    tools = [tool(lambda number: number or returned.append(end.wait(FAR)))]
    trainer = make_agent(*scripts([0], [1]), reward_funcs=count_messages, tools=tools)

    def sample(*given):
        asked.append(given)
        if len(asked) == 2:
            raise Broken("no server")
        return trainer.collector.ask_sampler(*given)

    rows = trainer.collector.eval_rows(trainer._train_prompts)[:2]
    with pytest.raises(Broken, match="no server"):
        trainer.collector.player.play(rows, sample, False, bool, nullcontext, at_once)
    assert returned == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_ends_the_run_while_a_tool_runs(play, end, asynchronous):
    returned = []

    def body(number):
        os.kill(os.getpid(), signal.SIGINT)
        returned.append(end.wait(FAR))

    async def later(number):
        os.kill(os.getpid(), signal.SIGINT)
        returned.append(await asyncio.sleep(FAR))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            play(*scripts([0]), tools=[tool(later if asynchronous else body, asynchronous)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert returned == []


@pytest.mark.parametrize("swallows", [False, True])
def test_a_tool_that_hangs_holds_nobody_up(play, end, swallows):
    """Neither the next call of its turn nor another episode, even if it catches whatever is raised."""

    def body(number):
        while not number and not end.is_set():
            with suppress(BaseException) if swallows else nullcontext():
                end.wait(0.001 if swallows else FAR)
        return str(number)

    (first, *rest), other = scripts([0, 1], [1, 1])
    config = {"tool_timeout": 0.2}
    played = play([first + call("add", a=1, b=2), *rest], other, tools=[tool(body), add], config=config, count=2)
    late, *others = played.said()
    assert "longer than tool_timeout=0.2" in late
    assert (others, played.said(row=1)) == (["3", "1"], ["1", "1"])
    assert [played.roles(row) for row in range(2)] == ["attata", "atata"]
    assert played.metrics["tools/timeout_frac"] == 0.2


# Random numbers


def test_a_draw_from_global_random_numbers_is_told(play, caplog):
    episodes.logger.warning_once.cache_clear()

    class Dice(Counting):
        def step(self, text):
            if draws:
                random.random()
            return super().step(text)

    for draws in (False, True, True):
        play(["1", "2", "3"], environment_factory=Dice)
        assert caplog.text.count("global random numbers") == draws


# Two processes


@pytest.mark.slow
@pytest.mark.nightly
def test_processes_of_a_sharded_model_make_equally_many_calls(tmp_path):
    """The first has shorter episodes, and the tools of both take other times."""
    results = {}
    for seconds in ("0", "0.3"):
        out = tmp_path / seconds
        out.mkdir()
        results[seconds] = run_two_processes("sharded_episodes.py", out, seconds, **FSDP2)
    for first, second in results.values():
        assert first["sharded"]
        assert len(first["calls"]) == len(second["calls"])
        assert first["calls"] != second["calls"]
    assert [result["ids"] for result in results["0"]] == [result["ids"] for result in results["0.3"]]
