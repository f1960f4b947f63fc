"""`CrashSafeTrainer`: checkpoints that are complete or absent, whatever kills the run in between.

A checkpoint is written into a staging folder, flushed to disk, listed with hashes in a manifest and renamed, after
every process has written its part. Checkpoints left half-written by a crash, or damaged since, are recognized and
skipped.
"""

import json
import logging
import os
import shutil
from collections import ChainMap
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import Trainer, TrainerState
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy, TrainOutput

from hfppo.saving import checkpoint_folders as folders
from hfppo.saving.just_in_time import JustInTimeCallback
from hfppo.saving.lock import OutputLock
from hfppo.saving.manifest import find_damage, hash_flushed, seal
from hfppo.saving.shared_folder import check_shared

logger = logging.getLogger(__name__)

AUTO = "auto"  # as `resume_from_checkpoint`: the last complete checkpoint, if there is one


class CrashSafeTrainer(Trainer):
    """A Trainer whose checkpoints appear complete, and which resumes from the last complete one.

    A subclass that has state of its own overrides `check_resume`, `save_run_state`, `load_run_state`, `save_card` and
    `training_context`, which do nothing here.
    """

    pushed_folders: tuple[str, ...] = ()  # folders of a checkpoint that a push includes, besides Trainer's own files

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._staging: str | None = None  # the folder that a checkpoint is being written into
        self._start: Path | None = None  # the checkpoint that the run continues from
        self._has_saved = False  # whether this run has written a checkpoint
        self._just_in_time: JustInTimeCallback | None = None
        if self.args.enable_jit_checkpoint:
            upstream = cast(JITCheckpointCallback, self.pop_callback(JITCheckpointCallback))
            self._just_in_time = JustInTimeCallback(upstream)
            self.add_callback(self._just_in_time)

    def check_resume(self, checkpoint: str) -> None:
        """Raise if this run cannot continue from a checkpoint; called before the checkpoint is loaded."""

    def save_run_state(self, folder: str) -> None:
        """Write this process's own state into a checkpoint; called on every process."""

    def load_run_state(self, folder: str) -> None:
        """Read what `save_run_state` wrote; called on every process after Trainer has loaded the weights."""

    def weights_to_save(self) -> dict[str, Tensor]:
        """Return the weights that are saved; called on every process where FSDP2 or DeepSpeed trains."""
        return self.accelerator.get_state_dict(self.model_wrapped)

    def save_card(self, folder: str) -> None:
        """Write the model card into a folder before a model is saved there; called where `should_save` is True."""

    def loading_optimizer(self) -> AbstractContextManager:
        """Return a context around Trainer's loading of optimizer and scheduler."""
        return nullcontext()

    def training_context(self) -> AbstractContextManager:
        """Return a context around Trainer's loop."""
        return nullcontext()

    def saves_at_signal(self) -> bool:
        """Save between two steps if a signal asked for it, and return whether it did; a subclass calls it there."""
        return self._just_in_time is not None and self._just_in_time.save_between_steps(self.control)

    # Training and resuming

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as Trainer does.

        Args:
            resume_from_checkpoint: a path, or True for the last complete checkpoint; "auto" is the same if there is
                one, and otherwise starts anew.
        Raises:
            ValueError: the named checkpoint is damaged, there is none, or another run uses the output folder.
        """
        if isinstance(resume_from_checkpoint, str | os.PathLike) and resume_from_checkpoint != AUTO:
            resume_from_checkpoint = os.path.expanduser(resume_from_checkpoint)
        with self._lock_output_dir():
            checkpoint = self._find_checkpoint(resume_from_checkpoint)
            if checkpoint is not None:
                self.check_resume(checkpoint)
                self._count_steps(checkpoint)
            self._start = None if checkpoint is None else Path(checkpoint).resolve()
            self._has_saved = False
            try:
                with self.training_context():
                    return super().train(checkpoint, *args, **kwargs)
            except (Exception, KeyboardInterrupt) as error:
                if found := folders.list_checkpoints(self.args.output_dir):
                    how = "resume_from_checkpoint=True, or a recipe with --resume_from_checkpoint true"
                    error.add_note(f"The last checkpoint is {found[-1]}: resume with {how}.")
                elif self.state.global_step:
                    error.add_note(f"No checkpoint was written: save_steps={self.args.save_steps}.")
                raise

    def _count_steps(self, checkpoint: str) -> None:
        """Set the checkpoint's numbers of steps for shares of the run, which Trainer would compare with them."""
        state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if 0 < (getattr(self.args, name) or 0) < 1:
                setattr(self.args, name, getattr(state, name))

    @contextmanager
    def _lock_output_dir(self) -> Iterator[None]:
        """Keep other runs out of the output folder, and check that all processes have it."""
        if self.args.should_save:  # Trainer makes it once, and an earlier call that failed may have removed it
            os.makedirs(self.args.output_dir, exist_ok=True)
        lock = OutputLock(self.args.output_dir)
        other = None
        try:
            if self.is_world_process_zero() and (other := lock.wait()) is None:
                folders.finish_renames(self.args.output_dir)  # the other processes wait below before they search it
            if (other := broadcast_object_list([other])[0]) is not None:
                raise ValueError(
                    f"output_dir={self.args.output_dir!r} is in use by another run ({other}); give another "
                    "output_dir, or wait until that run has ended"
                )
            saves = self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint
            if saves and self.args.world_size > 1:
                check_shared(self.args.output_dir, self.args.should_save)
            yield
        finally:
            lock.release()

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """Return the folder to resume from; None to start anew."""
        if isinstance(resume_from_checkpoint, str) and resume_from_checkpoint != AUTO:
            own = find_damage(resume_from_checkpoint) if self.args.should_save else None
            if damage := next(filter(None, gather_object([own])), None):
                raise ValueError(
                    f"resume_from_checkpoint={resume_from_checkpoint!r} {damage}; name an earlier checkpoint, or pass "
                    "True for the last whole one"
                )
            return resume_from_checkpoint
        if not resume_from_checkpoint:
            return None
        found = folders.find_last_intact(self.args.output_dir) if self.is_world_process_zero() else None
        found = broadcast_object_list([found])[0]
        if found is None and resume_from_checkpoint != AUTO:
            raise ValueError(
                f"resume_from_checkpoint=True: {self.args.output_dir} has no whole checkpoint; leave it out to start "
                f"anew, name one that a later start moved to {folders.EARLIER}_<n>, or check output_dir"
            )
        return found

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Private upstream hook: the only point where optimizer, scheduler and trainer state are restored together.
        if checkpoint is not None:
            self.load_run_state(checkpoint)
        with self.loading_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            # Upstream forgets a best checkpoint that was moved, as a whole output folder may be.
            saved = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).best_model_checkpoint
            if saved and (moved := Path(checkpoint).absolute().with_name(Path(saved).name)).is_dir():
                self.state.best_model_checkpoint = str(moved)

    # Saving

    def _get_output_dir(self, trial: object) -> str:
        # Private upstream hook: the only place that says where a checkpoint is written.
        return super()._get_output_dir(trial) if self._staging is None else self._staging

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        # Private upstream hook: upstream writes in place, and one process may finish before another has begun.
        output_dir = Path(self._get_output_dir(trial))
        final = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save and not self._has_saved:
            folders.move_others(output_dir, self._start, self.state.best_model_checkpoint)
        self._has_saved = True
        with self._stage(output_dir) as staging:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self.save_run_state(str(staging / final.name))
            if self.state.best_global_step == self.state.global_step and self.state.best_model_checkpoint:
                self.state.best_model_checkpoint = str(final)
            # Each process flushes and hashes its files, whose names end in its number: rank 0 may not see them yet.
            own = (staging / final.name).glob(f"*_{self.args.process_index}.*")
            each = gather_object([hash_flushed(staging / final.name, own)])
            if self.args.should_save:
                self.state.save_to_json(str(staging / final.name / TRAINER_STATE_NAME))  # names the final folder
                seal(staging / final.name, {} if self.args.save_on_each_node else dict(ChainMap(*each)))
                folders.publish(staging / final.name, final)
            self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            folders.rotate(output_dir, self.args.save_total_limit, final, self.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and tokenizer as Trainer does, and the run's card in place of PEFT's template.

        AutoTokenizer gives a tokenizer of the same class: Mistral's own writes no `tokenizer_config.json`, which names
        it; others write theirs over this one.
        """
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.save_card(str(folder))
            if self.processing_class is not None:
                of_class = json.dumps({"tokenizer_class": type(self.processing_class).__name__})
                (folder / TOKENIZER_CONFIG_FILE).write_text(of_class, encoding="utf-8")
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            super().save_model(output_dir, _internal_call)
            return
        # Upstream gathers frozen weights, too, and each process of DeepSpeed copies them. `_save` is private.
        self._save(str(output_dir or self.args.output_dir), state_dict=self.weights_to_save())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_checkpoint(self) -> None:
        """Write a checkpoint at the present step, and tell the callbacks; Trainer's loop does so by its own rules."""
        self._save_checkpoint(self.model_wrapped, trial=None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    @contextmanager
    def _stage(self, output_dir: Path) -> Iterator[Path]:
        """Redirect Trainer's output to a staging folder, and remove that folder afterwards, even on a full disk."""
        staging = output_dir / folders.STAGING
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._staging = str(staging)
        try:
            yield staging
        except Exception as error:  # torch and safetensors raise their own types on a full disk, some without a reason
            free = shutil.disk_usage(output_dir).free / 2**20
            error.add_note(
                f"The checkpoint at step {self.state.global_step} could not be written; its disk has {free:.0f} MiB "
                "left. Earlier checkpoints are untouched: fix the cause, and resume with resume_from_checkpoint=True."
            )
            raise
        finally:
            self._staging = None
            if self.args.should_save:
                folders.finish_renames(output_dir)  # after an interrupt between two renames
                shutil.rmtree(staging, ignore_errors=True)

    # The Hub

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as Trainer does; an error names the local folder of the model."""
        if not self.args.push_to_hub:  # upstream creates the repository first, and saves nothing if that fails
            self.save_model(_internal_call=True)
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"The push to {self.hub_model_id or 'the Hub'} failed. The model is in {self.args.output_dir}; "
                "call trainer.push_to_hub() to try again."
            )
            raise

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Private upstream hook: upstream pushes before the checkpoint is complete, copies the adapter alone, writes no
        # card, and does not report a failed push.
        if self._staging is not None:
            return
        self.accelerator.wait_for_everyone()  # every process has written its part
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if running and not self.args.hub_always_push:
            return
        self._finish_current_push()  # it reads the folder that is written to next
        for name in self.pushed_folders:
            if (folder := Path(checkpoint_folder) / name).is_dir():
                shutil.copytree(folder, Path(self.args.output_dir) / name, dirs_exist_ok=True)
        self.create_model_card()
        super()._push_from_checkpoint(checkpoint_folder)
        if self.push_in_progress is not None:
            for job in self.push_in_progress.jobs:
                job.add_done_callback(self._warn_of_failed_push)

    def _warn_of_failed_push(self, job: Future) -> None:
        """Log the error of a push in the background."""
        if (error := job.exception()) is not None:
            logger.warning("A push to %s failed: %s: %s", self.hub_model_id, type(error).__name__, error)
