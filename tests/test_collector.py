"""From scores to advantages in the trainer: every field reaches them."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from helpers.runs import assert_same_run, count_digits
from helpers.scripted import PROMPTS, Off, Scripted, always, answering, first_rollout, training_rows
from helpers.tiny import other_tokenizer, ragged_model, scorer, tiny_model
from hfppo import PPOConfig
from hfppo import functional as F
from hfppo.rewards.model import RewardModel


def with_values(trainer, value: float):
    """With a critic that gives every state this value."""
    torch.nn.init.constant_(trainer.model.critic.value_head.bias, value)
    return trainer


def test_bootstrapping_and_the_critics_own_lam(make_trainer):
    config = {"kl_coef": 0.0, "gamma": 0.9, "lam": 0.5, "lam_critic": 0.8, "bootstrap_truncated": True}
    config["max_completion_length"] = 3
    trainer = with_values(answering(make_trainer(config, reward_funcs=always(1.0, 1.0)), "12.", "123"), 2.0)
    rollout = trainer.rollout(["1=", "2="])
    assert rollout.truncated.tolist() == [False, True]
    final = torch.tensor([0.0, 2.0])  # the first has ended
    given = rollout.rewards, rollout.values, rollout.mask, 0.9
    assert_close(rollout.advantages, F.gae(*given, 0.5, final)[0])
    assert_close(rollout.returns, F.gae(*given, 0.8, final)[1])
    ended, cut = rollout.td_errors.tolist()  # V is 2: 0.9 · 2 − 2 = −0.2 within, 1 − 2 = −1 at the end, 0.8 if cut
    assert (ended, cut) == (pytest.approx([-0.2, -0.2, -1.0]), pytest.approx([-0.2, -0.2, 0.8]))


def own_with_values(rewards, values, mask, gamma, lam, final_value):
    """Each token's advantage is what it earns, its return one more."""
    return rewards.where(mask, 0.0), (rewards + 1).where(mask, 0.0)


def own_with_groups(rewards, mask, groups):
    return groups[:, None].float().where(mask, 0.0)


def own_with_rewards(rewards, mask, gamma):
    return (gamma * rewards).where(mask, 0.0)


@pytest.mark.parametrize("own", [own_with_values, own_with_groups, own_with_rewards])
def test_an_estimator_of_a_users_own_gets_what_it_asks_for(make_trainer, monkeypatch, own):
    monkeypatch.setitem(F.ADVANTAGE_ESTIMATORS, "own", own)
    config = {"advantage_estimator": "own", "num_generations": 2, "gamma": 0.5, "whiten_advantages": False}
    trainer = make_trainer({**config, "max_steps": 1}, reward_funcs=lambda completions, **_: [3.0] * len(completions))
    rollout = first_rollout(trainer)
    group = torch.arange(len(rollout)) // 2
    expected = {
        own_with_values: rollout.rewards,
        own_with_groups: group[:, None].expand_as(rollout.rewards).float(),
        own_with_rewards: 0.5 * rollout.rewards,
    }
    assert rollout.rewards.abs().sum() > 0
    assert_close(rollout.advantages, expected[own].where(rollout.mask, 0.0))
    assert (trainer.model.critic is not None) == (own is own_with_values)
    if own is own_with_values:
        assert_close(rollout.returns, (rollout.rewards + 1).where(rollout.mask, 0.0))


def test_an_estimator_of_a_users_own_that_compares_needs_several_completions(monkeypatch, tmp_path):
    monkeypatch.setitem(F.ADVANTAGE_ESTIMATORS, "own", own_with_groups)
    with pytest.raises(ValueError, match="advantage_estimator='own' compares completions of one prompt"):
        PPOConfig(output_dir=str(tmp_path), advantage_estimator="own")


def test_lam_that_adapts_to_the_length(make_trainer):
    trainer = with_values(make_trainer({"kl_coef": 0.0, "lam_alpha": 0.5}, model=tiny_model(seed=1)), 2.0)
    rollout = trainer.rollout(PROMPTS)
    lam = 1 - 1 / (0.5 * rollout.mask.sum(dim=1))
    assert_close(rollout.advantages, F.gae(rollout.rewards, rollout.values, rollout.mask, 1.0, lam.clamp(min=0))[0])


