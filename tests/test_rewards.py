"""Reward functions: what they are given, what becomes of what they return, and that TRL's run as they are."""

import asyncio
import copy
import functools
import inspect
import math
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

import hfppo.collect.collector
from helpers.scripted import always, answering, first_rollout, score
from helpers.tiny import other_tokenizer, scorer, tiny_model
from hfppo import TolerantReward
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.model import RewardModel

NAN = float("nan")


def zeros(completions, **kwargs):
    return [0.0] * len(completions)


USER = [{"role": "user", "content": "1+1="}]
BEGUN = [*USER, {"role": "assistant", "content": "不"}]
ANSWERED = [[{"role": "assistant", "content": text}] for text in ("2", "对不")]
TEXTS = ["1+1=", "2+1=", "3="]
COLUMNS = {"answer": ["2", "3", "4"], "level": [1, 2, 3]}
# Prompts, sampled completions, columns, and what differs among the arguments.
CALLS = {
    "texts: no padding; EOS where there was one": (
        *(TEXTS, ["2.", "12+", "."], COLUMNS),
        {"completions": ["2", "12+", ""], "completion_ids": [[4, 1], [3, 4, 12], [1]]},
    ),
    "conversations": (
        *([USER, BEGUN], ["2.", "对不"], {"answer": ["2", "3"]}),
        {"completions": ANSWERED, "completion_ids": [[4, 1], [20, 19]]},
    ),
    "a dataset for supervised training: its completion is not scored": (
        *(["1+1="], ["2."], {"prompt_id": [3], "completion": ["wrong"], "completion_ids": [[7]]}),
        {"completions": ["2"], "completion_ids": [[4, 1]], "completion": None},
    ),
}


@pytest.mark.parametrize(("prompts", "sampled", "columns", "given"), CALLS.values(), ids=CALLS)
def test_the_call(make_trainer, prompts, sampled, columns, given):
    calls = []

    def reward(*args, **kwargs):
        calls.append((args, kwargs))
        return zeros(**kwargs)

    trainer = answering(make_trainer(reward_funcs=reward), *sampled)
    trainer.rollout(prompts, **columns)
    ((args, kwargs),) = calls
    assert args == ()
    assert kwargs.pop("trainer_state") is trainer.state
    assert callable(kwargs.pop("log_extra"))
    assert callable(kwargs.pop("log_metric"))
    expected = {"prompts": prompts, **columns, **given}
    assert kwargs == {name: value for name, value in expected.items() if value is not None}


def test_log_extra_and_log_metric():
    def first(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c) for c in completions])
        log_metric("share", 0.25)
        return [0.0] * len(completions)

    def second(completions, log_metric, **kwargs):
        log_metric("share", 0.75)
        log_metric("other", torch.tensor(2))
        return [0.0] * len(completions)

    scored = score([first, second])
    assert scored.extra == {"length": [2, 1, 0]}
    assert scored.metrics == {"share": [0.25, 0.75], "other": [2.0]}


def test_columns_of_one_name_are_told_apart():
    def logs(value):
        def same(completions, log_extra, **kwargs):
            for _ in completions:
                log_extra("why", [value])
            return [0.0] * len(completions)

        return same

    assert score([logs("a"), logs("b")]).extra == {"why (same_1)": ["a"] * 3, "why (same_2)": ["b"] * 3}


def test_a_logged_column_that_does_not_fit_is_named():
    def scores(completions, log_extra, **kwargs):
        log_extra("why", ["a", "b"])
        return zeros(completions)

    with pytest.raises(ValueError, match="2 values for 3 completions to log_extra as 'why'; pass one"):
        score(scores)


