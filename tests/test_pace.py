"""Episodes at their own pace: what runs at once, what waits for what, and what is left when something fails.

Tools wait for each other, not for the clock: a loop that does anything in another order does not end in time.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import numpy as np
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
    talking_trainer,
)
from helpers.processes import HELPERS, TWO_PROCESSES, environment
from helpers.scripted import training_rows
from hfppo import TextEnvironment
from hfppo.environments import episodes
from hfppo.generation.sampler import Sampler
from hfppo.support import background, calls
from hfppo.support.calls import Threads, call_once, event_loop, finish_within, wait_for

FAR = 60  # seconds that no test waits


def meet(number: int) -> str:
    """
    Wait.

    Args:
        number: a number
    """


def tool(body, asynchronous=False):
    """A tool `meet(number)` with this body."""

    def plain(number: int) -> str:
        return body(number)

    async def later(number: int) -> str:
        return await body(number)

    chosen = later if asynchronous else plain
    chosen.__name__, chosen.__doc__ = "meet", meet.__doc__
    return chosen


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


def scripts(*numbers):
    """For each row a script that calls the tool with each of its numbers."""
    return [[*(call("meet", number=n) for n in of_row), "a"] for of_row in numbers]


# What runs at once


@pytest.mark.parametrize("timeout", [None, FAR])
def test_tools_of_all_episodes_run_at_once(make_agent, timeout):
    barrier = threading.Barrier(4)
    trainer = make_agent(
        *scripts([0], [1], [2], [3]),
        reward_funcs=count_messages,
        tools=[tool(lambda number: str(barrier.wait(FAR) < 4))],
        config={"tool_timeout": timeout},
    )
    _, transcript, _ = collect(trainer)
    assert [messages[1]["content"] for messages in transcript.completions] == ["True"] * 4


def test_async_tools_of_all_episodes_run_in_one_event_loop(make_agent):
    """Those of one turn, too."""
    everybody = asyncio.Barrier(8)

    async def body(number):
        return str(await asyncio.wait_for(everybody.wait(), FAR) < 8)

    turn = call("meet", number=1) + call("meet", number=2)
    trainer = make_agent([turn, "a"], reward_funcs=count_messages, tools=[tool(body, asynchronous=True)])
    _, transcript, _ = collect(trainer)
    assert [m["content"] for messages in transcript.completions for m in messages[1:3]] == ["True"] * 8


@pytest.mark.parametrize("method", ["reset", "step", "get_reward"])
def test_environments_of_all_episodes_run_at_once(make_agent, method):
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
    trainer = make_agent(["4"], environment_factory=Meeting, config={"max_tool_calling_iterations": 1})
    assert collect(trainer)[0].scores.tolist() == [0.0] * 4


def test_calls_of_a_turn_follow_each_other_and_an_instance_has_one_thread_at_a_time(make_agent):
    seen = []

    class Door(Doors):
        def meet(self, number: int) -> str:
            """
            Meet.

            Args:
                number: a number
            """
            seen.append(("in", id(self), number))
            time.sleep(0.002)
            seen.append(("out", id(self), number))
            return str(number)

    turn = "".join(call("meet", number=n) for n in range(3))
    _, transcript, _ = collect(make_agent([turn, "a"], environment_factory=Door))
    for messages in transcript.completions:
        assert [m["content"] for m in messages if m["role"] == "tool"] == ["0", "1", "2"]
    instances = {instance for _, instance, _ in seen}
    assert len(instances) == 4
    for instance in instances:
        own = [(what, number) for what, of, number in seen if of == instance]
        assert own == [(what, number) for number in range(3) for what in ("in", "out")]


def test_more_calls_than_threads_wait_for_one(monkeypatch):
    monkeypatch.setattr(calls, "MOST_THREADS", 2)
    running, most = [], []

    def count():
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()

    async def count_all():
        with Threads() as threads:
            await asyncio.gather(*(threads.call(count, None, "") for _ in range(8)))

    wait_for(count_all)
    assert len(most) == 8
    assert max(most) == 2


# What waits for what


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_episode_goes_on_while_the_tool_of_another_runs(make_agent, asynchronous):
    """The tool of row 0 waits for the third tool of row 1."""
    third = threading.Event()

    def body(number):
        if number == 3:
            third.set()
        return str(number or third.wait(FAR))

    async def later(number):
        return await asyncio.to_thread(body, number)

    trainer = make_agent(
        *scripts([0], [1, 2, 3, 4]),
        reward_funcs=count_messages,
        tools=[tool(later if asynchronous else body, asynchronous)],
    )
    _, transcript, _ = collect(trainer, 2)
    answers = [[m["content"] for m in messages if m["role"] == "tool"] for messages in transcript.completions]
    assert answers == [["True"], ["1", "2", "3", "4"]]
    assert trainer.collector.sampler.calls[:3] == [2, 1, 1]


class Napping(Counting):
    """Some steps, drawn by the seed, take a while."""

    nap = 0.0

    def reset(self, seed=0, **row):
        self.luck = random.Random(seed)
        return super().reset(**row)

    def step(self, text):
        time.sleep(self.nap * self.luck.choice([0, 0, 0, 1]))
        return super().step(text)


class Counted(Sampler):
    """Another sampler, whose rows are counted."""

    def __init__(self, sampler):
        self.sampler, self.ready, self.calls = sampler, sampler.ready, []

    def __call__(self, prompts, *args, **kwargs):
        self.calls.append(len(prompts))
        return self.sampler(prompts, *args, **kwargs)


def test_slow_steps_change_no_episode(make_agent, monkeypatch):
    """A model samples with `generate`, in batches that leave out the rows that wait."""

    def play(nap, patience):
        monkeypatch.setattr(episodes, "PATIENCE", patience)
        config = {"max_turn_length": 3, "max_completion_length": 60}
        trainer = make_agent(environment_factory=type("Napping", (Napping,), {"nap": nap}), config=config)
        trainer.collector = replace(trainer.collector, sampler=Counted(trainer.collector.sampler))
        return (*collect(trainer)[:2], trainer.collector.sampler.calls)

    (quick, of_quick, batches), (slow, of_slow, smaller) = play(0.0, FAR), play(0.2, 0.0)
    assert of_slow.completions == of_quick.completions
    assert slow.completion_ids.equal(quick.completion_ids)
    torch.testing.assert_close(slow.rollout_logprobs, quick.rollout_logprobs)
    assert sum(smaller) == sum(batches)
    assert len(smaller) > len(batches)


def test_quick_tools_leave_the_batches_whole(make_agent):
    trainer = make_agent(*scripts(*[[0, 1, 2]] * 4), reward_funcs=count_messages, tools=[tool(str)])
    collect(trainer)
    assert trainer.collector.sampler.calls == [4, 4, 4, 4]


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


def test_a_server_samples_what_is_ready_whatever_else_it_samples(make_agent, monkeypatch):
    engine = Engine(calling_tokenizer(), *scripts([0], [1, 2, 3]))
    monkeypatch.setattr("hfppo.generation.vllm_server.ServerEngine", lambda *args: engine)

    def body(number):
        return {0: engine.second, 2: engine.asked}[number].wait(FAR) if number in (0, 2) else "at once"

    config = {"use_vllm": True, "vllm_mode": "server"}
    trainer = make_agent(reward_funcs=count_messages, tools=[tool(body)], config=config)
    _, transcript, metrics = collect(trainer, 2, training=True)
    assert engine.waited == [True]
    assert [len(messages) for messages in transcript.completions] == [3, 7]
    assert engine.calls == [2, 1, 1, 1, 1]
    assert metrics["time/environments"] > 0


# What is left when something fails


class Broken(RuntimeError):
    pass


def test_an_environment_error_ends_the_run_while_a_tool_runs(make_agent):
    """By its own traceback; the pending tool is neither waited for nor does it keep its instance."""
    go_on, pending, returned = threading.Event(), threading.Event(), []

    class Odd(TextEnvironment):
        def reset(self, start=0, **row):
            self.start = start
            return ""

        def step(self, text):
            if self.start == 0:
                pending.set()
                returned.append(go_on.wait(FAR))
            elif pending.wait(FAR):
                raise Broken("bad")
            return "", 1.0, True, False, {}

    trainer = make_agent(["a"], environment_factory=Odd)
    with pytest.raises(RuntimeError, match=r"Odd.step, row 1, failed: Broken\('bad'\)") as error:
        collect(trainer, 2)
    assert "raise Broken" in "".join(traceback.format_exception(error.value))
    assert returned == []
    agents = trainer.collector.player.agents
    assert agents.pools[None].idle == []
    Odd.step = lambda self, text: ("", 1.0, True, False, {})
    trainer.collector = replace(trainer.collector, sampler=Script(trainer.processing_class, ["a"]))
    assert collect(trainer, 2)[0].scores.tolist() == [1.0, 1.0]
    go_on.set()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_sampler_that_fails_ends_the_run_while_a_tool_runs(make_agent, at_once):
    go_on, asked, returned = threading.Event(), [], []

    def body(number):
        return number or returned.append(go_on.wait(FAR))

    trainer = make_agent(*scripts([0], [1]), reward_funcs=count_messages, tools=[tool(body)])

    def sample(*given):
        asked.append(given)
        if len(asked) == 2:
            raise Broken("no server")
        return trainer.collector.ask_sampler(*given)

    rows = trainer.collector.eval_rows(trainer._train_prompts)[:2]
    with pytest.raises(Broken, match="no server"):
        trainer.collector.player.play(rows, sample, False, bool, nullcontext, at_once)
    assert returned == []
    go_on.set()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_ends_the_run_while_a_tool_runs(make_agent, asynchronous):
    go_on, returned = threading.Event(), []

    def body(number):
        os.kill(os.getpid(), signal.SIGINT)
        returned.append(go_on.wait(FAR))

    async def later(number):
        os.kill(os.getpid(), signal.SIGINT)
        returned.append(await asyncio.sleep(FAR))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trainer = make_agent(
            *scripts([0]),
            reward_funcs=count_messages,
            tools=[tool(later if asynchronous else body, asynchronous)],
        )
        with pytest.raises(KeyboardInterrupt):
            collect(trainer, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert returned == []
    go_on.set()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_environment_that_exits_ends_the_run(make_agent, error):
    def step(self, text):
        raise error

    trainer = make_agent(["a"], environment_factory=type("Odd", (Counting,), {"step": step}))
    with pytest.raises(type(error)):
        collect(trainer, 2)


blocked = threading.Event()


def swallow(number):
    """Hangs, and catches whatever is raised."""
    while not blocked.is_set():
        with suppress(BaseException):
            time.sleep(0.001)


@pytest.mark.parametrize("body", [swallow, lambda number: blocked.wait(FAR)], ids=["swallows", "blocks"])
def test_a_tool_that_hangs_holds_nobody_up(make_agent, body):
    blocked.clear()
    tools, config = [tool(lambda number: number or body(number))], {"tool_timeout": 0.2}
    trainer = make_agent(*scripts([0, 1], [1, 1]), reward_funcs=count_messages, tools=tools, config=config)
    _, transcript, metrics = collect(trainer, 2, training=True)
    assert "longer than tool_timeout=0.2" in transcript.completions[0][1]["content"]
    assert [len(messages) for messages in transcript.completions] == [5, 5]
    assert metrics["tools/timeout_frac"] == 0.25
    blocked.set()


def test_calls_after_one_that_hangs_are_run(make_agent):
    blocked.clear()
    turn = call("meet", number=0) + call("add", a=1, b=2)
    tools = [tool(lambda number: blocked.wait(FAR)), add]
    trainer = make_agent([turn, "a"], reward_funcs=count_messages, tools=tools, config={"tool_timeout": 0.1})
    _, transcript, _ = collect(trainer, 1)
    assert transcript.completions[0][2]["content"] == "3"
    blocked.set()


def test_a_time_limit_ends_python_code_in_any_thread_and_shows_its_line():
    found = []

    def loop():
        while True:
            time.sleep(0.001)

    def limited():
        with pytest.raises(TimeoutError, match="late") as error:
            finish_within(0.05, "late", loop)
        found.extend(error.value.__notes__)

    thread = threading.Thread(target=limited)
    thread.start()
    thread.join(FAR)
    assert "in loop" in found[0]


@pytest.mark.parametrize("seconds", [FAR, None])
def test_a_call_from_a_coroutine_gives_its_value_or_its_own_error(seconds):
    assert wait_for(partial(call_once, lambda: 7, seconds, "late")) == 7
    for error in (TimeoutError("its own"), KeyError("its own"), SystemExit("its own")):
        with pytest.raises(type(error), match="its own"):
            wait_for(partial(call_once, partial(fail, error), seconds, "late"))


def fail(error):
    raise error


# Random numbers


def test_global_random_numbers_are_put_back_and_a_draw_is_told(make_agent, caplog):
    background.warn_of_global_draws.cache_clear()

    class Dice(Counting):
        draws = False

        def step(self, text):
            if self.draws:
                random.seed(0), np.random.rand(), torch.rand(())
            return super().step(text)

    trainer = make_agent(["1", "2", "3"], environment_factory=Dice)
    for Dice.draws in (False, True, True):
        trainer.collector = replace(trainer.collector, sampler=Script(trainer.processing_class, ["1", "2", "3"]))
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        collect(trainer)
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        told = [record for record in caplog.records if "global random numbers" in record.getMessage()]
        assert len(told) == Dice.draws


def test_a_model_that_samples_draws_no_global_random_numbers(tmp_path, caplog):
    background.warn_of_global_draws.cache_clear()
    talking_trainer(tmp_path, {"max_steps": 4}).train()
    assert "global random numbers" not in caplog.text


def test_each_completion_has_a_seed_of_its_own(make_agent):
    seen = []

    class Lucky(Doors):
        def reset(self, start=0, seed=None, episode_seed=None, **row):
            seen.append((seed, episode_seed, sorted(row)))
            return super().reset(start)

    config = {"num_generations": 2, "per_device_train_batch_size": 4}
    trainer = make_agent(["a"], environment_factory=Lucky, config=config)
    rows = training_rows(trainer.collector, trainer._train_prompts, 0)
    trainer.collector.complete(rows)
    assert sorted(seen) == sorted((row.environment_seed, row.seed, ["prompt"]) for row in rows)
    assert len({seed for seed, *_ in seen}) == 2
    assert len({seed for _, seed, _ in seen}) == 4


# Two processes


@pytest.mark.slow
@pytest.mark.nightly
def test_processes_of_a_sharded_model_make_equally_many_calls(tmp_path):
    """The first has shorter episodes, and the tools of both take other times."""
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    fsdp |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    results = {}
    for seconds in ("0", "0.3"):
        out = tmp_path / seconds
        out.mkdir()
        command = [sys.executable, *TWO_PROCESSES, str(HELPERS / "sharded_episodes.py"), str(out), seconds]
        done = subprocess.run(command, env=environment(**fsdp), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        results[seconds] = [json.loads((out / f"result_{rank}.json").read_text()) for rank in range(2)]
    for first, second in results.values():
        assert first["sharded"]
        assert len(first["calls"]) == len(second["calls"])
        assert first["calls"] != second["calls"]
    assert [result["ids"] for result in results["0"]] == [result["ids"] for result in results["0.3"]]
