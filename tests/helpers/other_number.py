"""Run by test_other_number.py under torchrun: trains, also from checkpoints of another number of processes.

python tests/helpers/other_number.py OUT CASES [FOLDER …]

Each of CASES, a JSON list of names and of numbers of drawn configurations, is trained from the start into OUT, and
once from a checkpoint in each FOLDER, which an earlier call has made; what comes of them is in OUT/result.
"""

import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from build_arithmetic_base import character_tokenizer
from datasets import Dataset

from helpers.agents import talking_trainer
from helpers.drawn import trainer_of
from helpers.processes import freeze_imports
from helpers.runs import Keep, final_state, logs, small_trainer
from hfppo import PPOTrainer
from hfppo.collect import candidates
from hfppo.environments import episodes
from hfppo.reporting.run_page import RunPageCallback

freeze_imports()
OUT, CASES, FOLDERS = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
CONFIG = {
    **{"per_device_train_batch_size": 2, "rollout_size": 16, "save_strategy": "steps", "save_steps": 1},
    **{"max_steps": 6, "logging_steps": 3, "learning_rate": 1e-3},  # 4 steps on a rollout
    "adam_epsilon": 1e-6,  # at 1e-8 a gradient that nearly cancels takes a whole step, of its rounding
}
# Each with the step of the checkpoint that is resumed from.
NAMED = {
    "within a rollout": ({}, 3),
    "ahead": ({"rollouts_ahead": 1}, 3),
    "pretrained": ({"critic_pretraining_completions": 32}, 0),
    "chosen": ({"prompt_candidates": 2}, 3),
    "game": ({"max_completion_length": 40, "gamma_turn": 0.9}, 3),
}
ROWS = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(8) for b in range(2, 6)])  # for all candidates
episodes.PATIENCE = 5.0  # the same batches; others round otherwise
candidates.EXPLAINED = 0.0  # the critic chooses whatever little it knows


def make(case: str | int, folder: str, **config) -> tuple[PPOTrainer, int]:
    """A case's trainer, and the step of the checkpoint that is resumed from."""
    config = CONFIG | config
    if isinstance(case, int):
        trainer = trainer_of(case, folder, several=True, **config)
        step = random.Random(case).randrange(trainer.args.max_steps)
        return trainer, step if trainer.args.critic_pretraining_completions else max(step, 1)
    own, step = NAMED[case]
    config |= own
    if case == "game":
        return talking_trainer(folder, config), step
    return small_trainer(folder, config, processing_class=character_tokenizer(), train_dataset=ROWS), step


def train(case: str | int, start: str | None) -> dict:
    """What came of a case, with the texts of each rollout of all processes."""
    resumed = {} if start is None else {"save_strategy": "no"}
    (trainer, step), kept = make(case, f"{OUT}/{case}" + "-resumed" * len(resumed), **resumed), Keep()
    trainer.remove_callback(RunPageCallback)
    trainer.add_callback(kept)
    trainer.train(f"{start}/{case}/checkpoint-{step}" if start else None)
    own = [list(zip(x.prompts, x.completions, strict=True)) for x in kept.transcripts]
    parts = [own] * trainer.args.world_size
    if len(parts) > 1:
        dist.all_gather_object(parts, own)
    rows = [[row for part in parts for row in part[i]] for i in range(len(own))]
    return {"weights": final_state(trainer), "logs": logs(trainer), "rows": rows, "processes": len(parts)}


result = {case: [train(case, start) for start in (None, *FOLDERS)] for case in CASES}
if not dist.is_initialized() or dist.get_rank() == 0:
    torch.save(result, Path(OUT, "result"))