@pytest.mark.parametrize(
    ("funcs", "weights", "scores", "scored"),
    [
        (always(1.0, -2.0, 0.5), None, [1.0, -2.0, 0.5], [True] * 3),  # needs no list
        ([always(1, 2, 3), always(10, 20, 30)], None, [11.0, 22.0, 33.0], [True] * 3),
        ((always(1, 2, 3), always(10, 20, 30)), None, [11.0, 22.0, 33.0], [True] * 3),
        ([always(1, 2, 3), always(10, 20, 30)], [2.0, -0.5], [-3.0, -6.0, -9.0], [True] * 3),  # 2·1 − 0.5·10, …
        ([always(1, 2, 3), always(10, 20, 30)], [1.0, 0.0], [1.0, 2.0, 3.0], [True] * 3),  # weight 0 only logs
        ([always(1, None, None), always(10, 20, None)], [3.0, 1.0], [13.0, 20.0, 0.0], [True, True, False]),
        # A function that is only logged changes nothing of what is trained on.
        ([always(1, None, None), always(10, 20, None)], [3.0, 0.0], [3.0, 0.0, 0.0], [True, False, False]),
    ],
)
def test_scores_add_up_by_weight_and_none_leaves_a_function_out(funcs, weights, scores, scored):
    found = score(funcs, weights)
    assert found.of("score") == scores
    assert found.of("scored") == scored
    assert found.of("token_rewards") == [[0.0, 0.0, scores[0]], [0.0, scores[1]], [scores[2]]]
    given = [func() for func in (funcs if isinstance(funcs, list | tuple) else [funcs])]
    unweighted = torch.tensor([[NAN if x is None else float(x) for x in row] for row in zip(*given, strict=True)])
    assert_close(found.per_function, unweighted, equal_nan=True)


@pytest.mark.parametrize(
    "output",
    [
        [0.5, 1, True],
        torch.tensor([[0.5], [1.0], [1.0]]),  # as a model's logits
        np.array([[0.5], [1.0], [1.0]]),
        [np.float32(0.5), np.int64(1), np.float64(1.0)],
        [np.array(0.5), np.array([1.0]), np.bool_(True)],
        pd.Series([0.5, 1.0, 1.0], index=[7, 7, 9]),
        pd.Series([0.5, 1, True], dtype=object),
    ],
)
def test_kinds_of_numbers(output):
    assert score(lambda **kwargs: output).of("score") == [0.5, 1.0, 1.0]


def test_an_unscorable_completion_counts_in_no_metric(make_trainer):
    """Its placeholder would be a return, of which no value is to learn."""
    config = {"max_steps": 1, "num_mini_batches": 1, "per_device_train_batch_size": 4, "kl_coef": 0.0, "lam": 1.0}
    trainer = make_trainer(config, reward_funcs=always(3.0, None, None, 5.0))
    answering(trainer, "12.").train()
    expected = {
        **{"unscorable_frac": 0.5, "reward": 4.0, "reward_std": 1.0},
        **{"rewards/constant/mean": 4.0, "rewards/constant/std": 1.0},
        **{"value/return": 4.0, "value/return_std": 1.0, "advantage_std": 1.0, "value/explained_variance": 0.0},
    }
    assert trainer.state.log_history[0].items() >= expected.items()


