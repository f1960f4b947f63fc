"""Run by test_pace.py under torchrun: episodes with FSDP2 on CPUs, fewer turns on the first process; writes JSON.

torchrun … sharded_episodes.py FOLDER SECONDS
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from helpers import agents
from helpers.processes import freeze_imports
from hfppo import PPOCallback, PPOConfig
from hfppo.generation.generate import TransformersSampler
from hfppo.reporting.run_page import RunPageCallback

freeze_imports()
OUT, SECONDS, RANK = Path(sys.argv[1]), float(sys.argv[2]), int(os.environ["RANK"])


def sharding_config(**fields) -> PPOConfig:
    """Arguments with which accelerate, which shards over GPUs alone, does so over CPUs."""
    args = PPOConfig(**fields)
    args.device  # noqa: B018 (makes the state that is changed next)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


class Slow(agents.Chatter):
    """The second process has longer episodes, and each step takes another time."""

    def reset(self, seed: int = 0, **row) -> str:
        text = super().reset(seed, **row)
        self.left, self.seconds = 1 + RANK * (1 + seed % 3), SECONDS * (seed % 5)
        return text

    def step(self, text: str):
        time.sleep(self.seconds)
        return super().step(text)


class Rollouts(PPOCallback):
    """Keeps the token ids."""

    def __init__(self):
        self.ids: list[list[int]] = []

    def on_rollout_end(self, args, state, control, *, rollout, **kwargs):
        self.ids += [ids[real].tolist() for ids, real in zip(rollout.completion_ids, rollout.real, strict=True)]


calls, sample = [], TransformersSampler.__call__


def counted(self, prompt_ids, *args, **kwargs):
    calls.append(len(prompt_ids))
    return sample(self, prompt_ids, *args, **kwargs)


TransformersSampler.__call__, agents.PPOConfig = counted, sharding_config
rollouts = Rollouts()
config = {"max_steps": 4, "per_device_train_batch_size": 4, "num_mini_batches": 1, "gradient_accumulation_steps": 1}
trainer = agents.talking_trainer(OUT / "run", config, environment_factory=Slow, callbacks=[rollouts], critic="shared")
trainer.remove_callback(RunPageCallback)
trainer.train()
sharded = any(isinstance(p, torch.distributed.tensor.DTensor) for p in trainer.model.parameters())
(OUT / f"result_{RANK}.json").write_text(json.dumps({"sharded": sharded, "ids": rollouts.ids, "calls": calls}))
trainer.end()
