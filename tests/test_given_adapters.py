"""A PeftModel given as the model trains as the policy it was, or is refused."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from helpers.tiny import lora, tiny_model

IDS = torch.arange(2, 8)[None]


def shake(model: PeftModel, seed: int = 1) -> PeftModel:
    """Give every adapter that does nothing yet an effect."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name and not weight.any():
                weight.normal_(0, 0.1)
    return model


def given(dtype: torch.dtype = torch.float32, **config) -> PeftModel:
    return shake(get_peft_model(tiny_model().to(dtype), lora(**config), adapter_name="sft"))


def with_second(**config) -> PeftModel:
    model = given()
    model.add_adapter("other", lora(r=2, **config))
    return shake(model, 2)


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS))[0][0].log_softmax(-1)


def set_scale(model: PeftModel) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_scale("sft", 0.5)


def mix(model: PeftModel) -> None:
    model.add_weighted_adapter(["sft", "other"], [0.7, 0.3], "mix", combination_type="cat")
    model.set_adapter("mix")


CARRIED = {
    "merged": (given, lambda model: model.merge_adapter()),
    "DoRA, merged": (lambda: given(use_dora=True), lambda model: model.merge_adapter()),
    "merged in part": (given, lambda model: next(x for x in model.modules() if hasattr(x, "merge")).merge()),
    "a trained module": (lambda: given(modules_to_save=["lm_head"]), lambda model: None),
    "the second is active": (with_second, lambda model: model.set_adapter("other")),
    "mixed": (with_second, mix),
}
REFUSED = {
    "two are active": (with_second, lambda model: model.base_model.set_adapter(["sft", "other"])),
    "scaled": (given, set_scale),
    "another is merged": (with_second, lambda model: model.merge_adapter(["sft", "other"])),
    "changed configuration": (given, lambda model: setattr(model.peft_config["sft"], "lora_alpha", 1)),
    "merged in half precision": (lambda: given(torch.bfloat16), lambda model: model.merge_adapter()),
    "a hook": (given, lambda model: model.base_model.register_forward_pre_hook(lambda *_: set_scale(model))),
}


@pytest.mark.parametrize("name", CARRIED)
def test_the_policy_the_reference_and_the_saved_adapter_are_the_owners(make_trainer, name):
    make, change = CARRIED[name]
    model = make()
    base = logprobs(tiny_model().to(model.dtype))
    change(model)
    policy = logprobs(model)
    trainer = make_trainer(model=model, peft_config=None)
    assert torch.allclose(logprobs(trainer.model), policy, atol=1e-5)
    with trainer.model.disable_adapter():
        assert torch.allclose(logprobs(trainer.model), base, atol=1e-5)
    trainer.save_model()
    plain = PeftModel.from_pretrained(tiny_model().to(model.dtype), trainer.args.output_dir)
    assert torch.allclose(logprobs(plain), policy, atol=1e-5)


def test_a_disabled_adapter_trains_as_if_it_were_enabled(make_trainer):
    model = given()
    policy = logprobs(model)
    model.base_model.disable_adapter_layers()
    assert torch.equal(logprobs(make_trainer(model=model, peft_config=None).model), policy)


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_adapter_cannot_give_is_refused(make_trainer, name):
    make, change = REFUSED[name]
    model = make()
    change(model)
    with pytest.raises(ValueError, match=r"model is a PeftModel .* add_weighted_adapter"):
        make_trainer(model=model, peft_config=None)
