"""From scores to advantages, worked by hand: where rewards are placed, who is credited, what the losses count."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers.scripted import always
from hfppo import PPOConfig
from hfppo import functional as F
from hfppo.collect.credit import CreditAssignment, Credited
from hfppo.collect.forward import Passes
from hfppo.collect.rollout_metrics import measure_values
from hfppo.data.prompts import Row
from hfppo.metrics import Meter
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.reward_func import RewardBatch
from hfppo.sample import Ended, Sample, pad
from hfppo.support.padding import pad_right

BETA = 0.1


@dataclass
class Completion:
    """One completion: an entry per token, and its scores by function."""

    scores: list[float | list[float] | None]
    kl: list[float]  # log π_old − log π_ref; 0 on tokens that the model did not write
    values: list[float] = field(default_factory=list)
    written: str = ""  # "s" for a sampled token, "c" for one of a tool or an environment; "": all are sampled
    truncated: bool = False
    final_value: float = 0.0
    group: int = 0
    failed: bool = False

    def sample(self) -> Sample:
        row = Row({"prompt": "1"}, [1], number=0, group=self.group, seed=0)
        made = Sample(row, turns=1, ended=Ended.CUT if self.truncated else Ended.STOPPED, failed=self.failed)
        for written, kl in zip(self.written or "s" * len(self.kl), self.kl, strict=True):
            made.append([1], [kl - 1.0] if written == "s" else None)
        return made


def padded(rows: list[list[float]]) -> Tensor:
    return pad_right(rows, torch.float32)[0]


def credit(completions: list[Completion], weights: list[float] | None = None, **config) -> Credited:
    """Return the credit of the completions as rows of one rollout, each with a prompt of one token."""
    args = PPOConfig(output_dir="unused", use_cpu=True, **{"kl_coef": BETA, "whiten_advantages": False, **config})
    samples = [one.sample() for one in completions]
    outputs = [list(column) for column in zip(*(one.scores for one in completions), strict=True)]
    functions = RewardFunctions([always(*output) for output in outputs], weights, args.missing_eos_penalty)
    functions(RewardBatch(samples))
    kl = padded([one.kl for one in completions])
    passes = Passes(
        old_logprobs=kl - 1.0,
        ref_logprobs=torch.full(kl.shape, -1.0),
        values=padded([one.values or [0.0] * len(one.kl) for one in completions]) if args.needs_critic else None,
        final_value=torch.tensor([one.final_value for one in completions]) if args.bootstrap_truncated else None,
        base_states=None,
    )
    sequences = pad(samples, 0, several_turns=any("c" in one.written for one in completions))
    return CreditAssignment(args, args.kl_coef, F.whiten, functions.weights)(samples, sequences, passes)


def test_a_score_is_on_the_last_token_and_the_kl_on_each():
    rollout = credit([Completion([1.0], [0.3, 0.2, 0.1], [0.2, 0.4, 0.6])], lam=0.5).rollout
    assert_close(rollout.rewards, torch.tensor([[-0.03, -0.02, 0.99]]))
    # δ = (−0.03 + 0.4 − 0.2, −0.02 + 0.6 − 0.4, 0.99 − 0.6) = (0.17, 0.18, 0.39), A_t = δ_t + 0.5·A_{t+1}
    assert_close(rollout.td_errors, torch.tensor([[0.17, 0.18, 0.39]]))
    assert_close(rollout.advantages, torch.tensor([[0.3575, 0.375, 0.39]]))
    assert_close(rollout.returns, torch.tensor([[0.5575, 0.775, 0.99]]))


def test_completions_end_where_they_end_and_not_with_the_padding():
    rows = [Completion([1.0], [0.1], [0.5]), Completion([2.0], [0.0, 0.2], [0.5, 0.5])]
    rollout = credit(rows, lam=1.0).rollout
    assert_close(rollout.rewards, torch.tensor([[0.99, 0.0], [0.0, 1.98]]))
    assert_close(rollout.advantages, torch.tensor([[0.49, 0.0], [1.48, 1.48]]))


def test_functions_are_weighted_and_token_rewards_stay_on_their_tokens():
    rows = [Completion([1.0, [0.5, 0.0, -0.25], None], [0.0, 0.0, 0.0]), Completion([1.0, 0.5, 1.0], [0.0])]
    rollout = credit(rows, weights=[1.0, 2.0, 4.0], missing_eos_penalty=0.5).rollout
    assert_close(rollout.rewards, torch.tensor([[1.0, 0.0, 0.5], [6.0, 0.0, 0.0]]))
    assert_close(rollout.scores, torch.tensor([1.5, 6.0]))


def test_the_penalty_of_a_cut_completion_is_on_its_last_token():
    rows = [Completion([1.0], [0.0, 0.0], truncated=True), Completion([1.0], [0.0, 0.0])]
    of_scores = credit(rows, missing_eos_penalty=0.5).rollout
    assert_close(of_scores.rewards, torch.tensor([[0.0, 0.5], [0.0, 1.0]]))
    assert_close(of_scores.scores, torch.tensor([0.5, 1.0]))
    by_token = [Completion([[0.5, 0.5]], [0.0, 0.0], truncated=True)]
    assert_close(credit(by_token, missing_eos_penalty=0.5).rollout.rewards, torch.tensor([[0.5, 0.0]]))


def test_a_cut_completion_ends_with_0_or_with_the_value_after_it():
    rows = [Completion([1.0], [0.0], [0.5], truncated=True, final_value=0.75)]
    rows.append(Completion([1.0], [0.0], [0.5], final_value=0.75))
    assert_close(credit(rows).rollout.advantages, torch.tensor([[0.5], [0.5]]))
    assert_close(credit(rows, bootstrap_truncated=True).rollout.advantages, torch.tensor([[1.25], [0.5]]))


def test_cut_completions_are_left_out_of_the_losses_and_keep_their_credit():
    rows = [Completion([1.0], [0.0, 0.0], truncated=True), Completion([2.0], [0.0, 0.0])]
    rollout = credit(rows, mask_truncated_completions=True).rollout
    assert rollout.loss_mask.tolist() == [[False, False], [True, True]]
    assert_close(rollout.rewards, torch.tensor([[0.0, 1.0], [0.0, 2.0]]))


def test_the_critic_learns_from_cut_completions_but_not_from_those_without_a_score():
    rows = [Completion([1.0], [0.0, 0.0], truncated=True), Completion([None], [0.0, 0.0], truncated=True)]
    assert credit(rows, mask_truncated_completions=True).rollout.fitted.tolist() == [[True, True], [False, False]]


def test_outcomes_are_all_rewards_that_follow():
    credited = credit([Completion([1.0], [0.3, 0.2, 0.1], [0.2, 0.4, 0.6])], lam=0.5, lam_critic=0.0)
    assert credited.outcomes is not None
    assert_close(credited.outcomes, torch.tensor([[0.94, 0.97, 0.99]]))


def test_explained_variance_is_of_outcomes_and_not_of_targets_with_values_in_them():
    """Each value is unrelated to the outcome; at λ = 0.95 it is most of the target."""
    unrelated = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    credited = credit([Completion([score], [0.0] * 240, [value] * 240) for score, value in unrelated], lam=0.95)
    rollout = credited.rollout
    assert rollout.values is not None
    assert rollout.returns is not None
    assert F.explained_variance(rollout.values, rollout.returns, rollout.mask) == pytest.approx(0.907, abs=1e-3)
    measured = Meter(measure_values(credited, None, torch.sum)).read()
    assert measured["value/explained_variance"] == pytest.approx(-1.0, abs=1e-4)


def test_explained_variance_by_thirds_of_each_completion():
    """Values know the outcome in the last third, nothing in the first, and the half of it in the middle."""
    values = [[0.5] * 2 + [0.25] * 2 + [0.0] * 2, [0.5] * 4 + [0.75] * 4 + [1.0] * 4]
    credited = credit([Completion([s], [0.0] * len(v), v) for s, v in zip((0.0, 1.0), values, strict=True)], lam=1.0)
    measured = Meter(measure_values(credited, None, torch.sum)).read()
    found = [measured[f"value/explained_variance_{third}"] for third in ("first", "middle", "last")]
    assert found == pytest.approx([0.0, 0.75, 1.0])


@pytest.mark.parametrize("without", [{"scores": [None, None]}, {"scores": [3.0, 1.0], "failed": True}])
def test_a_completion_without_score_counts_nowhere(without):
    rows = [Completion(kl=[0.5, 0.5], **without), Completion([1.0, 0.0], [0.0, 0.0]), Completion([3.0, 0.0], [0.0])]
    credited = credit(rows, whiten_advantages=True, lam=1.0)
    assert credited.rollout.loss_mask.tolist() == [[False, False], [True, True], [True, False]]
    assert credited.scored_tokens.tolist() == credited.rollout.loss_mask.tolist()
    # raw advantages of the counted tokens: 1, 1, 3; mean 5/3, biased variance 8/9
    third = (8 / 9) ** 0.5
    expected = torch.tensor([[0.0, 0.0], [-2 / 3 / third, -2 / 3 / third], [4 / 3 / third, 0.0]])
    assert_close(credited.rollout.advantages, expected)


def test_groups_compare_the_scored_completions_of_a_prompt():
    rows = [
        Completion([1.0], [0.0, 0.0], group=7),
        Completion([0.0], [0.0], group=7),
        Completion([5.0], [0.0], group=8),
        Completion([None], [0.0], group=8),
        Completion([2.0], [0.0], group=9),
        Completion([None], [0.0], group=9),
        Completion([4.0], [0.0], group=9),
    ]
    grpo = credit(rows, advantage_estimator="grpo", num_generations=2, kl_coef=0.0).rollout
    half = 0.5 / (0.5**0.5 + 1e-6)  # (1 − 0.5) / (s + 1e-6), s = √(0.5² + 0.5²)
    one = 1 / (2**0.5 + 1e-6)  # (4 − 3) / (s + 1e-6), s = √(1² + 1²)
    expected = [[half, half], [-half, 0.0], *[[0.0, 0.0]] * 2, [-one, 0.0], [0.0, 0.0], [one, 0.0]]
    assert_close(grpo.advantages, torch.tensor(expected))
    rloo = credit(rows, advantage_estimator="rloo", num_generations=2, kl_coef=0.0).rollout
    expected = [[1.0, 1.0], [-1.0, 0.0], *[[0.0, 0.0]] * 2, [-2.0, 0.0], [0.0, 0.0], [2.0, 0.0]]
    assert_close(rloo.advantages, torch.tensor(expected))
    assert grpo.returns is None
    assert grpo.values is None


def test_turns_are_joined_by_their_own_factors_over_the_context():
    one = Completion([1.0], [0.0] * 5, [0.1, 0.2, 9.0, 9.0, 0.4], written="ssccs")
    rollout = credit([one], kl_coef=0.0, gamma=1.0, lam=1.0, gamma_turn=0.5, lam_turn=0.5).rollout
    # δ_4 = 1 − 0.4; δ_1 = 0.5·0.4 − 0.2, A_1 = δ_1 + 0.25·A_4; δ_0 = 0.2 − 0.1, A_0 = δ_0 + A_1
    assert_close(rollout.rewards, torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]))
    assert_close(rollout.advantages, torch.tensor([[0.25, 0.15, 0.0, 0.0, 0.6]]))
    assert rollout.mask.tolist() == [[True, True, False, False, True]]


def test_a_context_at_the_end_leaves_the_score_on_the_last_sampled_token():
    rollout = credit([Completion([1.0], [0.2, 0.0, 0.0], [0.5, 7.0, 7.0], written="scc")]).rollout
    assert_close(rollout.rewards, torch.tensor([[0.98, 0.0, 0.0]]))
    assert_close(rollout.advantages, torch.tensor([[0.48, 0.0, 0.0]]))


def test_a_reward_for_a_token_of_the_context_is_refused():
    with pytest.raises(ValueError, match=r"row 0.*token 1"):
        credit([Completion([[1.0, 0.5, 0.0]], [0.0] * 3, written="scs")])


def test_the_critic_has_a_lambda_of_its_own():
    rows = [Completion([1.0], [0.0, 0.0], [0.2, 0.6])]
    rollout = credit(rows, lam=0.0, lam_critic=1.0).rollout
    assert_close(rollout.advantages, torch.tensor([[0.4, 0.4]]))  # one step: 0.6 − 0.2, 1 − 0.6
    assert_close(rollout.returns, torch.tensor([[1.0, 1.0]]))


def test_lam_adapts_to_the_length():
    """λ is 1 − 1/(0.5·4) = 0.5 and 1 − 1/(0.5·2) = 0; δ is −1 at the end, and 0 before it."""
    rows = [Completion([1.0], [0.0] * 4, [2.0] * 4), Completion([1.0], [0.0] * 2, [2.0] * 2)]
    advantages = credit(rows, kl_coef=0.0, lam_alpha=0.5).rollout.advantages
    assert_close(advantages, torch.tensor([[-0.125, -0.25, -0.5, -1.0], [0.0, -1.0, 0.0, 0.0]]))


def test_gamma_discounts_without_a_critic_as_well():
    rollout = credit([Completion([1.0], [0.0] * 3)], advantage_estimator="reinforce_plus_plus", gamma=0.5).rollout
    assert rollout.advantages.tolist() == [[0.25, 0.5, 1.0]]


GRPO = {"advantage_estimator": "grpo", "num_generations": 2, "kl_coef": 0.0}
SUM = {"multi_objective_aggregation": "normalize_then_sum", "weights": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("config", "scores", "deviations", "variance"),
    [
        ({"scale_rewards": "none"}, [[5.0, 7.0, 1.0, 9.0]], [-1, 1, -4, 4], 1),
        # Deviations from the mean of 5.5: −0.5, 1.5, −4.5, 3.5.
        ({"scale_rewards": "batch"}, [[5.0, 7.0, 1.0, 9.0]], [-1, 1, -4, 4], 35 / 3),
        ({"scale_rewards": "batch"}, [[2.0, 2.0, 2.0, 2.0]], [0, 0, 0, 0], 1),
        # Weight 1: ±1, then 0; weight 2: ±2. A single score of a function in its group counts as 0.
        (SUM, [[0.0, 1.0, 0.0, 0.0], [10.0, 30.0, 5.0, 7.0]], [-3, 3, -2, 2], 26 / 3),
        (SUM, [[None, 1.0, 0.0, 0.0], [10.0, 30.0, 5.0, 7.0]], [-2, 2, -2, 2], 16 / 3),
    ],
)
def test_groups_are_divided_by_the_unbiased_deviation_that_is_asked_for(config, scores, deviations, variance):
    """Of the whole rollout, or not at all; by default, of the group."""
    rows = [Completion(list(of_row), [0.0], group=i // 2) for i, of_row in enumerate(zip(*scores, strict=True))]
    advantages = credit(rows, **GRPO, **config).rollout.advantages[:, 0]
    assert_close(advantages, torch.tensor(deviations) / math.sqrt(variance), rtol=1e-4, atol=0)


def own_with_values(rewards, values, mask, gamma, lam, final_value):
    """Each token's advantage is what it earns, its return one more."""
    return rewards.where(mask, 0.0), (rewards + 1).where(mask, 0.0)


