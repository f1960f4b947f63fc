"""Calls of users' functions: one event loop for the whole process, and time limits in seconds of the clock."""

import asyncio
import os
import signal
import sys
import threading
from functools import partial

import pytest

from helpers.agents import Doors, call, collect, count_messages, hide_async
from helpers.scripted import score
from hfppo import TextEnvironment, TolerantReward
from hfppo.support.calls import Threads, call_in_thread, wait_for


class Client:
    """Belongs to the event loop of its first use, as the clients of httpx and openai do."""

    def __init__(self):
        self.loop = None

    async def get(self):
        self.loop = self.loop or asyncio.get_running_loop()
        assert asyncio.get_running_loop() is self.loop
        return "found"


CLIENT = Client()


async def use() -> str:
    """Use it."""
    return await CLIENT.get()


class Online(Doors):
    async def reset(self, **row):
        return await CLIENT.get()

    async def use(self) -> str:
        """Use it."""
        return await CLIENT.get()

    async def get_reward(self):
        return float(await CLIENT.get() == "found")


class OnlineText(TextEnvironment):
    async def reset(self, **row):
        return await CLIENT.get()

    @hide_async
    async def step(self, text):
        return await CLIENT.get(), 1.0, text == "a", False, {}


async def connect():
    await CLIENT.get()
    return Online()


# What is made of coroutines, and the score of an episode.
KINDS = {
    "tool": ({"tools": [use], "reward_funcs": count_messages}, 3.0),
    "environment": ({"environment_factory": Online}, 1.0),
    "text environment": ({"environment_factory": OnlineText}, 2.0),
    "factory": ({"environment_factory": connect}, 1.0),
}


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_what_belongs_to_an_event_loop_serves_every_rollout(make_agent, monkeypatch, kind, timeout):
    given, expected = KINDS[kind]
    monkeypatch.setattr(CLIENT, "loop", None)
    trainer = make_agent(*[[call("use"), "a"] * 2] * 4, **given, config={"tool_timeout": timeout})
    for _ in range(2):
        rollout, transcript, _ = collect(trainer)
        assert rollout.scores.tolist() == [expected] * 4
        assert [messages[1]["content"] for messages in transcript.completions] == ["found"] * 4


@pytest.mark.parametrize("wrapped", [lambda func: func, TolerantReward, lambda func: lambda **given: func(**given)])
def test_a_client_of_a_reward_function_serves_every_batch(wrapped):
    client = Client()

    async def judge(completions, **_):
        return [float(await client.get() == "found") for _ in completions]

    for _ in range(2):
        assert score(wrapped(judge), texts=("1", "2")).of("score") == [1.0, 1.0]


async def at_once():
    return 7


def test_an_exit_in_a_coroutine_reaches_the_caller_and_leaves_the_loop_running():
    async def leave():
        sys.exit(3)

    with pytest.raises(SystemExit):
        wait_for(leave)
    assert wait_for(at_once) == 7


def test_a_forked_process_has_an_event_loop_and_threads_of_its_own():
    called = partial(call_in_thread, lambda: 7)
    wait_for(called)  # its thread waits for another call, and a fork does not copy it
    if not (child := os.fork()):
        signal.alarm(20)  # ends the child, whose call may wait for a thread that is not there
        os._exit(wait_for(called))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_call_that_hangs_leaves_its_place_to_the_next_and_one_that_is_cancelled_before_is_not_made():
    end, made = threading.Event(), []

    async def calls():
        threads = Threads(asyncio.get_running_loop(), most=1)

        def make(number):
            made.append(number)
            return number or end.wait(60)

        tasks = [asyncio.create_task(threads.call(partial(make, number), 0.3, "late")) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = wait_for(calls)
    end.set()
    assert [*map(type, results)] == [TimeoutError, asyncio.CancelledError, int]
    assert made == [0, 2]
