"""Run by test_interrupted_processes.py under torchrun --max_restarts 1: two processes, interrupted; writes JSON.

One of them is killed in the first life of both. The second life resumes that run.
"""

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

from build_arithmetic_base import character_tokenizer

from helpers.processes import freeze_imports
from helpers.runs import digest, final_state, logs, small_trainer
from hfppo import PPOCallback, PPOTrainer
from hfppo.reporting.run_page import RunPageCallback
from hfppo.saving import manifest, shared_folder

freeze_imports()
OUT, RANK, LIFE = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class InStep(PPOCallback):
    """Calls a function on the second process after the backward pass of step 6, within the second rollout."""

    def __init__(self, act) -> None:
        self.act = act

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if RANK == 1 and state.global_step == 5:
            self.act()


def make(name: str, act=None, **config) -> PPOTrainer:
    config = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1, **config}
    callbacks = [] if act is None else [InStep(act)]
    trainer = small_trainer(OUT / name, config, processing_class=character_tokenizer(), callbacks=callbacks)
    trainer.remove_callback(RunPageCallback)
    return trainer


def end_of(trainer: PPOTrainer) -> list:
    """What came of a run."""
    state = final_state(trainer)
    return [trainer.state.global_step, digest(state[name].flatten() for name in sorted(state)), logs(trainer)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tell() -> None:
    """As upstream's handler of SIGTERM does."""
    (callback,) = [c for c in told.callback_handler.callbacks if hasattr(c, "jit_manager")]
    callback.jit_manager.is_checkpoint_requested = True


killed = make("killed", die if LIFE == 0 else None)
killed.train(resume_from_checkpoint="auto")
straight, hash_file, hashed = make("straight"), manifest.hash_file, set()
with mock.patch.object(manifest, "hash_file", lambda path: hashed.add(path.name) or hash_file(path)):
    straight.train()
told = make("told", tell, enable_jit_checkpoint=True, save_strategy="no")
told.train()
resumed = make("told", enable_jit_checkpoint=True, save_strategy="no")
resumed.train(resume_from_checkpoint="auto")
shared_folder.PATIENCE = 0.2
try:
    make(f"own_{RANK}").train()
except ValueError as error:
    said = str(error)
result = {"straight": end_of(straight), "killed": end_of(killed), "told": end_of(resumed)}
result |= {"told_at": told.state.global_step, "hashed": sorted(hashed), "own": said}
(OUT / f"result_{RANK}.json").write_text(json.dumps(result))
