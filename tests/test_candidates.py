"""Prompts chosen by the critic, and groups with spread out of more than a rollout needs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

from helpers.agents import Chatter, talking_trainer
from helpers.runs import assert_same_end, logged, small_trainer, untimed_logs
from helpers.scripted import collect_first, training_rows
from helpers.tiny import scorer
from hfppo.collect import candidates
from hfppo.collect.candidates import Choice, ScoreLine, choose, judge, num_candidates
from hfppo.metrics import METRICS, Meter
from hfppo.state import PPOState

# V(s₀) − its mean, and score: the line is 0.25 + 0.5·(V − mean).
JUDGED = [[-0.5, 0.0], [-0.5, 0.0], [0.5, 1.0], [0.5, 0.0]]
SUMS = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)])
EIGHT = {"per_device_train_batch_size": 8, "num_mini_batches": 1}


def texts(trainer, choice: Choice) -> list[str]:
    return [row.columns["prompt"] for row in trainer.collector.rows_of(choice, trainer._train_prompts)]


def valued(trainer, value):
    """The trainer with V(s₀) by a function of the prompt's text."""

    class Valued(type(trainer.collector)):
        def prompt_values(self, rows):
            return torch.tensor([value(row.columns["prompt"]) for row in rows])

    trainer.collector = Valued(**vars(trainer.collector))
    return trainer


