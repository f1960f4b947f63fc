"""Reward functions that fail: what is lost, what is kept, and what ends the run."""

import asyncio
import functools
import re
import signal
import time
import traceback

import pytest
import torch

from helpers.http_server import lengths
from helpers.runs import assert_same_end, count_digits
from helpers.scripted import reward_batch, score
from hfppo import RewardServer, TolerantReward
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.tolerant import RewardError
from hfppo.support.calls import call_within, wait_for

TEXTS = ("1", "22", "bad", "4444")


def picky(completions, **kwargs):
    """Raises at "bad", as a parser would."""
    if "bad" in completions:
        raise KeyError("bad")
    return [float(len(text)) for text in completions]


async def async_picky(completions, **kwargs):
    await asyncio.sleep(0)
    return picky(completions)


def sleepy(completions, **kwargs):
    if "bad" in completions:
        time.sleep(60)
    return picky([text for text in completions if text != "bad"])


async def async_sleepy(completions, **kwargs):
    if "bad" in completions:
        await asyncio.sleep(60)
    return picky(completions)


def busy(completions, **kwargs):
    """Hangs, and takes every Exception for one of its own."""
    while "bad" in completions:
        try:
            time.sleep(0.001)
        except Exception:
            continue
    return picky(completions)


def backtracks(completions, **kwargs):
    """A regular expression that would take years."""
    return [
        float(bool(re.match(r"(a+)+$", "a" * 60 + "!"))) if text == "bad" else float(len(text)) for text in completions
    ]


def one_wrong_value(completions, **kwargs):
    return ["?" if text == "bad" else float(len(text)) for text in completions]


def one_nan(completions, **kwargs):
    return torch.tensor([float("nan") if text == "bad" else float(len(text)) for text in completions])


def wrong_tokens(completions, completion_ids, **kwargs):
    return [[1.0] * (99 if text == "bad" else len(ids)) for text, ids in zip(completions, completion_ids, strict=True)]


FAILING = [picky, async_picky, sleepy, async_sleepy, busy, backtracks, one_wrong_value, one_nan]


@pytest.mark.parametrize("func", FAILING, ids=lambda func: func.__name__)
def test_only_the_failing_row_is_lost(func):
    tolerant = TolerantReward(func, timeout=0.1 if func in (sleepy, async_sleepy, busy, backtracks) else None)
    scored = score(tolerant, texts=TEXTS)
    assert scored.of("score") == [1.0, 2.0, 0.0, 4.0]
    assert scored.of("scored") == [True, True, False, True]
    assert scored.failed == {func.__name__: [False, False, True, False]}


@pytest.mark.parametrize("func", [async_picky, one_nan], ids=lambda func: func.__name__)
def test_a_fallback_takes_the_place_of_the_reward(func):
    scored = score(TolerantReward(func, on_error=-1.5), texts=TEXTS)
    assert scored.of("score") == [1.0, 2.0, -1.5, 4.0]
    assert all(scored.of("scored"))
    assert scored.failed == {func.__name__: [False, False, True, False]}


def test_token_rewards_of_one_row_are_lost_alone():
    texts = ["12", "bad", "3"]
    scored = score(TolerantReward(wrong_tokens), texts=texts)
    assert scored.of("token_rewards") == [[1.0] * 3, [0.0] * 4, [1.0] * 2]
    assert scored.of("scored") == [True, False, True]


def test_each_row_has_its_own_columns_row_by_row_and_logs_nothing():
    seen = []

    def func(completions, answer, log_extra, log_metric, **kwargs):
        log_extra("given", list(completions))
        log_metric("rows", len(completions))
        seen.append((completions, answer))
        return picky(completions)

    scored = score(TolerantReward(func), texts=["1", "bad", "22"], answer=["a", "b", "c"])
    assert seen[1:] == [(["1"], ["a"]), (["bad"], ["b"]), (["22"], ["c"])]
    assert (scored.extra, scored.metrics) == ({}, {})


@pytest.mark.parametrize(("max_failed", "allowed"), [(0.0, 0), (0.25, 3), (1.0, 10)])
@pytest.mark.parametrize("func", [picky, one_nan], ids=lambda func: func.__name__)
def test_more_failures_than_allowed_end_the_run(func, max_failed, allowed):
    """The share is rounded up: 2.5 rows are 3."""
    tolerant, texts = TolerantReward(func, max_failed=max_failed), ["bad"] * allowed + ["1"] * (10 - allowed)
    assert score(tolerant, texts=texts).of("scored") == [False] * allowed + [True] * (10 - allowed)
    if max_failed == 1.0:
        return
    message = rf"'{func.__name__}' failed for more than {allowed} of 10 .* max_failed={max_failed} allows; the first: "
    with pytest.raises(RewardError, match=message) as error:
        score(tolerant, texts=["bad", *texts[:-1]])
    assert isinstance(error.value.__cause__, KeyError if func is picky else ValueError)


def test_a_function_that_is_broken_for_good_is_given_up_early():
    calls = []

    def broken(completions, **kwargs):
        calls.append(len(completions))
        raise ConnectionError("down")

    with pytest.raises(RewardError):
        score(TolerantReward(broken), texts=["1"] * 40)
    assert calls == [40, 1, 1, 1, 1, 1]  # 4 may fail, the fifth ends it


def test_an_interrupted_function_shows_the_line_at_which_it_hung():
    with pytest.raises(TimeoutError) as error:
        call_within(0.1, "late", lambda: sleepy(["bad"]))
    assert "sleepy" in [frame.name for frame in traceback.extract_tb(error.value.__cause__.__traceback__)]


