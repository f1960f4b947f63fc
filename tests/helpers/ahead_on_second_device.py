"""Run by test_two_processes.py on the second device: a rollout ahead where Trainer places the model late.

It does so with DeepSpeed. Prints the rewards as JSON.
"""

import json
import sys

from build_arithmetic_base import character_tokenizer

from helpers.runs import PROMPTS, SMALL, count_digits, logged
from helpers.tiny import LORA, tiny_model
from hfppo import PPOConfig, PPOTrainer
from hfppo.reporting.run_page import RunPageCallback

PPOConfig.place_model_on_device = property(lambda self: False)
trainer = PPOTrainer(
    model=tiny_model(),
    reward_funcs=count_digits,
    args=PPOConfig(**{**SMALL, "use_cpu": False, "rollouts_ahead": 1}, output_dir=sys.argv[1]),
    train_dataset=PROMPTS,
    processing_class=character_tokenizer(),
    peft_config=LORA,
)
trainer.remove_callback(RunPageCallback)
assert trainer.model.device.type == "cpu"
trainer.train()
assert trainer.model.device == trainer.args.device
print(json.dumps(logged(trainer, "reward")))
