"""Run by test_two_processes.py on the second device: a rollout ahead where Trainer places the model late.

It does so with DeepSpeed. Prints the rewards as JSON.
"""

import json
import sys

from helpers.runs import PROMPTS, logged, small_trainer
from hfppo import PPOConfig
from hfppo.reporting.run_page import RunPageCallback

PPOConfig.place_model_on_device = property(lambda self: False)
trainer = small_trainer(sys.argv[1], {"use_cpu": False, "rollouts_ahead": 1}, train_dataset=PROMPTS)
trainer.remove_callback(RunPageCallback)
assert trainer.model.device.type == "cpu"
trainer.train()
assert trainer.model.device == trainer.args.device
print(json.dumps(logged(trainer, "reward")))
