"""The loss of a micro-batch and its metrics: every field reaches them, and they are what the formulas say."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from hfppo import functional as F
from hfppo.learn.loss import LossTerm, measure_update, ppo_loss, ppo_terms
from hfppo.learn.micro_batches import Counts, MiniBatchSize
from hfppo.metrics import Meter
from hfppo.models.actor_critic import TokenOutputs
from hfppo.rollout import Rollout


def clip_of(args) -> F.Clip:
    return F.Clip(args.cliprange, args.clip_high, args.dual_clip)


SIZE = MiniBatchSize(Counts(10.0, 4.0), Counts(10.0, 4.0))


@pytest.fixture
def batch() -> Rollout:
    """Two completions whose first and last tokens are real but do not count."""
    torch.manual_seed(0)
    mask = torch.ones(2, 60, dtype=torch.bool)
    ids = torch.zeros(2, 60, dtype=torch.int64)
    numbers = ("rollout_logprobs", "old_logprobs", "rewards", "advantages", "ref_logprobs", "values", "returns")
    return Rollout(
        prompt_ids=ids,
        prompt_mask=mask,
        completion_ids=ids,
        mask=mask,
        loss_mask=mask & (torch.arange(60) > 0) & (torch.arange(60) < torch.tensor([[58], [40]])),
        truncated=torch.tensor([False, True]),
        scores=torch.tensor([1.0, 0.9]),
        weights=torch.rand(2, 60),
        **{name: torch.randn(2, 60) for name in numbers},
    )


@pytest.fixture
def outputs() -> TokenOutputs:
    torch.manual_seed(1)
    return TokenOutputs(*(torch.randn(2, 60, requires_grad=True) for _ in range(3)))


CLIP = {"cliprange": 0.1, "cliprange_high": 0.6, "dual_clip": 1.5}
GIVEN = F.Clip(0.1, 0.6, 1.5)
KL = {"kl_loss_coef": 0.2}
# Fields, the term's name and weight, and its formula of outputs and batch.
TERMS = {
    "clip": (
        CLIP,
        ("policy/loss", 1.0),
        lambda o, b: b.weights * F.policy_loss(o.logprobs, b.old_logprobs, b.advantages, GIVEN),
    ),
    "gspo": (
        CLIP | {"policy_loss": "gspo"},
        ("policy/loss", 1.0),
        lambda o, b: b.weights * F.gspo_loss(o.logprobs, b.old_logprobs, b.advantages, b.loss_mask, GIVEN),
    ),
    "value": ({"vf_coef": 0.3}, ("value/loss", 0.3), lambda o, b: F.value_loss(o.values, b.returns)),
    "bce": (
        {"value_range": [-9.0, 9.0], "value_loss": "bce", "kl_coef": 0.0},
        ("value/loss", 0.1),
        lambda o, b: F.bce_value_loss(o.value_logits, b.returns, F.ValueRange(-9.0, 9.0)),
    ),
    **{
        name: (
            KL | {"kl_estimator": name},
            ("policy/kl_loss", 0.2),
            lambda o, b, name=name: F.token_kl(o.logprobs, b.ref_logprobs, name),
        )
        for name in ("abs", "abs+")
    },
    "entropy": ({"entropy_coef": 0.02}, ("policy/entropy", -0.02), lambda o, b: o.entropy),
}


@pytest.mark.parametrize("name", TERMS)
def test_every_field_of_a_loss_reaches_it(make_trainer, batch, outputs, name):
    config, (term, weight), formula = TERMS[name]
    args = make_trainer(config).args
    if name == "bce":
        outputs = outputs._replace(values=outputs.values.sigmoid(), value_logits=outputs.values)
    (found,) = (x for x in ppo_terms(outputs, batch, args, clip_of(args)) if x.name == term)
    expected = formula(outputs, batch)
    assert found.coef == weight
    assert_close(found.per_token, expected)
    grads = (torch.autograd.grad(x.sum(), outputs[:3], materialize_grads=True) for x in (found.per_token, expected))
    for by, wanted in zip(*grads, strict=True):
        assert torch.equal(by, wanted)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"loss_reduction": "token-mean"}, lambda x, m: (x * m).sum() / 10),
        ({"loss_reduction": "seq-mean-token-sum"}, lambda x, m: (x * m).sum() / 4),
        ({"loss_reduction": "seq-mean-token-mean"}, lambda x, m: (x * m / m.sum(dim=1, keepdim=True)).sum() / 4),
        ({"loss_reduction": "seq-mean-token-sum-norm", "max_completion_length": 9}, lambda x, m: (x * m).sum() / 36),
    ],
)
def test_a_loss_is_its_terms_by_weight(make_trainer, batch, outputs, config, expected):
    args = make_trainer({**config, "entropy_coef": 0.02}).args
    terms = ppo_terms(outputs, batch, args, clip_of(args))
    *others, entropy = terms
    whole = sum(term.coef * expected(term.per_token, batch.loss_mask) for term in others)
    whole -= 0.02 * (entropy.per_token * batch.loss_mask).sum() / 10  # a token mean with every reduction, as in TRL
    assert_close(ppo_loss(terms, batch, SIZE, args, critic_only=False), whole)
    (of_critic,) = (term for term in terms if term.name == "value/loss")
    value = expected(of_critic.per_token, batch.loss_mask) * args.vf_coef
    assert_close(ppo_loss(terms, batch, SIZE, args, critic_only=True), value)


def measure(outputs, batch, args) -> Meter:
    clip = clip_of(args)
    return Meter(measure_update(ppo_terms(outputs, batch, args, clip), outputs, batch, args, clip, first=True))


def assert_measured(meter: Meter, expected: dict) -> None:
    read = meter.read()
    assert {n: read[n] for n in expected} == pytest.approx({n: float(x) for n, x in expected.items()}, rel=1e-5)


def test_metrics_of_an_update_by_hand(make_trainer, batch, outputs):
    args = make_trainer(CLIP).args
    counts = batch.loss_mask
    new, old, advantages = (x[counts].detach() for x in (outputs.logprobs, batch.old_logprobs, batch.advantages))
    ratio = (new - old).exp()
    low, high = (advantages < 0) & (ratio < 0.9), (advantages > 0) & (ratio > 1.6)
    dual = (advantages < 0) & (ratio > 1.5)
    assert all(clipped.any() for clipped in (low, high, dual))
    expected = {
        "policy/ratio": ratio.mean(),
        "policy/ratio_max": ratio.max(),
        "policy/first_ratio_deviation": (ratio - 1).abs().max(),
        "policy/first_ratio_deviation_mean": (ratio - 1).abs().mean(),
        "policy/approx_kl": (ratio - 1 - ratio.log()).mean(),
        "policy/clip_frac": (low | high).float().mean(),
        "policy/clip_frac_low": low.float().mean(),
        "policy/clip_frac_high": high.float().mean(),
        "policy/dual_clip_frac": dual.float().mean(),
        "policy/entropy": outputs.entropy[counts].mean(),
    }
    assert_measured(measure(outputs, batch, args), expected)


def test_clip_metrics_of_dppo_count_by_probability(make_trainer, batch, outputs):
    args = make_trainer({"policy_loss": "dppo", "cliprange": 0.1, "cliprange_high": 0.3}).args
    counts = batch.loss_mask
    new, old, advantages = (x[counts].detach() for x in (outputs.logprobs, batch.old_logprobs, batch.advantages))
    low, high = (advantages < 0) & (new.exp() < old.exp() - 0.1), (advantages > 0) & (new.exp() > old.exp() + 0.3)
    assert 0 < low.float().mean() != high.float().mean() > 0
    shares = {"frac_low": low, "frac_high": high, "frac": low | high}
    expected = {f"policy/clip_{name}": clipped.float().mean() for name, clipped in shares.items()}
    assert_measured(measure(outputs, batch, args), expected)


def test_a_ratio_below_one_deviates_as_well(make_trainer, batch, outputs):
    args = make_trainer().args
    batch = replace(batch, old_logprobs=outputs.logprobs.detach() + 0.5)
    assert_measured(measure(outputs, batch, args), {"policy/first_ratio_deviation": 1 - math.exp(-0.5)})


@pytest.mark.parametrize("coef", [1.0, 0.0])
@pytest.mark.parametrize("shape", [(), (2,), (2, 59), (2, 60, 1), None], ids=str)
def test_a_term_that_is_not_per_token_is_named_with_its_shape(outputs, batch, shape, coef):
    term = LossTerm("pull", coef, 0.5 if shape is None else torch.ones(shape))
    wanted = f"the loss term 'pull' has per_token of shape {shape or ()}; give a number per completion token, (2, 60),"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        ppo_loss([term], batch, SIZE, args=None, critic_only=False)


def test_terms_that_were_not_returned_are_named(batch):
    with pytest.raises(TypeError, match="loss_terms returned None"):
        ppo_loss(None, batch, SIZE, args=None, critic_only=False)