def test_rewards_compute_in_their_own_type_whatever_the_models_do(make_trainer, dataset, tokenizer):
    seen, in_model, in_update = [], [], []

    def multiply(completions, **kwargs):
        seen.append((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
        return [1.0] * len(completions)

    judge = RewardModel(scorer(), tokenizer)
    config = {"max_steps": 1, "bf16": True, "use_cpu": True}
    trainer = make_trainer(config, reward_funcs=[multiply, judge], eval_dataset=dataset.select(range(2)))
    judge.model.model.layers[0].mlp.register_forward_hook(lambda _, given, output: in_model.append(output.dtype))
    trainer.model.causal_lm.lm_head.register_forward_hook(lambda _, given, output: in_update.append(output.dtype))
    trainer.train()
    trainer.evaluate()
    assert seen == [torch.float32, torch.float32]
    assert set(in_model) == {torch.float32}
    assert set(in_update) == {torch.bfloat16}


def test_a_compiled_function_without_a_signature_is_a_reward_function(make_trainer):
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(dict)  # it takes any keywords
    make_trainer(reward_funcs=dict)


def by_token(*rewards):
    """A reward function with a reward for each token."""

    def per_token(**kwargs):
        return list(rewards)

    return per_token


MIXED = [by_token([0.5, -1.0], None, [1.0, 2.0]), always(10.0, 20.0, None), by_token(1.0, [3.0, 0, 0, 0], None)]
# Reward functions, fields, completions; rewards, and scores.
PLACED = {
    "by token": (by_token([0.5, -1], [1, 2, 3, 4]), {}, ("1.", "123."), [[0.5, -1, 0, 0], [1, 2, 3, 4]], [-0.5, 10.0]),
    "arrays": (by_token(np.array([0.0, 1.0, 2.0])), {}, ("12.",), [[0.0, 1.0, 2.0]], [3.0]),
    "mixed": (
        *(MIXED, {"reward_weights": [2.0, 1.0, 0.5]}, ("1.", "123.", "2.")),
        # 2·0.5, 2·(−1) + 10 + 0.5·1; 0.5·3, 20; 2·1, 2·2
        *([[1.0, 8.5, 0, 0], [1.5, 0, 0, 20.0], [2.0, 4.0, 0, 0]], [9.5, 21.5, 6.0]),
    ),
}


@pytest.mark.parametrize(("funcs", "config", "sampled", "rewards", "scores"), PLACED.values(), ids=PLACED)
def test_rewards_stand_on_their_tokens_and_scores_on_the_last(make_trainer, funcs, config, sampled, rewards, scores):
    trainer = answering(make_trainer({"kl_coef": 0.0, **config}, reward_funcs=funcs), *sampled)
    rollout = trainer.rollout(["1="] * len(scores))
    assert rollout.scores.tolist() == scores
    assert rollout.rewards.tolist() == rewards
    assert rollout.loss_mask.equal(rollout.mask)


class Length:
    """A callable object."""

    def __init__(self, sign: float = 1.0):
        self.sign = sign

    def __call__(self, completions, **kwargs):
        return [self.sign * len(c) for c in completions]


def count(completions, of, **kwargs):
    return [float(text.count(of)) for text in completions]


@pytest.mark.parametrize(
    ("funcs", "names"),
    [
        pytest.param([count], ["count"], id="function"),
        pytest.param([Length()], ["Length"], id="object: its class"),
        pytest.param([functools.partial(count, of="1")], ["count"], id="partial: what it wraps"),
        pytest.param([functools.partial(functools.partial(Length()), x=1)], ["Length"], id="partial of a partial"),
        pytest.param([count, Length(), count], ["count_1", "Length", "count_2"], id="repeated: numbered"),
        pytest.param([Length(), Length(-1)], ["Length_1", "Length_2"], id="objects of one class"),
        pytest.param([lambda: 0], ["<lambda>"], id="lambda"),
    ],
)
def test_names(funcs, names):
    """As TRL names them, so that dashboards can be compared."""
    assert RewardFunctions(funcs).names == names


def test_functions_are_called_in_the_calling_thread():
    """Some, such as math_verify, use signals, which only the main thread may."""
    threads = []

    def reward(completions, **kwargs):
        threads.append(threading.current_thread())
        return zeros(completions)

    async def waits(completions, **kwargs):
        return zeros(completions)

    score([reward, waits])
    assert threads == [threading.current_thread()]


def meeting(number_of_functions: int):
    """Asynchronous functions each of which returns only once all have started."""
    arrived, everybody = [], asyncio.Event()

    def member(reward: float):
        async def meets(completions, **kwargs):
            arrived.append(reward)
            if len(arrived) == number_of_functions:
                everybody.set()
            await asyncio.wait_for(everybody.wait(), timeout=5)
            return [reward] * len(completions)

        return meets

    return [member(float(i)) for i in range(number_of_functions)]


def decorated(func):
    """A decorator whose result looks like a plain function."""

    def inner(**kwargs):
        return func(**kwargs)

    return inner


async def notebook_cell(funcs):
    return score(funcs)


@pytest.mark.parametrize(
    "run",
    [score, lambda funcs: score(list(map(decorated, funcs))), lambda funcs: asyncio.run(notebook_cell(funcs))],
    ids=["plain", "behind decorators", "where an event loop runs already"],
)
def test_asynchronous_functions_run_at_the_same_time(run):
    assert run(meeting(3)).per_function.tolist() == [[0.0, 1.0, 2.0]] * 3


class AsyncLength:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]


async def async_count(completions, of, **kwargs):
    await asyncio.sleep(0)
    return count(completions, of)


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        pytest.param(AsyncLength(), [2.0, 1.0, 0.0], id="object"),
        pytest.param(functools.partial(AsyncLength(), unused=1), [2.0, 1.0, 0.0], id="partial of an object"),
        pytest.param(decorated(functools.partial(async_count, of="3")), [0.0, 1.0, 0.0], id="decorated"),
        pytest.param(TolerantReward(decorated(AsyncLength()), timeout=5), [2.0, 1.0, 0.0], id="tolerant, decorated"),
    ],
)
def test_kinds_of_asynchronous_functions(func, expected):
    assert score(func).of("score") == expected