def test_the_time_limit_leaves_no_alarm_behind():
    before = signal.getsignal(signal.SIGALRM)
    score(TolerantReward(picky, timeout=30), texts=("1",))
    with pytest.raises(RewardError):
        score(TolerantReward(sleepy, timeout=0.05, max_failed=0.0), texts=("bad",))
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_alarm_that_rings_when_the_function_has_returned_is_too_late(monkeypatch):
    before, setitimer = signal.getsignal(signal.SIGALRM), signal.setitimer

    def ringing(which, seconds, *interval):
        if not seconds:
            signal.raise_signal(signal.SIGALRM)
        return setitimer(which, seconds, *interval)

    monkeypatch.setattr("signal.setitimer", ringing)
    assert call_within(30, "late", lambda: 7) == 7
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_time_limit_holds_outside_the_main_thread():
    async def elsewhere(func, timeout):
        return await asyncio.to_thread(score, TolerantReward(func, timeout=timeout, max_failed=0.0), None, ("1",))

    with pytest.raises(RewardError, match=r"gave no answer within 0.1 s"):
        asyncio.run(elsewhere(lambda **_: time.sleep(60), 0.1))
    assert asyncio.run(elsewhere(picky, 30)) == asyncio.run(elsewhere(picky, None))


def test_failing_functions_leave_the_others_alone_and_are_counted(make_trainer):
    def fails_at_the_third(completions, **kwargs):
        return [None if i == 1 else "?" if i == 2 else 1.0 for i in range(len(completions))]

    funcs = [TolerantReward(fails_at_the_third, max_failed=0.2), count_digits]
    trainer = make_trainer({"max_steps": 1}, reward_funcs=funcs)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["rewards/fails_at_the_third/failed"] == 1 / 8
    assert logs["rewards/fails_at_the_third/mean"] == 1.0
    assert "rewards/count_digits/failed" not in logs
    assert logs["unscorable_frac"] == 0.0


def test_evaluations_count_failures_over_all_batches(make_trainer, dataset):
    trainer = make_trainer(
        {"per_device_eval_batch_size": 3}, reward_funcs=TolerantReward(one_per_call, max_failed=0.3)
    )
    metrics = trainer.evaluate(dataset.select(range(7)))  # batches of 3, 3 and 1: one row of each fails
    assert metrics["eval_rewards/one_per_call/failed"] == pytest.approx(3 / 7)


def one_per_call(completions, **kwargs):
    return [float("nan"), *[1.0] * (len(completions) - 1)]


def test_what_is_in_a_wrapper_is_checked_before_the_run_begins(serve, make_trainer):
    with pytest.raises(TypeError, match="'two' cannot be called for train_dataset: got an unexpected keyword"):
        make_trainer(reward_funcs=TolerantReward(two))
    with pytest.raises(ValueError, match="no column 'nope'"):
        make_trainer(reward_funcs=TolerantReward(RewardServer(serve(lengths).url, columns=["nope"])))
    trainer = make_trainer(reward_funcs=TolerantReward(functools.partial(with_a_threshold, threshold=2)))
    assert trainer.collector.rewards.names == ["with_a_threshold"]
    server = serve(lengths)
    trainer = make_trainer(reward_funcs=TolerantReward(server.url, on_error=0.0))  # an address
    assert trainer.collector.rewards.names == ["reward_server"]
    assert server.asked == [{"prompts": [], "completions": []}]


def two(prompts, completions):
    return [0.0] * len(completions)


def with_a_threshold(completions, threshold, **kwargs):
    return [float(len(c) > threshold) for c in completions]


async def forever(**kwargs):
    await asyncio.sleep(600)


@pytest.mark.parametrize("fails", [picky, async_picky])
def test_the_first_error_is_raised_without_waiting_for_the_others(fails):
    with pytest.raises(KeyError, match="bad"):
        score([forever, fails], texts=TEXTS)


def test_a_caller_that_fails_meanwhile_cancels_them():
    cancelled = []

    async def cancellable(**kwargs):
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def fail(batch):
        with RewardFunctions([cancellable]).start(batch):
            wait_for(lambda: asyncio.sleep(0.01))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail(reward_batch(["2"]))
    wait_for(lambda: asyncio.sleep(0))
    assert cancelled == [True]


def test_a_reward_that_dies_leaves_a_checkpoint_that_goes_on_as_if_nothing_had_been(make_trainer, tmp_path):
    config = {"save_strategy": "steps", "save_steps": 4, "max_steps": 12}
    straight = make_trainer({**config, "output_dir": str(tmp_path / "straight")})
    straight.train()
    calls = iter(range(2))  # two rollouts

    def count_digits_until_it_dies(completions, **kwargs):
        if next(calls, None) is None:
            time.sleep(60)
        return count_digits(completions)

    dying = TolerantReward(count_digits_until_it_dies, timeout=0.1)
    with pytest.raises(RewardError, match=r"gave no answer within 0\.1 s"):
        make_trainer(config, reward_funcs=dying).train()
    assert (tmp_path / "out/checkpoint-8").is_dir()
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=True)
    assert_same_end(resumed, straight)


def test_failures_are_told(caplog):
    score(TolerantReward(picky), texts=TEXTS)
    asked, failed = [r.getMessage() for r in caplog.records if r.name == "hfppo.rewards.tolerant"]
    assert asked == "reward function 'picky' failed and is called again for each row: KeyError('bad')"
    assert failed == "reward function 'picky' failed for 1 of 4 completions; the first is row 2: KeyError('bad')"
