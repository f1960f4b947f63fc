"""Sampling: pure, each row by its own seed, and with an end that is found without looking at padding."""

import pytest
import torch
from conftest import tiny_model
from torch.testing import assert_close
from transformers import GenerationConfig

from hfppo.data import pad_left
from hfppo.generation import completions_from, eos_token_ids
from hfppo.generation.transformers import row_uniforms


def sample(trainer, prompts, seeds):
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    trainer.model.eval()
    return trainer.collector.sampler(*pad_left(ids, trainer.processing_class.pad_token_id, "cpu"), seeds)


def test_a_completion_depends_on_its_own_seed_alone(make_trainer):
    """Not on its neighbours, its place in the batch or the padding they bring."""
    trainer = make_trainer()
    together = sample(trainer, ["1+2=", "请问10+20=", "3="], [11, 12, 13])
    for row, (prompt, seed) in enumerate([("1+2=", 11), ("请问10+20=", 12), ("3=", 13)]):
        alone = sample(trainer, [prompt], [seed])
        n = int(together.mask[row].sum())
        assert torch.equal(together.ids[row, :n], alone.ids[0, :n])
    assert not torch.equal(sample(trainer, ["1+2="], [12]).ids, sample(trainer, ["1+2="], [11]).ids)


def test_sampling_follows_the_models_distribution(make_trainer):
    """Frequencies of the first token over 4000 seeds against the softmax at temperature 0.7."""
    trainer = make_trainer({"temperature": 0.7, "max_completion_length": 1})
    prompt = trainer.processing_class("1+2=")["input_ids"]
    with torch.no_grad():
        expected = (trainer.model.eval()(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    n = 4000
    drawn = sample(trainer, ["1+2="] * n, list(range(n))).ids[:, 0]
    frequencies = torch.bincount(drawn, minlength=26) / n
    assert expected.max() < 0.9, "a peaked distribution would show little"
    assert_close(frequencies, expected, rtol=0, atol=4 * (0.25 / n) ** 0.5)


def test_greedy_is_generates_own_greedy(make_trainer):
    trainer = make_trainer()
    ours = sample(trainer, ["1+2=", "请问10+20="], None)
    for row, prompt in enumerate(["1+2=", "请问10+20="]):
        ids = torch.tensor([trainer.processing_class(prompt)["input_ids"]])
        theirs = trainer.model.generate(
            input_ids=ids, do_sample=False, max_new_tokens=6, eos_token_id=1, pad_token_id=0
        )
        n = int(ours.mask[row].sum())
        assert ours.ids[row, :n].tolist() == theirs[0, ids.shape[1] :].tolist()


def test_the_models_generation_config_does_not_leak_in(make_trainer):
    """Qwen2.5's config for instance asks for a repetition penalty and top-k 20, which are not the policy."""
    impure = tiny_model()
    impure.generation_config = GenerationConfig(
        do_sample=True, top_k=1, top_p=0.1, repetition_penalty=5.0, min_new_tokens=6, temperature=0.1, eos_token_id=1
    )
    trainer, plain = make_trainer(model=impure), make_trainer()
    prompts, seeds = ["1+2="] * 20, list(range(20))
    assert torch.equal(sample(trainer, prompts, seeds).ids, sample(plain, prompts, seeds).ids)
    assert trainer.model.causal_lm.generation_config.repetition_penalty == 5.0, "it must be put back"


def test_end_of_completions():
    ids = torch.tensor([[5, 1, 1, 1], [5, 6, 7, 8], [1, 5, 1, 0], [5, 6, 7, 2]])
    found = completions_from(ids, torch.ones(4, 4), eos_ids=[1, 2])
    assert found.mask.tolist() == [
        [True, True, False, False],
        [True, True, True, True],
        [True, False, False, False],
        [True, True, True, True],
    ]
    assert found.truncated.tolist() == [False, True, False, False]
    assert found.logprobs.sum(dim=1).tolist() == [2, 4, 1, 4]


@pytest.mark.parametrize(("configured", "expected"), [(None, [1]), (5, [1, 5]), ([5, 6], [1, 5, 6]), ([1], [1])])
def test_eos_ids_are_the_tokenizers_and_the_models(tokenizer, configured, expected):
    assert eos_token_ids(tokenizer, GenerationConfig(eos_token_id=configured)) == expected


def test_eos_of_the_generation_config_ends_completions(make_trainer):
    model = tiny_model()
    model.generation_config.eos_token_id = [1, *range(2, 12)]  # any digit
    trainer = make_trainer({"max_completion_length": 20}, model=model)
    rollout = trainer.rollout(["1+2="] * 4)
    digit_first = [ids[mask][:-1] for ids, mask in zip(rollout.completion_ids, rollout.mask, strict=True)]
    assert not rollout.truncated.all()
    assert all(not ((ids >= 1) & (ids < 12)).any() for ids in digit_first)


def test_uniforms_are_a_function_of_the_seed():
    a, b = row_uniforms([1, 2], 5), row_uniforms([2, 3], 5)
    assert torch.equal(a[1], b[0])
    assert ((a >= 0) & (a < 1)).all()
    assert len({*a.flatten().tolist(), *b[1].tolist()}) == 15


def test_rows_at_once_do_not_change_the_rollout(make_trainer):
    rollouts = []
    for size in (64, 3):
        trainer = make_trainer({"local_rollout_forward_batch_size": size})
        rollouts.append(trainer.rollout([f"{n}=" for n in range(8)]))
    assert torch.equal(rollouts[0].completion_ids, rollouts[1].completion_ids)
    assert_close(rollouts[0].old_logprobs, rollouts[1].old_logprobs, rtol=1e-5, atol=1e-5)
    assert_close(rollouts[0].advantages, rollouts[1].advantages, rtol=1e-4, atol=1e-4)