def test_each_output_stays_with_its_function():
    funcs = [always(1, 1, 1), AsyncLength(), always(3, 3, 3), functools.partial(async_count, of="3")]
    assert score(funcs).per_function.tolist() == [[1.0, 2.0, 3.0, 0.0], [1.0, 1.0, 3.0, 1.0], [1.0, 0.0, 3.0, 0.0]]


def test_metrics_of_each_function_are_logged(make_trainer):
    def share(completions, log_metric, **kwargs):
        log_metric("batch", len(completions))
        return [None if text == "" else 1.0 for text in completions]

    config = {"max_steps": 1, "reward_weights": [1.0, 0.0, 2.0, 0.5]}
    trainer = make_trainer(config, reward_funcs=[Length(), Length(-1.0), share, AsyncLength()])
    answering(trainer, "1.", "123.", ".", "12345.").train()  # 8 rows: each twice
    logs = trainer.state.log_history[0]
    assert logs["rewards/Length_1/mean"] == 2.25  # (1 + 3 + 0 + 5)/4
    assert logs["rewards/Length_1/std"] == pytest.approx(math.sqrt((1 + 9 + 0 + 25) / 4 - 2.25**2))
    assert (logs["rewards/Length_2/mean"], logs["rewards/AsyncLength/mean"]) == (-2.25, 2.25)
    assert (logs["rewards/share/mean"], logs["rewards/share/std"]) == (1.0, 0.0)  # over the rows that it scores
    assert logs["reward"] == 4.875  # ((1 + 2) + (3 + 2) + 0 + (5 + 2))/4 + 0.5·2.25
    assert logs["custom/batch"] == 8.0
    assert logs["unscorable_frac"] == 0.0


THINK, DONE, BOXED, CLOSE = 25, 26, 27, 28  # ids of the tokens added below


@pytest.fixture
def trainer_with(make_trainer, tokenizer):
    tokenizer.add_tokens(["<think>", "</think>", r"\boxed{", "}"])
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>", r"\boxed{", "}"]) == [THINK, DONE, BOXED, CLOSE]

    def make(*completions, **kwargs):
        config = {"kl_coef": 0.0, **kwargs.pop("config", {})}
        return answering(make_trainer(config, model=tiny_model(vocab_size=29), **kwargs), *completions)

    return make


PARSED = [[BOXED, 4, CLOSE, 1], [BOXED, 5, CLOSE, 1], [BOXED, 4, CLOSE, 1]]


@pytest.mark.parametrize(
    ("name", "arguments", "sampled", "columns", "scores"),
    [
        ("think_format_reward", {}, [[THINK, 3, DONE, 4, 1], [THINK, 3, 3, 4, 1], [3, 4, 1]], {}, [1.0, 0.0, 0.0]),
        # None: an answer that cannot be parsed
        ("accuracy_reward", {}, PARSED, {"solution": ["$2$", "$2$", "请"]}, [1.0, 0.0, None]),
    ],
)
def test_functions_of_trl(trainer_with, name, arguments, sampled, columns, scores):
    if name == "accuracy_reward":
        pytest.importorskip("math_verify")
    func = getattr(pytest.importorskip("trl.rewards"), name)
    trainer = trainer_with(*sampled, reward_funcs=func(**arguments) if arguments else func, train_dataset=None)
    rollout = trainer.rollout([USER] * len(scores), **columns)
    assert_close(rollout.scores, torch.tensor([x or 0.0 for x in scores]))
    assert rollout.loss_mask.any(dim=1).tolist() == [x is not None for x in scores]


