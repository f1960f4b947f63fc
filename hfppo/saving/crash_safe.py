"""Checkpoints that are whole or not there, whatever kills the run in between.

A checkpoint is written into a folder aside, flushed to the disk, listed with hashes in a manifest, and renamed, once
every process has written its part. What was left by a crash, or damaged since, is recognised and passed over.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.saving.folders import (
    ASIDE,
    EARLIER,
    finish_renames,
    free_space,
    last_intact,
    put_in_place,
    rotate,
    set_others_aside,
    was_best_of,
)
from hfppo.saving.hub import HubTrainer
from hfppo.saving.just_in_time import JustInTimeCallback
from hfppo.saving.lock import OutputLock
from hfppo.saving.manifest import damage, seal

logger = logging.getLogger(__name__)


class CrashSafeTrainer(HubTrainer):
    """A Trainer whose checkpoints appear whole, and which goes on from the last one that is."""

    _aside: str | None = None  # where the checkpoint that is being saved is written
    _start: Path | None = None  # the checkpoint that the run goes on from
    _has_saved = False  # whether the run has checkpoints of its own

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._just_in_time: JustInTimeCallback | None = None
        if self.args.enable_jit_checkpoint:
            self._just_in_time = JustInTimeCallback(
                cast(JITCheckpointCallback, self.pop_callback(JITCheckpointCallback))
            )
            self.add_callback(self._just_in_time)

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Trainer's `train`; True is the last whole checkpoint.

        Raises:
            ValueError: the checkpoint named is damaged, there is none, or another run has the output folder.
        """
        if isinstance(resume_from_checkpoint, os.PathLike):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        with self._alone():
            checkpoint = self._checkpoint_for(resume_from_checkpoint)
            self._start = Path(checkpoint).resolve() if isinstance(checkpoint, str) else None
            self._has_saved = False
            return super().train(checkpoint, *args, **kwargs)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, other runs are refused the output folder."""
        lock = OutputLock(self.args.output_dir)
        other = None
        try:
            if self.is_world_process_zero() and (other := lock.acquire()) is None:
                finish_renames(self.args.output_dir)  # before the others, who wait to be told, look for a checkpoint
            if (other := broadcast_object_list([other])[0]) is not None:
                raise ValueError(
                    f"output_dir={self.args.output_dir!r} is being trained into by another run ({other}); give "
                    "another output_dir, or wait until that run has ended"
                )
            yield
        finally:
            lock.release()

    def _checkpoint_for(self, resume_from_checkpoint: str | bool | None) -> str | bool | None:
        """The folder to go on from, if one is asked for."""
        if resume_from_checkpoint is True:
            found = last_intact(self.args.output_dir) if self.is_world_process_zero() else None
            resume_from_checkpoint = broadcast_object_list([found])[0]
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True: {self.args.output_dir} has no whole checkpoint; leave it out to "
                    f"start anew, name one that a later start put into {EARLIER}_<n>, or check output_dir"
                )
        elif isinstance(resume_from_checkpoint, str) and (wrong := damage(resume_from_checkpoint)) is not None:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} {wrong}; take an earlier one, or True for the "
                "last that is whole"
            )
        return resume_from_checkpoint

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Private, but the first that upstream asks for after it has read the checkpoint's state.
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.state.best_global_step:
            self.state.best_model_checkpoint = self._find_best(Path(checkpoint))

    def _find_best(self, checkpoint: Path) -> str | None:
        """Where this run's best checkpoint lies now: it may have been moved, and another's be where it was.

        A better evaluation may have followed at a step that was not saved.
        """
        saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        recorded = saved.best_model_checkpoint  # upstream forgets one that is not where it was
        if recorded is None:
            return None
        places = [checkpoint.with_name(Path(recorded).name), Path(recorded)]
        found = next((str(place) for place in places if was_best_of(self.state, place)), None)
        if found is None:
            logger.warning("%s, the best checkpoint so far, is not this run's any more; it is not loaded", recorded)
        return found

    def _get_output_dir(self, trial: Any) -> str:
        # Private, but the one place that says where a checkpoint is written.
        return super()._get_output_dir(trial) if self._aside is None else self._aside

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Private; upstream pushes before it is done, here it is pushed under its name.
        if self._aside is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Private; upstream writes in place, and one process may be done before another has begun.
        output_dir = Path(self._get_output_dir(trial))
        final = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save and not self._has_saved:
            set_others_aside(output_dir, self._start, self.state.best_model_checkpoint)
        self._has_saved = True
        with self._writing_aside(output_dir) as aside:
            super()._save_checkpoint(model, trial)
            if self.state.best_global_step == self.state.global_step and self.state.best_model_checkpoint:
                self.state.best_model_checkpoint = str(final)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(aside / final.name / TRAINER_STATE_NAME))  # with the name it will have
                seal(aside / final.name)
                put_in_place(aside / final.name, final)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            rotate(output_dir, self.args.save_total_limit, final, self.state.best_model_checkpoint)

    @contextmanager
    def _writing_aside(self, output_dir: Path) -> Iterator[Path]:
        """Inside, Trainer's output folder is one aside; it is gone afterwards, also when the disk was full."""
        aside = output_dir / ASIDE
        if self.args.should_save:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._aside = str(aside)
        try:
            yield aside
        except Exception as error:  # on a full disk torch's and safetensors' own kinds, which may not even say so
            error.add_note(
                f"The checkpoint at step {self.state.global_step} could not be written; {free_space(output_dir)}. "
                "Those before it are untouched: mend what is wrong, and go on with resume_from_checkpoint=True."
            )
            raise
        finally:
            self._aside = None
            if self.args.should_save:
                finish_renames(output_dir)  # interrupted between two renames
                shutil.rmtree(aside, ignore_errors=True)
