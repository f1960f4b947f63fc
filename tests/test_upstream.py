"""Facts about transformers and PEFT that the package rests on; a failure here says what has moved."""

import inspect

import pytest
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from helpers.tiny import tiny_model
from hfppo import PPOTrainer

PRIVATE_HOOKS = {
    "_clip_grad_norm": ["self", "model"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_get_output_dir": ["self", "trial"],
}


CALLED = {"_finish_current_push": ["self"], "_save": ["self", "output_dir", "state_dict"]}  # private, too


@pytest.mark.parametrize(("name", "parameters"), [*PRIVATE_HOOKS.items(), *CALLED.items()])
def test_private_hooks_of_trainer_are_as_we_know_them(name, parameters):
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == parameters


def test_only_these_private_hooks_are_overridden():
    overridden = {
        name
        for owner in PPOTrainer.__mro__[: PPOTrainer.__mro__.index(Trainer)]
        for name in vars(owner)
        if name.startswith("_") and not name.startswith("__") and hasattr(Trainer, name)
    }
    assert overridden == set(PRIVATE_HOOKS)


def test_peft_keeps_the_names_of_tied_modules_in_the_configuration():
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    get_peft_model(tiny_model(tie_word_embeddings=True), config)
    assert set(config.modules_to_tie) == {"lm_head"}
    assert config.target_modules_to_tie is None


def test_two_classes_of_ours_override_each_method_once():
    own = PPOTrainer.__mro__[: PPOTrainer.__mro__.index(Trainer)]
    assert [owner.__name__ for owner in own] == ["PPOTrainer", "CrashSafeTrainer"]
    overridden = [
        name for owner in own for name, x in vars(owner).items() if inspect.isfunction(x) and hasattr(Trainer, name)
    ]
    repeated = {name for name in overridden if overridden.count(name) > 1}
    assert repeated <= {"__init__"}
    assert len(set(overridden) - {"__init__"}) <= 18
