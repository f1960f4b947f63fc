"""Run by test_two_processes.py on the second device: how often a micro-batch waits for it, by its rows; prints JSON.

With deterministic algorithms, a reward model that was loaded to the CPU, and a value head that Trainer leaves there
until training, as it does beside a quantised base.
"""

import json
import sys

import torch

from helpers.runs import PROMPTS, small_trainer
from helpers.tiny import other_tokenizer, ragged_model, scorer
from hfppo import PPOTrainer
from hfppo.reporting.run_page import RunPageCallback


class CountingTrainer(PPOTrainer):
    """Notes how often each micro-batch of the update has waited."""

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        before = torch.ops.second.waits()
        loss = super().training_step(*args, **kwargs)
        self.waits.append(torch.ops.second.waits() - before)
        return loss


found = {}
for rows in (2, 8):
    trainer = small_trainer(
        sys.argv[1],
        {"use_cpu": False, "per_device_train_batch_size": rows, "full_determinism": True},
        model=ragged_model(),
        reward_funcs=scorer(),
        train_dataset=PROMPTS,
        reward_processing_classes=[other_tokenizer("right", "<void>")],
    )
    trainer.__class__ = CountingTrainer
    assert str(trainer.args.device) == "second:0"
    trainer.remove_callback(RunPageCallback)
    trainer.model.critic.value_head.cpu()
    assert trainer.rollout(["1+1="]).values.abs().sum() == 0  # those of a new critic
    assert trainer.collector.rewards.funcs[0].model.device == trainer.args.device
    trainer.waits = []
    trainer.train()
    found[rows] = trainer.waits
print(json.dumps(found))
