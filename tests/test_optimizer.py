"""An optimiser of the user's own is followed as the trainer's is."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from helpers.runs import SMALL, count_digits, stops_at_kl
from helpers.tiny import LORA, tiny_model
from hfppo import PPOConfig, PPOTrainer
from hfppo.learn.optimizer import present_rate
from hfppo.learn.run import Run


def own_optimizer(model) -> torch.optim.Optimizer:
    """The critic in the first group, the actor in the second."""
    groups = [{"params": model.critic_parameters(), "lr": 3e-2}, {"params": model.actor_parameters()}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


class Overriding(PPOTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = own_optimizer(self.model)
        return self.optimizer


@pytest.fixture(params=["given", "overridden"])
def train_with_own(request, make_trainer, dataset, tokenizer, tmp_path):
    def train(config: dict, callbacks: list) -> PPOTrainer:
        if request.param == "given":
            trainer = make_trainer(config, callbacks=callbacks)
            trainer.optimizer = own_optimizer(trainer.model)
        else:
            args = PPOConfig(**{**SMALL, **config, "output_dir": str(tmp_path / "out")})
            given = {"train_dataset": dataset, "processing_class": tokenizer, "peft_config": LORA}
            trainer = Overriding(tiny_model(), count_digits, args, **given, callbacks=callbacks)
        trainer.start = parameters_to_vector(trainer.model.actor_parameters()).detach()
        trainer.train()
        return trainer

    return train


def moved(trainer) -> bool:
    return not torch.equal(trainer.start, parameters_to_vector(trainer.model.actor_parameters()))


def test_the_actor_waits_for_the_critic(train_with_own):
    trainer = train_with_own({"critic_warmup": 2, "max_steps": 8, "lr_scheduler_type": "constant"}, [])
    assert not moved(trainer)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {entry["critic_learning_rate"] for entry in log} == {3e-2}
    assert all(entry["time/update"] > 0 for entry in log)
    trainer.args.max_steps = 12
    trainer.train()
    assert moved(trainer)


def test_a_target_for_the_kl_ends_a_rollout_early(train_with_own):
    trainer = train_with_own({}, [stops_at_kl(1e-9)])
    assert trainer.ppo_state.rollouts == 4  # in 8 steps: the first on a rollout has KL 0, the second passes the limit


def test_a_scaled_rate_is_back_to_the_bit_after_its_step(make_trainer):
    """The schedule computes the next rate from it."""
    trainer = make_trainer()
    run, groups = Run(trainer.model, trainer.accelerator, trainer.args), trainer.create_optimizer().param_groups
    before = [group["lr"] for group in groups]
    run.begin_step()
    run.before_step(trainer.optimizer, 0.3)
    scaled = [group["lr"] for group in groups]
    assert {now / rate for now, rate in zip(scaled, before, strict=True)} == {0.3, 1.0}, "the actor's only"
    run.end_step(0)
    assert [group["lr"] for group in groups] == before


def test_the_rate_of_an_optimizer_without_the_critics_own_tensors_is_that_of_the_last_group():
    first, last = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [last], "lr": 0.2}])
    assert present_rate(optimizer, [torch.nn.Parameter(torch.zeros(1))], -1) == 0.2
