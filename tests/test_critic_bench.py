"""The pure parts of the critic bench: exact values, operations, choice of rates, and the permutation test."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "benchmarks"))
import critic_bench as bench
import critic_tasks as tasks

LINE = {"task": "sums", "method": "PPO 1", "seed": 1, "rate": 1.0, "staleness": 0, "operations": 2e11, "seconds": 1.0}
LINE |= {"reward": [n / 10 for n in range(10)], "after": {"sampled": 0.5, "greedy": 1.0}}


def test_values_of_a_scripted_chain():
    on_track = torch.tensor([[True, *[False] * 199]])
    values = tasks.chain_values(on_track, 0.01)
    assert values[0, :2].tolist() == pytest.approx([0.19633, 0.08918], abs=5e-6)  # by dynamic programming
    at_random = tasks.chain_values(torch.tensor([[True, False]]), 0.9)
    assert float(at_random[0, 1]) == pytest.approx(0.1)


def test_values_of_a_chain_are_the_mean_scores_of_its_completions():
    rng, row = random.Random(0), {"prompt": "3+4=", "answer": tasks.chain_answer(3, 4)}
    drawn = [tasks.draw_chain(row, rng) for _ in range(4000)]
    scores = tasks.score_chain(drawn, [row["answer"]] * len(drawn))
    value = float(tasks.chain_values(torch.ones(1, tasks.CHAIN_TOKENS, dtype=torch.bool), tasks.CHAIN_SLIPS)[0, 0])
    assert sum(scores) / len(scores) == pytest.approx(value, abs=0.02)  # three standard errors


def test_scores_of_the_long_tasks():
    assert tasks.score_chain(["123", "13", "193", "124"], ["123"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert tasks.score_delayed(["712", "", "172"], ["7"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("slips", [0.0, 1.0])
def test_written_steps_are_right_without_slips(monkeypatch, slips):
    monkeypatch.setattr(tasks, "STEP_SLIPS", slips)
    train, test = tasks.step_rows()
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    drawn = [tasks.draw_steps(row, random.Random(0)).removesuffix("<|im_end|>") for row in test]
    assert {text.count("=") for text in drawn} == {tasks.STEPS}
    assert set(tasks.score_steps(drawn, [row["answer"] for row in test])) == {1.0 - slips}


def test_operations_count_critic_and_passes(tmp_path):
    sizes, tokens = (10, 1), {"prompt": 2, "critic_prompt": 4, "completion": 3, "sampled": 3}
    actor, critic = 2 * 10 * 5 + 2 * 3, 2 * 10 * 7

    def count(method: str) -> float:
        args = bench.config_of(bench.Key("sums", method, 0), str(tmp_path))
        return bench.operations(args, sizes, tokens, rollouts=20)

    assert count("REINFORCE++") == 3 * actor  # sampling, forward and backward
    assert count("PPO 1") == 3 * actor + 3 * critic
    assert count("PACT") == 4 * actor + 3 * critic  # π after the actor's steps
    assert count("SAO") == pytest.approx((1 + 2 * 18 / 20) * actor + 5 * critic)  # two epochs; two rollouts of warm-up


def test_permutation_test_by_hand():
    assert bench.p_value([1.0, 2.0], [3.0, 4.0]) == pytest.approx(2 / 6)
    assert bench.p_value([0.5] * 3, [0.5] * 3) == 1.0


def test_seed_0_chooses_the_rate_and_is_not_reported():
    lines = [{**LINE, "seed": 0}, {**LINE, "seed": 0, "rate": 2.0, "reward": [1.0] * 10}]
    assert bench.chosen_rate(lines, "sums", "PPO 1") == 2.0
    assert bench.chosen_rate(lines, "sums", "PACT") == 1.0
    assert [bench.chosen_rate(lines, "sums", part) for part in ("PPO 1, dppo", "PPO, α 0.4")] == [2.0, 2.0]
    found = bench.reported([*lines, LINE, {**LINE, "rate": 2.0}])
    assert [(x["seed"], x["rate"]) for x in found["sums", "PPO 1"]] == [(1, 2.0)]


def test_report_compares_at_equal_compute_and_by_claims():
    line = {**LINE, "method": "REINFORCE++"}
    other = {**LINE, "operations": 1e11, "after": {"sampled": 0.7, "greedy": 1.0}}
    both = [{**x, "seed": seed} for x in (line, other) for seed in (1, 2)]
    ppo, plain = (row.split(" | ") for row in bench.report(both).splitlines()[2:])
    assert (ppo[4], ppo[5], ppo[7]) == ("0.700 ± 0.000", "0.333", "0.900 ± 0.000")
    assert (plain[4], plain[5], plain[7]) == ("0.500 ± 0.000", "–", "0.500 ± 0.000")  # half of its run
    worse = [{**x, "method": "PPO .95"} for x in both[:2]]
    assert bench.claims(both + worse).splitlines()[2:] == ["| sums | 0 | PPO 1 − PPO .95 | +0.200 | 0.333 |"]
    both += [{**x, "task": "chain"} for x in both]
    assert "| PPO 1 | 0.700±0.000 (0.333) | 0.900±0.000 | 0.700±0.000 (0.333)" in bench.short_report(both)