def test_async_functions_go_on_during_the_passes(make_trainer, monkeypatch):
    """The function waits for a pass to begin; called one after the other, neither would ever end."""
    passes_begun = threading.Event()

    async def judge(completions, **kwargs):
        assert await asyncio.to_thread(passes_begun.wait, 30), "the passes wait for the reward function"
        return [1.0] * len(completions)

    trainer = make_trainer(reward_funcs=judge)
    passes = hfppo.collect.collector.forward_passes

    def begin(*args):
        passes_begun.set()
        return passes(*args)

    monkeypatch.setattr(hfppo.collect.collector, "forward_passes", begin)
    assert first_rollout(trainer).scores.eq(1.0).all()


def test_what_functions_log_does_not_depend_on_who_is_faster():
    def plain(completions, log_metric, **kwargs):
        log_metric("x", 2.0)
        return [0.0] * len(completions)

    async def slow(completions, log_metric, **kwargs):
        await asyncio.sleep(0.01)
        log_metric("x", 1.0)
        return [0.0] * len(completions)

    assert score([slow, plain]).metrics == score([plain, slow]).metrics | {"x": [1.0, 2.0]}


def spoil(value):
    """Change a value in place, at every depth."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        spoil(inner)
    if isinstance(value, dict | list):
        value.clear()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_no_function_sees_what_another_changes_in_prompts_and_completions(make_trainer, is_async, wrapped):
    seen = []

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.append(copy.deepcopy([prompts, completions, completion_ids]))
        scores = [float(len(ids)) for ids in completion_ids]
        for value in (prompts, completions, completion_ids):
            spoil(value)
        if wrapped and len(scores) > 1:
            raise ValueError("TolerantReward calls again, for each row")
        return scores

    async def waiting(**kwargs):
        return reward(**kwargs)

    func = waiting if is_async else reward
    talks = [[{"role": "user", "content": text}] for text in ("1+1=", "2+1=")]
    given = Dataset.from_dict({"prompt": talks})
    funcs = [TolerantReward(func, max_failed=1.0), always(0.0, 0.0)] if wrapped else [func, func]
    trainer = answering(make_trainer(reward_funcs=funcs, train_dataset=given), "2.", "12.")
    prepared = trainer._train_prompts
    rows = trainer.collector.eval_rows(prepared)
    collected = trainer.collector.collect(rows, trainer.ppo_state, trainer.state, training=False)
    rollout, transcript = collected.rollout, collected.transcript
    first = [talks, [[{"role": "assistant", "content": text}] for text in ("2", "12")], [[4, 1], [3, 4, 1]]]
    if wrapped:
        assert seen == [first, *[[column[i : i + 1] for column in first] for i in range(2)]]
    else:
        assert seen == [first, first]
    assert [transcript.prompts, transcript.completions] == first[:2]
    assert rollout.scores.tolist() == ([2.0, 3.0] if wrapped else [4.0, 6.0])


@pytest.mark.parametrize("column", ["batch", "self"])
def test_a_column_may_have_any_name_that_the_package_uses_inside(make_trainer, column):
    dataset = Dataset.from_dict({"prompt": ["1+1=", "2+1="] * 2, column: list("abcd")})
    seen = []

    def reward(completions, **kwargs):
        seen.append(kwargs[column])
        return [0.0] * len(completions)

    funcs = [reward, TolerantReward(reward), RewardModel(scorer(), other_tokenizer("left", "<end>"))]
    trainer = make_trainer({"max_steps": 1}, reward_funcs=funcs, train_dataset=dataset)
    trainer.train()
    assert len(seen) == 2
    assert set(seen[0]) <= set("abcd")
    trainer.rollout(["1="], **{column: ["x"]})
    assert seen[2:] == [["x"], ["x"]]