def test_gamma_discounts_without_a_critic_as_well(make_trainer):
    config = {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.5, "kl_coef": 0.0}
    rollout = answering(make_trainer(config, reward_funcs=always(1.0)), "12.").rollout(["1="])
    assert rollout.advantages.tolist() == [[0.25, 0.5, 1.0]]


def test_groups_are_divided_by_their_deviation_unless_told_not_to(make_trainer):
    for scale, expected in (("group", 1 / (math.sqrt(2.0))), ("none", 1.0)):
        config = {"advantage_estimator": "grpo", "num_generations": 2, "kl_coef": 0.0, "scale_rewards": scale}
        trainer = answering(make_trainer(config, reward_funcs=always(5.0, 7.0)), "12.")
        assert trainer.rollout(["1=", "1="]).advantages[1].tolist() == pytest.approx([expected] * 3, rel=1e-5)


def grpo_of_four(make_trainer, *scores, **config):
    """The first token's advantages of two groups of two completions."""
    config = {"advantage_estimator": "grpo", "num_generations": 2, "kl_coef": 0.0, "num_mini_batches": 1, **config}
    trainer = answering(make_trainer(config, reward_funcs=[always(*column) for column in scores]), "1.", "123.")
    return first_rollout(trainer).advantages[:, 0].tolist()


def test_advantages_can_be_divided_by_the_deviation_of_the_rollout(make_trainer):
    """Deviations from the mean of 5.5: −0.5, 1.5, −4.5, 3.5; unbiased variance 35/3."""
    found = grpo_of_four(make_trainer, [5.0, 7.0, 1.0, 9.0], scale_rewards="batch")
    assert found == pytest.approx([x / math.sqrt(35 / 3) for x in (-1, 1, -4, 4)])
    assert grpo_of_four(make_trainer, [2.0] * 4, scale_rewards="batch") == [0.0] * 4


@pytest.mark.parametrize(
    ("first", "sums", "variance"),
    [
        ([0.0, 1.0, 0.0, 0.0], [-3, 3, -2, 2], 26 / 3),  # weight 1: ±1, then 0; weight 2: ±2
        ([None, 1.0, 0.0, 0.0], [-2, 2, -2, 2], 16 / 3),  # a single score of a function in its group counts as 0
    ],
)
def test_each_functions_scores_can_be_normalized_before_their_sum(make_trainer, first, sums, variance):
    config = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 2.0]}
    found = grpo_of_four(make_trainer, first, [10.0, 30.0, 5.0, 7.0], **config)
    assert found == pytest.approx([x / math.sqrt(variance) for x in sums], rel=1e-4)


def test_rewards_are_whitened_over_what_is_scored_and_keep_their_mean(make_trainer):
    """0, 0, 5, 0, 0, 7: mean 2, variance 74/6 − 4."""
    config = {"per_device_train_batch_size": 4, "num_mini_batches": 1, "kl_coef": 0.0, "whiten_rewards": True}
    trainer = answering(make_trainer(config, reward_funcs=always(5.0, None, 7.0, None)), "12.")
    scores = torch.tensor([[0.0, 0.0, 5.0], [0.0, 0.0, 7.0]])
    assert_close(first_rollout(trainer).rewards[::2], (scores - 2) / math.sqrt(74 / 6 - 4) + 2)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k3"])
def test_the_penalty_is_that_of_the_estimator_and_of_beta_as_it_is_now(make_trainer, estimator):
    given = {"ref_model": tiny_model(seed=7), "reward_funcs": always(*[0.0] * 4)}
    trainer = make_trainer({"kl_estimator": estimator, "kl_coef": 0.1}, **given)
    trainer.ppo_state.kl_coef = 0.3  # as AdaptiveKLCallback leaves it
    rollout = trainer.rollout(PROMPTS)
    kl = F.token_kl(rollout.old_logprobs, rollout.ref_logprobs, estimator).where(rollout.mask, 0.0)
    assert kl.abs().max() > 0.1
    assert_close(rollout.rewards, -0.3 * kl)


