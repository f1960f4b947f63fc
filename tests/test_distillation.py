"""A teacher as the reference and no reward: the gradient of the reverse KL, as docs/distillation.md says."""

import re
from pathlib import Path

import torch
from datasets import Dataset
from torch.testing import assert_close

import hfppo
from helpers.runs import Keep, size_of
from helpers.scripted import answering, ids_of
from helpers.tiny import tiny_model

DISTILLATION = {
    "kl_coef": 1.0,
    "advantage_estimator": "reinforce_plus_plus",
    "gamma": 0.0,
    "whiten_advantages": False,
    "num_ppo_epochs": 1,
}


def log_pi(model, prompt: str, completion: str) -> torch.Tensor:
    """Log-probs of a completion's tokens by plain transformers, (T,)."""
    prompt_ids, ids = ids_of(prompt), ids_of(completion)
    logits = model(input_ids=torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(dim=-1)[range(len(ids)), ids]


def gradients(trainer) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in grads.items() if grad.any()}


def test_each_token_has_the_gradient_of_minus_log_ratio(make_trainer):
    """The estimate of ∇KL(π‖π_T) from a sampled token y is log(π(y)/π_T(y))·∇log π(y): E[∇log π(y)] is 0."""
    answers = {"1+1=": "2.", "2+3=": "是的，等于5！."}
    prompts = Dataset.from_dict({"prompt": list(answers) * 2})
    config = {**DISTILLATION, "max_completion_length": 8}
    trainer = make_trainer(config, reward_funcs=None, ref_model=tiny_model(seed=5), train_dataset=prompts)
    assert trainer.model.critic is None
    rollout = answering(trainer, *answers.values()).rollout(list(answers))
    trainer.ppo_state.rollouts = 1  # before the first, the critic alone would learn
    size = size_of(rollout)
    trainer.compute_loss(trainer.model, {"batch": rollout}, num_items_in_batch=size).backward()
    found = gradients(trainer)

    trainer.model.zero_grad()
    teacher, expected = tiny_model(seed=5), torch.zeros(())
    for prompt, answer in answers.items():
        student = log_pi(trainer.model.causal_lm, prompt, answer)
        with torch.no_grad():
            ratio = student - log_pi(teacher, prompt, answer)
        expected = expected + (ratio * student).sum()
    (expected / 10).backward()  # tokens: 2 and 8
    wanted = gradients(trainer)
    assert len(wanted) > 10
    assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_in_training_the_advantage_is_minus_the_log_ratio(make_trainer):
    keep = Keep()
    teacher = tiny_model(seed=5)
    make_trainer({**DISTILLATION, "max_steps": 3}, reward_funcs=None, ref_model=teacher, callbacks=[keep]).train()
    rollout = keep.rollouts[-1]
    expected = (rollout.ref_logprobs - rollout.old_logprobs).where(rollout.mask, 0.0)
    assert expected.abs().max() > 0.1
    assert_close(rollout.advantages, expected)


def test_the_page_has_these_settings():
    page = (Path(hfppo.__file__).parent.parent / "docs/distillation.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for name, value in DISTILLATION.items():
        assert f"{name}={value!r}," in block.replace('"', "'")