def own_with_groups(rewards, mask, groups):
    return groups[:, None].float().where(mask, 0.0)


def own_with_rewards(rewards, mask, gamma):
    return (gamma * rewards).where(mask, 0.0)


@pytest.mark.parametrize(
    ("own", "advantages", "returns"),
    [
        (own_with_values, [[0.0, 3.0], [3.0, 0.0]], [[1.0, 4.0], [4.0, 0.0]]),
        (own_with_groups, [[7.0, 7.0], [7.0, 0.0]], None),
        (own_with_rewards, [[0.0, 1.5], [1.5, 0.0]], None),
    ],
)
def test_an_estimator_of_a_users_own_gets_what_it_asks_for(monkeypatch, own, advantages, returns):
    monkeypatch.setitem(F.ADVANTAGE_ESTIMATORS, "own", own)
    rows = [Completion([3.0], [0.0, 0.0], group=7), Completion([3.0], [0.0], group=7)]
    rollout = credit(rows, advantage_estimator="own", num_generations=2, gamma=0.5).rollout
    assert rollout.advantages.tolist() == advantages
    assert (None if rollout.returns is None else rollout.returns.tolist()) == returns
    assert (rollout.values is None) == (returns is None)


def test_an_estimator_of_a_users_own_that_compares_needs_several_completions(monkeypatch):
    monkeypatch.setitem(F.ADVANTAGE_ESTIMATORS, "own", own_with_groups)
    with pytest.raises(ValueError, match="advantage_estimator='own' compares completions of one prompt"):
        credit([Completion([1.0], [0.0])], advantage_estimator="own")