def test_the_phases_of_a_rollout(make_trainer):
    phases = []

    class Noting(Scripted):
        @contextmanager
        def ready(self):
            phases.append("ready")
            yield

        def __call__(self, *args):
            phases.append("sampler")
            return super().__call__(*args)

    trainer = make_trainer()
    collector = replace(trainer.collector, sampler=Noting("12."))
    rows = training_rows(collector, trainer._train_prompts, 0)
    collector.collect(rows, trainer.ppo_state, trainer.state, show=lambda name: nullcontext(phases.append(name)))
    sampling = ["time/generation", "ready", "sampler"]
    assert phases == ["time/rollout", *sampling, "time/rewards", "time/rollout", "time/passes", "time/rewards"]


def test_a_look_compares_a_completion_with_no_other(make_trainer):
    """Neither rewards nor advantages are whitened: they would say how its neighbours fared."""
    trainer = make_trainer({"whiten_rewards": True, "kl_coef": 0.0, "lam": 1.0}, reward_funcs=always(1.0, 5.0))
    rollout = trainer.rollout(PROMPTS[:2])
    assert rollout.rewards.sum(dim=1).tolist() == [1.0, 5.0]
    assert_close(rollout.advantages, (rollout.returns - rollout.values).where(rollout.mask, 0.0))


class OffBothWays(Off):
    """The first token is three times as likely for the training model as for the sampler, the second the reverse."""

    def __call__(self, *args):
        off = [(turn, [*turn.logprobs]) for turn in super().__call__(*args)]
        for _, logprobs in off:
            logprobs[1:2] = [x + math.log(3.0) for x in logprobs[1:2]]
        return [replace(turn, logprobs=logprobs) for turn, logprobs in off]


@pytest.mark.parametrize("mode", F.MISMATCH_MODES)
def test_weights_of_another_sampler_are_those_that_are_asked_for(make_trainer, mode):
    wanted = {"policy_mode": mode, "vllm_importance_sampling_clip_max": 2.9}
    trainer = make_trainer({"kl_coef": 0.0, **wanted}, model=ragged_model())
    trainer.collector = replace(trainer.collector, sampler=OffBothWays(trainer.collector.sampler))
    rollout = trainer.rollout(PROMPTS)
    given = rollout.old_logprobs, rollout.rollout_logprobs, rollout.mask, mode
    weights, kept = F.importance_weights(*given, 2.9)
    assert_close(rollout.weights, weights)
    assert torch.equal(rollout.loss_mask, kept)
    if mode == "token_truncate":
        assert not torch.equal(weights, F.importance_weights(*given)[0])  # the default limit is another


def test_tokens_per_second(make_trainer, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("hfppo.collect.collector.time.perf_counter", lambda: float(next(clock)))
    trainer = make_trainer({"max_steps": 1})
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["time/tokens_per_second"] * log["time/generation"] == pytest.approx(8 * log["completions/mean_length"])


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Tensors made of Python floats have this dtype unless they name one."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "config",
    [{"policy_loss": "sapo"}, {"missing_eos_penalty": 0.7, "whiten_rewards": True}],
    ids=["sapo", "penalized and whitened"],
)
def test_the_default_dtype_changes_nothing(make_trainer, config, dtype):
    def by_token(completion_ids, **kwargs):
        return [[1002.99 + i / 3 for i in range(len(ids))] for ids in completion_ids]

    funcs = [count_digits, by_token, RewardModel(scorer(), other_tokenizer("left", "<end>"))]
    trainers = [make_trainer({**config, "max_steps": 2}, reward_funcs=funcs) for _ in range(2)]
    rollouts = []
    for trainer, used in zip(trainers, (torch.float32, dtype), strict=True):
        with default_dtype(used):
            rollouts.append(trainer.rollout(PROMPTS).stored_tensors())
            trainer.train()
    expected, got = rollouts
    assert expected.keys() == got.keys()
    for name in expected:
        assert_close(got[name], expected[name], rtol=0, atol=0, msg=name)
    assert_same_run(*trainers)
