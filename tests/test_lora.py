"""The fused LoRA layer computes what PEFT's does, and leaves to PEFT what it does not know."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.testing import assert_close

from hfppo.models.lora import FusedLoraLinear, FusedProduct, fuse_lora
from hfppo.models.merging import MergedWeights


def adapted(dtype=torch.float32, bias=True, **fields) -> nn.Module:
    """Two linear layers, the first with an adapter whose B is not zero."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Linear(8, 4)).to(dtype)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["0"], **fields)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model


def pair(**fields) -> tuple[nn.Module, nn.Module]:
    """PEFT's model, and a copy of it with fused layers."""
    plain = adapted(**fields)
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    return plain, fused


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients, of the input as well."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.fixture
def fused_calls(monkeypatch):
    """The calls of the fused product."""
    calls = []
    apply = FusedProduct.apply
    monkeypatch.setattr(FusedProduct, "apply", lambda *args: calls.append(args) or apply(*args))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (1, 1, 6)])
@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}, {"dtype": torch.float64}])
def test_output_and_gradients_are_those_of_peft(bias, shape, fields, fused_calls):
    """Exactly so in float64; in float32 each processor's products round in their own way."""
    dtype = fields.get("dtype", torch.float32)
    close = dict.fromkeys(("rtol", "atol"), 1e-12 if dtype == torch.float64 else 1e-4)
    plain, fused = pair(bias=bias, **fields)
    x = torch.randn(shape, dtype=dtype)
    expected, got = results(plain, x), results(fused, x)
    assert len(fused_calls) == 1
    assert len(expected) == 4
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, **close)
    fused.zero_grad()
    MergedWeights([fused.base_model.model[0]]).refresh()
    for a, b in zip(results(fused, x), expected, strict=True):
        assert_close(a, b, **close)
    assert fused_calls[-1][-1] is fused.base_model.model[0].merged_weight is not None
    with torch.no_grad():
        fused.base_model.model[0].lora_B["default"].weight.zero_()  # the sum was made before
        assert_close(fused(x), expected[0], **close)


def test_gradients_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, trained=True):
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=trained)

    weight, bias = tensor(6, 4, trained=False), tensor(6, trained=False)
    product = lambda x, down, up: FusedProduct.apply(x, weight, bias, down, up, 1.7)  # noqa: E731
    assert torch.autograd.gradcheck(product, (tensor(5, 4), tensor(3, 4), tensor(6, 3)))


@pytest.mark.parametrize("wanted", [True, False])
def test_the_inputs_gradient_is_computed_where_it_is_wanted(wanted):
    saved = (torch.ones(5, 6), torch.ones(5, 3), torch.ones(8, 6), torch.ones(3, 6), torch.ones(8, 3))
    wants = (wanted, False, False, True, True, False, False)
    ctx = SimpleNamespace(saved_tensors=saved, scale=1.0, is_merged=False, needs_input_grad=wants)
    of_x, *_ = FusedProduct.backward(ctx, torch.ones(5, 8))
    assert (of_x is not None) == wanted


def test_no_rows_at_all():
    _, fused = pair()
    assert fused(torch.zeros(0, 6)).shape == (0, 4)


@pytest.mark.parametrize(
    "fields",
    [{"use_dora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}],
    ids=lambda fields: next(iter(fields)),
)
def test_other_adapters_take_the_way_of_peft(fields, fused_calls):
    plain, fused = pair(**fields)
    torch.manual_seed(1)
    expected = results(plain, x := torch.randn(5, 6))
    torch.manual_seed(1)
    got = results(fused, torch.randn(5, 6).copy_(x))
    assert not fused_calls
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, rtol=0, atol=0)


def test_disabled_merged_and_several_adapters_take_the_way_of_peft(fused_calls):
    plain, fused = pair()
    x = torch.randn(5, 6)
    for model in (plain, fused):
        model.add_adapter("other", LoraConfig(r=2, target_modules=["0"], init_lora_weights=True))
    with plain.disable_adapter(), fused.disable_adapter():
        assert_close(fused(x), plain(x), rtol=0, atol=0)
    for model in (plain, fused):
        model.base_model.set_adapter(["default", "other"])
    assert_close(fused(x), plain(x), rtol=0, atol=0)
    for model in (plain, fused):
        model.set_adapter("default")
        model.merge_adapter()
    assert_close(fused(x), plain(x), rtol=0, atol=0)
    assert not fused_calls


def test_under_autocast_peft_casts(fused_calls):
    plain, fused = pair()
    x = torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(fused(x), plain(x), rtol=0, atol=0)
    assert not fused_calls


class Quantised(nn.Linear):
    """A linear layer whose weight is not to be read, as those of bitsandbytes."""


@pytest.mark.parametrize("change", ["train", "quantise", "offload", "nothing"])
def test_only_frozen_plain_layers_are_fused(change):
    model = adapted()
    layer = model.base_model.model[0]
    if change == "train":
        layer.base_layer.weight.requires_grad_()
    elif change == "quantise":
        layer.base_layer.__class__ = Quantised
    elif change == "offload":
        add_hook_to_module(layer.base_layer, ModelHook())
    names = list(model.state_dict())
    fuse_lora(model)
    assert type(layer) is (FusedLoraLinear if change == "nothing" else LoraLinear)
    assert list(model.state_dict()) == names


def test_without_gradient_the_output_is_the_same_to_the_bit():
    _, fused = pair()
    x = torch.randn(5, 6)
    with torch.no_grad():
        quiet = fused(x)
    assert_close(fused(x).detach(), quiet, rtol=0, atol=0)
