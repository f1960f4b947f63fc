"""Checkpoints that are whole or not there, whatever kills the run in between.

A checkpoint is written into a folder aside, flushed to the disk, listed with hashes in a manifest, and renamed, once
every process has written its part. What was left by a crash, or damaged since, is recognised and passed over.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from hfppo.hub import HubTrainer

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ASIDE, EARLIER = "_saving", "_earlier"  # Trainer leaves what begins with "_" out of what it pushes


def seal(folder: Path) -> None:
    """Flush a folder's files to the disk and list them, with their hashes, in its manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)
    files = {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in files:
        flush(folder / name)
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))
    flush(folder / MANIFEST)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        flush(path)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file or, for a folder, its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint; None if it is as it was written."""
    folder = Path(folder)
    if not folder.is_dir():
        return "is no folder"
    try:
        files = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"has no readable {MANIFEST}: the run was killed while it was written, or another program wrote it"
    for name, wanted in files.items():
        if not (folder / name).is_file():
            return f"lacks {name}"
        if digest(folder / name) != wanted:
            return f"has a changed {name}"
    return None


def last_intact(output_dir: str | Path) -> str | None:
    """The latest checkpoint that is whole; those passed over are named in a warning. None without any."""
    for folder in reversed(sort_checkpoints(str(output_dir))):
        if (wrong := damage(folder)) is None:
            return folder
        logger.warning("%s is passed over: it %s", folder, wrong)
    return None


def make_way(output_dir: Path, start: str | None, best: str | None) -> None:
    """Move the checkpoints that a run does not go on from into a folder aside, so that none is lost to its own.

    It would write over those of its own steps and delete others for `save_total_limit`; and, killed, it would be
    resumed from the last of them.

    Args:
        start: the checkpoint that the run goes on from; those before it are its own.
        best: its best one, which stays wherever it is.
    """
    found = [Path(folder) for folder in sort_checkpoints(str(output_dir))]
    before = (n for n, folder in enumerate(found, 1) if start is not None and folder.samefile(start))
    others = [f for f in found[next(before, 0) :] if is_checkpoint(f) and not (best is not None and f.samefile(best))]
    if not others:
        return
    earlier = next(path for n in count(1) if not (path := output_dir / f"{EARLIER}_{n}").exists())
    earlier.mkdir()
    for folder in reversed(others):  # so that a kill in between leaves none that is later than one moved
        folder.rename(earlier / folder.name)
    logger.warning(
        "%s held checkpoints that this run does not go on from; they are in %s now, the last as %s",
        output_dir,
        earlier,
        earlier / others[-1].name,
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether it has been saved, and not just been given its name, as `enable_jit_checkpoint` does before it saves."""
    return (folder / TRAINER_STATE_NAME).is_file()


def way_back(output_dir: str | Path) -> str:
    """Where a run that failed goes on, for its error."""
    found = sort_checkpoints(str(output_dir))
    if not found:
        return "There is no checkpoint yet."
    return f"The last checkpoint is {found[-1]}: go on from it with resume_from_checkpoint=True."


class CrashSafeTrainer(HubTrainer):
    """A Trainer whose checkpoints appear whole, and which goes on from the last one that is."""

    _aside: str | None = None  # where the checkpoint that is being saved is written
    _start: str | None = None  # the checkpoint that the run goes on from
    _has_saved = False  # whether the run has checkpoints of its own

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`; True is the last whole checkpoint.

        Raises:
            ValueError: the checkpoint named is damaged, or there is none.
        """
        checkpoint = self._checkpoint_for(resume_from_checkpoint)
        self._start, self._has_saved = checkpoint if isinstance(checkpoint, str) else None, False
        return super().train(checkpoint, *args, **kwargs)

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
        # Private, but the first that upstream asks for after it has read the checkpoint's state. The best one lies
        # beside the one that is gone on from, also where both were moved and another run has one of that name now.
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.state.best_global_step:
            best = Path(checkpoint).with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best.is_dir():
                self.state.best_model_checkpoint = str(best)

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
            make_way(output_dir, self._start, self.state.best_model_checkpoint)
        self._has_saved = True
        with self._writing_aside(output_dir) as aside:
            super()._save_checkpoint(model, trial)
            if self.state.best_global_step == self.state.global_step and self.state.best_model_checkpoint:
                self.state.best_model_checkpoint = str(final)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(aside / final.name / TRAINER_STATE_NAME))  # with the name it will have
                seal(aside / final.name)
                replace(aside / final.name, final)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            rotate_checkpoints(
                str(output_dir), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
            )

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
        except OSError as error:
            error.add_note(
                f"The checkpoint at step {self.state.global_step} could not be written. Those before it are "
                "untouched: make room, and go on with resume_from_checkpoint=True."
            )
            raise
        finally:
            self._aside = None
            if self.args.should_save:
                shutil.rmtree(aside, ignore_errors=True)


def replace(new: Path, final: Path) -> None:
    """Give a folder its name; what had it before, from an earlier run, goes."""
    if final.exists():
        shutil.rmtree(final)
    new.rename(final)
    flush(final.parent)
