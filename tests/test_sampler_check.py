"""The start-up check of the model's own sampler: padding, and key-values that are used again."""

from functools import partial

import pytest
import torch

from helpers.tiny import tiny_gpt2, tiny_model, tiny_of_type, tiny_opt, tiny_qwen3, tiny_vision_model
from hfppo.generation.generate import TransformersSampler
from hfppo.generation.key_values import CACHE
from hfppo.generation.sampler import Sampling
from hfppo.generation.sampler_check import check_sampler
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.loading import default_peft_config

RIGHT = {
    **{"llama": tiny_model, "gpt2": tiny_gpt2, "qwen3": tiny_qwen3, "opt": tiny_opt},
    "llama in bfloat16": lambda: tiny_model().bfloat16(),
    **{name: partial(tiny_of_type, name) for name in ("mamba", "falcon_h1", "llama4_text", "falcon", "bloom")},
    "minimax without linear attention": lambda: tiny_of_type("minimax", layer_types=["full_attention"] * 2),
}


def sampler_of(base, batch_size=64) -> TransformersSampler:
    model = ActorCritic(base, default_peft_config(), critic=None)
    return TransformersSampler(model, Sampling(1.0, 8, [1], 0), batch_size)


def checked(base, batch_size=64) -> TransformersSampler:
    sampler = sampler_of(base, batch_size)
    check_sampler(sampler, torch.device("cpu"))
    return sampler


@pytest.mark.parametrize("name", [*RIGHT, "gemma2"])
def test_architectures_whose_padding_is_hidden_are_let_through(name):
    """Whether their KV cache can be laid out is known before the first rollout, so a resumed one is cut alike."""
    make = RIGHT.get(name, partial(tiny_of_type, "gemma2", sliding_window=4, head_dim=16))
    assert checked(make()).may_reuse == (name not in ("mamba", "falcon_h1", "llama4_text", "gemma2"))


@pytest.mark.parametrize("name", ["bart", "minimax"])
def test_an_architecture_that_reads_padding_is_refused_before_it_samples(make_trainer, dataset, name):
    trainer = make_trainer(model=tiny_of_type(name), eval_dataset=dataset)
    trainer.collector.sampler.__class__ = Sealed
    for start in (trainer.train, trainer.evaluate, lambda: trainer.rollout(["1+1="])):
        with pytest.raises(ValueError, match=r"ForCausalLM reads padding.* local_rollout_forward_batch_size=1"):
            start()


class Sealed(TransformersSampler):
    def __call__(self, *args, **kwargs):
        pytest.fail("completions were sampled")


@pytest.mark.parametrize("name", ["bart", "minimax"])
def test_one_prompt_at_a_time_needs_no_padding(make_trainer, name):
    trainer = make_trainer({"local_rollout_forward_batch_size": 1}, model=tiny_of_type(name))
    rollout = trainer.rollout(["1=", "12+34+56="])
    assert (rollout.rollout_logprobs - rollout.old_logprobs)[rollout.mask].abs().max() < 1e-4


def test_a_model_that_places_tokens_by_column_does_not_continue_from_columns_that_moved():
    """Its keys hold the positions of the columns that they were in."""
    assert not checked(tiny_vision_model("hyperclovax_vision_v2", model_type="hyperclovax")).may_reuse


class Stale(type(tiny_model())):
    """Keeps a state of its batch beside the cache, which `generate` does not restore."""

    rows: list[int]

    def forward(self, input_ids, **kwargs):
        if kwargs.get(CACHE) is None or kwargs[CACHE].get_seq_length() == 0:
            self.rows = [len(input_ids)]
        elif [len(input_ids)] != self.rows:
            raise RuntimeError("The size of tensor a must match the size of tensor b")
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_model_that_keeps_the_rows_of_its_last_batch_does_not_continue():
    base = tiny_model()
    base.__class__ = Stale
    assert not checked(base).may_reuse


def test_other_samplers_are_not_tried():
    check_sampler(object(), torch.device("cpu"))
