"""Each illness in a run that has it, and none in the recipe that is well."""

import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import arithmetic
import pytest
import torch
from conftest import count_digits, tiny_model

from hfppo import HealthWarning

HEALTH = Path(arithmetic.__file__).parents[1] / "docs/health.md"
ONE_STEP = {"num_mini_batches": 1, "num_ppo_epochs": 1, "per_device_train_batch_size": 8}  # per rollout


def warned(train) -> dict[str, str]:
    """What a run warns of, by the section of the docs; each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    messages = [str(w.message) for w in caught if issubclass(w.category, HealthWarning)]
    by_anchor = {message.rsplit("#", 1)[1]: message for message in messages}
    assert len(by_anchor) == len(messages), messages
    return by_anchor


def constant(completions, **kwargs) -> list[float]:
    return [0.1] * len(completions)


def noise(completions, trainer_state, **kwargs) -> list[float]:
    """Nothing that a policy could learn."""
    draw = random.Random(trainer_state.global_step)
    return [draw.random() for _ in completions]


def length(completion_ids, **kwargs) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def unreadable(completions, **kwargs) -> list[None]:
    return [None] * len(completions)


def thousandfold(completions, **kwargs) -> list[float]:
    return [1000.0 * score for score in count_digits(completions)]


def by_prompt(prompts, **kwargs) -> list[float]:
    """Some prompts are right whatever is said, and some wrong."""
    return [float(random.Random(prompt).random() > 0.5) for prompt in prompts]


def variety(prediction) -> dict[str, float]:
    """What the digits were to stand for: answers that do not repeat themselves."""
    return {"variety": sum(len(set(text)) / max(len(text), 1) for text in prediction.predictions)}


def noisy(trainer) -> None:
    """A layer that drops out in every mode, as a base with dropout in code of its own would."""
    layer = trainer.model.causal_lm.model.layers[0].mlp
    layer.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.3, training=True))


def stale(trainer) -> None:
    """A sampler that never gets the adapter."""
    sampler = trainer.collector.sampler
    sample = sampler._sample

    def from_the_base(*args):
        with trainer.model.disable_adapter():
            return sample(*args)

    sampler._sample = from_the_base


def brief_model():
    """A tiny model that ends its completions early."""
    model = tiny_model()
    model.lm_head.weight.data[1] *= 3
    return model


@dataclass(frozen=True)
class Ill:
    """A run with an illness: how it is made, the sections that its warnings point to, and words of the first."""

    anchors: tuple[str, ...]
    words: tuple[str, ...]
    config: dict = field(default_factory=dict)
    kwargs: dict = field(default_factory=dict)
    spoil: object = None


RUNS = {
    "learning rate × 100": Ill(
        ("clip-fraction", "approximate-kl"), ("policy/clip_frac is", "learning_rate (now 1.0)"), {"learning_rate": 1.0}
    ),
    "target_kl passed by single steps": Ill(
        ("approximate-kl",), ("above 0.001,", "target_kl (now 0.001)"), {"target_kl": 1e-3, "max_steps": 12}
    ),
    "dropout": Ill(("first-ratio", "sampler-mismatch"), ("policy/first_ratio_deviation is", "dropout"), spoil=noisy),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_ill_run_is_told_what_ails_it(make_trainer, dataset, name):
    ill = RUNS[name]
    kwargs = ill.kwargs | ({"eval_dataset": dataset} if "eval_steps" in ill.config else {})
    trainer = make_trainer(ill.config, **kwargs)
    if ill.spoil:
        ill.spoil(trainer)
    told = warned(trainer.train)
    assert set(ill.anchors) <= told.keys()