def first_digit(text: str) -> float:
    return int(text[0]) / 9


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A trainer, and a rollout of eight completions."""
    trainer = small_trainer(tmp_path_factory.mktemp("eight"), EIGHT)
    return trainer, collect_first(trainer).rollout


def test_expected_scores_are_a_line_over_values():
    line = ScoreLine.fit(JUDGED)
    assert (line.slope, line.mean, line.low, line.high) == (0.5, 0.25, 0.0, 1.0)
    assert line.explained == pytest.approx(1 / 3)  # Σ(line − 1/4)² is 1/4, Σ(score − 1/4)² is 3/4
    expected = line.expected(torch.tensor([2.0, 2.5, 3.0]), torch.tensor(2.0))
    assert expected.tolist() == [0.25, 0.5, 0.75]
    assert line.distances(expected).tolist() == [0.25, 0.0, 0.25]


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        ([], False),
        (JUDGED, True),
        ([[-x, score] for x, score in JUDGED], False),  # explains the scores, the wrong way round
        ([[0.0, 1.0], [1.0, 1.0]], False),
        ([[-0.5, 0.0], [0.5, 1.0]] * 15 + [[0.5, 0.0], [-0.5, 1.0]] * 9, True),  # explains 0.0625
        ([[-0.5, 0.0], [0.5, 1.0]] * 13 + [[0.5, 0.0], [-0.5, 1.0]] * 9, False),  # 0.033
    ],
)
def test_the_critic_chooses_while_it_explains_scores(judged, expected):
    assert ScoreLine.fit(judged).may_choose == expected


def test_the_nearest_are_taken_and_a_quarter_is_drawn():
    distances = torch.tensor([0.5, 0.1, 0.4, 0.0, 0.3, 0.2, 0.45, 0.05])
    counts = torch.zeros(8)
    for seed in range(400):
        taken, uniform = choose(distances, 4, (seed,))
        assert taken.tolist() == sorted(set(taken.tolist()))
        (drawn,) = taken[uniform].tolist()
        assert taken[~uniform].tolist() == sorted([i for i in (3, 7, 1, 5) if i != drawn][:3])
        counts[drawn] += 1
    assert counts.min() > 25  # 50 are expected, with a deviation of 7
    assert choose(distances, 5, (0,))[1].sum() == 2, "a quarter is rounded up"
    taken, uniform = choose(torch.ones(8), 4, (1,))  # of equal ones the first
    assert taken[~uniform].tolist() == [i for i in range(8) if i != taken[uniform].item()][:3]


def test_the_critic_chooses_prompts_and_the_next_rollout_comes_after_them(make_trainer):
    trainer = valued(make_trainer({**EIGHT, "prompt_candidates": 3}, train_dataset=SUMS), first_digit)
    prompts, collector = trainer._train_prompts, trainer.collector
    state = PPOState(0.05, rollouts=2, passed_over=5)
    order = [row["prompt"] for row, _ in prompts.at(range(21, 21 + 24), trainer.args.seed)]
    first = texts(trainer, collector.choose_prompts(prompts, state))
    assert first == order[:8], "uniform as long as nothing judges the critic"

    choice = collector.choose_prompts(prompts, replace(state, uniform_scores=JUDGED))
    chosen = texts(trainer, choice)
    assert choice.passed_over == 16
    assert [order.index(text) for text in chosen] == sorted(order.index(text) for text in chosen)
    assert sum(choice.uniform) == 2
    drawn = [text for text, uniform in zip(chosen, choice.uniform, strict=True) if uniform]
    mean = sum(map(first_digit, order)) / 24
    # 1/4 + 1/2·(V − mean) is the middle, 1/2, where V = mean + 1/2.
    distances = {text: abs(first_digit(text) - mean - 0.5) for text in order if text not in drawn}
    nearest = sorted(distances.values())[:6]
    assert sorted(distances[text] for text in chosen if text not in drawn) == pytest.approx(nearest)


@pytest.mark.parametrize(("num_generations", "critic"), [(1, "adapter"), (2, "shared")])
def test_seeds_of_a_row_are_those_of_its_place_in_the_order(make_trainer, num_generations, critic):
    config = {**EIGHT, "prompt_candidates": 3, "num_generations": num_generations}
    trainer = valued(make_trainer(config, train_dataset=SUMS, critic=critic), first_digit)
    state = PPOState(0.05, uniform_scores=JUDGED)
    choice = trainer.collector.choose_prompts(trainer._train_prompts, state)
    plain = make_trainer({**EIGHT, "num_generations": num_generations}, train_dataset=SUMS)
    uniform = {row.number: row for i in range(3) for row in training_rows(plain.collector, plain._train_prompts, i)}
    rows = trainer.collector.rows_of(choice, trainer._train_prompts)
    assert len(rows) == 8
    assert [uniform[row.number] for row in rows] == rows
    assert len({row.group for row in rows}) == 8 // num_generations == len(choice.uniform)


@pytest.mark.parametrize(
    ("critic", "config"),
    [
        ("adapter", {"critic_layers": 1, "local_rollout_forward_batch_size": 3}),
        ("shared", {"local_rollout_forward_batch_size": 2}),
        (scorer, {}),
        ("an environment", {"prompt_candidates": 2}),
    ],
)
def test_values_of_prompts_are_those_of_their_rollout(make_trainer, tmp_path, critic, config):
    config = {**config, "max_steps": 4}
    if critic == "an environment":
        trainer = talking_trainer(tmp_path / "out", config)
    else:
        trainer = make_trainer(config, critic=critic() if callable(critic) else critic)
    trainer.train()  # V(s₀) differs by prompt
    rows = training_rows(trainer.collector, trainer._train_prompts, 3)
    rollout = trainer.collector.collect(rows, trainer.ppo_state, trainer.state).rollout
    before = Chatter.resets
    found = trainer.collector.prompt_values(rows)
    assert Chatter.resets == before + (len(rows) if critic == "an environment" else 0)
    assert found.std() > 1e-3
    assert_close(found, rollout.values[:, 0], rtol=1e-4, atol=1e-5)


def test_only_prompts_drawn_uniformly_judge_the_critic(eight):
    trainer, rollout = eight
    values, scores = torch.zeros(rollout.mask.shape), torch.tensor([0.0, 1.0, 0.0, 1.0, 9.0, 9.0, 1.0, 0.0])
    values[:, 0] = torch.tensor([1.0, 2.0, 1.0, 2.0, 9.0, 9.0, 2.0, 1.0])
    left_out = torch.arange(8)[:, None] < 6
    rollout = replace(rollout, values=values, scores=scores, loss_mask=rollout.mask & left_out)
    choice = Choice(range(8), [*range(8)], [True] * 4 + [False] * 2 + [True] * 2)
    state = PPOState(0.05, uniform_scores=[[-0.5, 0.0], [0.5, 0.6]])
    judging, measures = judge(state, choice, rollout, trainer.collector.gather)
    assert judging == [*state.uniform_scores, [-0.5, 0.0], [0.5, 1.0], [-0.5, 0.0], [0.5, 1.0]]
    metrics = Meter(measures).read()
    # The line so far is 0.3 + 0.6·(V − 1.5): 0 and 0.6 are expected, and the range is 0 to 0.6.
    assert metrics["candidates/signal_uniform"] == 0.5
    assert metrics["candidates/signal_chosen"] == 1.0
    assert metrics["candidates/explained"] == pytest.approx(ScoreLine.fit(judging).explained)


@pytest.fixture
def always(monkeypatch):
    """Let the critic choose from the second rollout on."""
    monkeypatch.setattr(ScoreLine, "may_choose", property(lambda line: line.high > line.low))


def test_a_critic_that_explains_nothing_changes_nothing(make_trainer, monkeypatch):
    monkeypatch.setattr(candidates, "EXPLAINED", 2.0)
    runs = [make_trainer({"prompt_candidates": k}, train_dataset=SUMS) for k in (1, 4)]
    for run in runs:
        run.train()
    assert_same_end(*runs)
    plain, judged = map(untimed_logs, runs)
    assert plain == [{n: x for n, x in log.items() if not n.startswith("candidates/")} for log in judged]
    assert runs[0].ppo_state.uniform_scores == []
    assert len(runs[1].ppo_state.uniform_scores) == 16


GROUPS = {"advantage_estimator": "grpo", "num_generations": 2, "prompt_candidates": 3, **EIGHT}


def test_a_run_looks_at_the_window_after_the_last_and_logs_every_metric_of_candidates(make_trainer, always):
    config = {**EIGHT, "prompt_candidates": 3, "max_steps": 8}
    runs = [make_trainer({**config, **more}, train_dataset=SUMS) for more in ({}, GROUPS)]
    for run in runs:
        run.train()
    by_critic = runs[0]
    assert by_critic.ppo_state.passed_over == 3 * 16  # four rollouts; nothing judges the critic before the first
    assert len(logged(by_critic, "candidates/chosen")) == len(logged(by_critic, "candidates/passed_over")) == 3
    names = {name for run in runs for entry in run.state.log_history for name in entry}
    found = {name for name in names if "candidates" in name}
    assert found == {name for name in METRICS if "candidates" in name}


# Groups without a critic


def spread_where_even(prompts, **kwargs) -> list[float]:
    """Scores differ within a group whose first number is even."""
    return [float(int(text[0]) % 2 == 0 and i % 2) for i, text in enumerate(prompts)]


def test_groups_with_spread_are_kept(make_trainer):
    trainer = make_trainer({**GROUPS, "max_steps": 4}, train_dataset=SUMS, reward_funcs=spread_where_even)
    state = PPOState(0.05, rollouts=1, passed_over=3, spread=0.4)
    order = [row["prompt"] for row, _ in trainer._train_prompts.at(range(7, 7 + 10), trainer.args.seed)]
    choice = trainer.collector.choose_prompts(trainer._train_prompts, state)
    assert texts(trainer, choice)[::2] == texts(trainer, choice)[1::2] == order  # ten groups, of which 0.4 are four
    assert choice.passed_over == 6
    rows = trainer.collector.rows_of(choice, trainer._train_prompts)
    collected = trainer.collector.collect(rows, state, trainer.state)
    even = [text for text in order if int(text[0]) % 2 == 0]
    kept = collected.transcript.prompts[::2]
    assert len(collected.rollout) == 8
    assert set(even[:4]) <= set(kept)
    assert len(kept) == 4
    rollout, decode, transcript = collected.rollout, trainer.processing_class.decode, collected.transcript
    for row in range(8):
        assert decode(rollout.prompt_ids[row][rollout.prompt_mask[row]]) == transcript.prompts[row]
        ids = rollout.completion_ids[row][rollout.real[row]]
        assert decode(ids, skip_special_tokens=True) == transcript.completions[row]
    metrics = Meter(collected.measures).read()
    assert metrics["candidates/spread"] == len(even) / 10
    assert metrics["candidates/completions"] == 20
    assert metrics["frac_reward_zero_std"] == max(0, 4 - len(even)) / 4
    assert collected.transcript.scores["spread_where_even"] == collected.rollout.scores.tolist()


@pytest.mark.parametrize(("spread", "expected"), [(1.0, 4), (0.8, 5), (0.5, 8), (0.1, 12), (0.0, 12)])
def test_as_many_groups_as_the_last_share_asks_for_within_the_limit(spread, expected):
    args = SimpleNamespace(prompts_per_process=4, prompt_candidates=3, needs_critic=False)
    assert num_candidates(ScoreLine(), spread, args) == expected


def test_groups_without_spread_fill_the_rollout(make_trainer):
    same = {"reward_funcs": lambda prompts, **_: [1.0] * len(prompts)}
    trainer = make_trainer({**GROUPS, "max_steps": 4}, train_dataset=SUMS, **same)
    trainer.train()
    assert (trainer.ppo_state.spread, trainer.ppo_state.passed_over) == (0.0, 8)
    assert logged(trainer, "candidates/completions") == [8, 24]
    assert logged(trainer, "frac_reward_zero_std") == [1.0] * 2


def test_given_prompts_are_never_left_out(make_trainer):
    trainer = make_trainer({**GROUPS, "advantage_estimator": "grpo"}, reward_funcs=spread_where_even)
    given = [f"{n}+1=" for n in range(8) for _ in range(2)]
    assert len(trainer.rollout(given)) == 16
    assert trainer.evaluate(SUMS.select(range(20)))["eval_reward"] >= 0
