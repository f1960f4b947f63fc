"""An optimiser of the user's own is followed as the trainer's is."""

import copy
import inspect

import pytest
import torch
from peft import get_peft_model
from torch.optim.lr_scheduler import LambdaLR, StepLR
from transformers import get_scheduler
from trl import GRPOTrainer

from helpers.runs import SMALL, count_digits, stops_at_kl, trained_state
from helpers.tiny import LORA, tiny_model
from hfppo import PPOCallback, PPOConfig, PPOTrainer
from hfppo.learn.optimizer import critic_learning_rate


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
        trainer.start = [p.detach().clone() for p in trainer.model.actor_parameters()]
        trainer.train()
        return trainer

    return train


def moved(trainer) -> bool:
    pairs = zip(trainer.start, trainer.model.actor_parameters(), strict=True)
    return any(not torch.equal(before, now) for before, now in pairs)


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
    rollouts = []
    callback = PPOCallback()
    callback.on_rollout_end = lambda *_, **__: rollouts.append(1)
    train_with_own({}, [callback, stops_at_kl(1e-9)])
    assert len(rollouts) == 4  # in 8 steps: the first on a rollout has KL 0, the second passes the limit


def test_hooks_are_not_doubled_by_a_second_run(make_trainer):
    steps = []
    trainer = make_trainer({"max_steps": 2})
    trainer._step_hooks.after = lambda: steps.append(1)
    trainer.train()
    trainer.train()
    assert len(steps) == 4


def test_the_rate_of_an_optimizer_without_the_critics_own_tensors_is_that_of_the_last_group():
    first, last = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [last], "lr": 0.2}])
    assert critic_learning_rate(optimizer, [torch.nn.Parameter(torch.zeros(1))]) == 0.2


def adapter(name: str = "default"):
    """A PeftModel with an adapter that has been trained a little."""
    model = get_peft_model(tiny_model(), copy.deepcopy(LORA), adapter_name=name)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.05)
    return model


def adamw(model) -> torch.optim.AdamW:
    """Trainer's own, over every parameter, the frozen ones too."""
    return torch.optim.AdamW(model.parameters(), lr=SMALL["learning_rate"], weight_decay=0.0)


def scheduled(model) -> tuple[torch.optim.AdamW, LambdaLR]:
    optimizer = adamw(model)
    return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=8)


@pytest.mark.parametrize("name", ["optimizers", "quantization_config"])
def test_the_argument_is_grpotrainers(name):
    own, other = (inspect.signature(owner).parameters[name].default for owner in (PPOTrainer, GRPOTrainer))
    assert own == other


@pytest.mark.parametrize(
    ("name", "critic", "schedule"),
    [("default", "adapter", True), ("default", "shared", False), ("policy_v1", "adapter", False)],
)
def test_an_optimizer_over_a_peft_model_trains_as_the_trainers_own(make_trainer, name, critic, schedule):
    fields = {"optim": "adamw_torch", "warmup_steps": 2, "critic_learning_rate": 3e-2}
    own = make_trainer(fields, model=adapter(), peft_config=None, critic=critic)
    model = adapter(name)
    optimizers = scheduled(model) if schedule else (adamw(model), None)
    given = make_trainer(fields, model=model, peft_config=None, critic=critic, optimizers=optimizers)
    assert given.optimizer is optimizers[0]
    for trainer in (own, given):
        trainer.train()
    wanted, found = trained_state(own.model), trained_state(given.model)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[x], found[x]) for x in wanted)
    rates = [
        [x["critic_learning_rate"] for x in t.state.log_history if "critic_learning_rate" in x] for t in (own, given)
    ]
    assert rates[0] == rates[1]


def test_such_a_run_resumes(make_trainer):
    def make(steps: int, folder: str):
        model = adapter()
        fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": steps, "output_dir": folder}
        return make_trainer(fields, model=model, peft_config=None, optimizers=scheduled(model))

    folder = make_trainer().args.output_dir
    whole = make(4, f"{folder}/whole")
    whole.train()
    make(2, f"{folder}/parts").train()
    resumed = make(4, f"{folder}/parts")
    resumed.train(resume_from_checkpoint=True)
    wanted, found = trained_state(whole.model), trained_state(resumed.model)
    assert all(torch.equal(wanted[x], found[x]) for x in wanted)


def test_the_critics_rate_is_the_optimizers_unless_one_is_set(make_trainer):
    model = adapter()
    optimizers = scheduled(model)
    trainer = make_trainer({"learning_rate": 1e-5}, model=model, peft_config=None, optimizers=optimizers)
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [1e-2, 1e-2]
    assert len(trainer.optimizer.param_groups[0]["params"]) == len(trainer.model.actor_parameters())


def of_another(optimizer) -> LambdaLR:
    return LambdaLR(adamw(tiny_model()), lambda step: 1.0)


@pytest.mark.parametrize(
    ("given", "optimizers", "message"),
    [
        (
            tiny_model,
            lambda model: (adamw(model), None),
            "none of the trained weights, because PPOTrainer makes the adapter",
        ),
        (adapter, lambda model: (adamw(tiny_model()), None), "pass model as a PeftModel"),
        (adapter, lambda model: (None, of_another(model)), "a scheduler of another optimizer"),
        (adapter, lambda model: (adamw(model), of_another(model)), "a scheduler of another optimizer"),
        (adapter, lambda model: (x := adamw(model), StepLR(x, 2)), "a StepLR, .* pass a LambdaLR"),
    ],
    ids=["a base", "another model", "a schedule alone", "another's schedule", "another kind of schedule"],
)
def test_optimizers_that_cannot_train_are_refused(make_trainer, given, optimizers, message):
    model = given()
    peft_config = LORA if given is tiny_model else None
    with pytest.raises(ValueError, match=f"optimizers .*{message}"):
        make_trainer(model=model, peft_config=peft_config, optimizers=optimizers(model))
