"""Run by test_other_number.py under torchrun: trains, from checkpoints of another number of processes; writes JSON.

python tests/helpers/other_number.py OUT [FROM STEP]
"""

import json
import sys
from pathlib import Path

from build_arithmetic_base import character_tokenizer
from datasets import Dataset

from helpers.agents import talking_trainer
from helpers.processes import freeze_imports
from helpers.runs import final_state, logs, small_trainer
from hfppo import PPOTrainer
from hfppo.collect import candidates
from hfppo.reporting.run_page import RunPageCallback

freeze_imports()
OUT, *START = sys.argv[1:]
CONFIG = {
    **{"per_device_train_batch_size": 2, "rollout_size": 16, "save_strategy": "steps", "save_steps": 1},
    **{"max_steps": 6, "logging_steps": 3, "learning_rate": 1e-3},  # 4 steps on a rollout
    "adam_epsilon": 1e-6,  # at 1e-8 a gradient that nearly cancels takes a whole step, of its rounding
}
# Each with the step of the checkpoint that is resumed from, unless another is given.
CASES = {
    "within a rollout": ({}, 3),
    "ahead": ({"rollouts_ahead": 1}, 3),
    "pretrained": ({"critic_pretraining_completions": 32}, 0),
    "chosen": ({"prompt_candidates": 2}, 3),
    "game": ({"max_completion_length": 40, "gamma_turn": 0.9}, 3),
}
ROWS = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(8) for b in range(2, 6)])  # for all candidates
candidates.EXPLAINED = 0.0  # the critic chooses whatever little it knows


def make(name: str) -> PPOTrainer:
    config = {**CONFIG, **CASES[name][0]}
    if name == "game":
        trainer = talking_trainer(f"{OUT}/{name}", config)
    else:
        trainer = small_trainer(f"{OUT}/{name}", config, processing_class=character_tokenizer(), train_dataset=ROWS)
    trainer.remove_callback(RunPageCallback)
    return trainer


result = {}
for name, (_, step) in CASES.items():
    trainer = make(name)
    trainer.train(f"{START[0]}/{name}/checkpoint-{max(step, int(START[1]))}" if START else None)
    weights = {key: x.double().flatten().tolist() for key, x in final_state(trainer).items()}
    result[name] = {"weights": weights, "logs": logs(trainer), "processes": trainer.args.world_size}
if trainer.args.process_index == 0:
    Path(OUT, "result.json").write_text(json.dumps(result))
