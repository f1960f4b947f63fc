"""Checkpoints at SIGTERM that contain all logs of the steps before them."""

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback


class JustInTimeCallback(TrainerCallback):
    """Save between steps; upstream's callback for `enable_jit_checkpoint` saves before a step is logged.

    Args:
        upstream: the callback that Trainer made; its signal handler is in place.
    """

    def __init__(self, upstream: JITCheckpointCallback):
        self.trainer, self.jit_manager, self._upstream = upstream.trainer, upstream.jit_manager, upstream
        self._may_save = self._saved = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        """Begin a run."""
        # Before the first step of a resumed run the checkpoint's random state is not loaded yet, and FSDP2 cannot load
        # an optimizer that has made no step.
        self._may_save = state.global_step == 0 and args.world_size == 1
        self._saved = False

    @property
    def is_asked(self) -> bool:
        """Whether a signal asked a process of the run to save. A collective call."""
        accelerator = self.trainer.accelerator
        own = torch.tensor(float(self.jit_manager.is_checkpoint_requested), device=accelerator.device)
        return bool(accelerator.reduce(own, "sum") > 0)

    def save_between_steps(self, control: TrainerControl) -> bool:
        """Save and end the run if a signal asked for it; return whether it did. Call it after a step was logged.

        A collective call: a signal to one process suffices, and all save between the same two steps.
        """
        if asked := self._may_save and self.is_asked:
            self.jit_manager.is_checkpoint_requested = False
            control.should_training_stop = self._saved = True
            # Not upstream's `execute_jit_checkpoint`, which marks unfinished checkpoints in a folder of their name.
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
        return asked

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        """Only note the step: it is logged and evaluated after this event."""
        self._may_save = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        """Save the run's last step once it is logged; log nothing more if a signal ended the run."""
        if self._saved:
            control.should_log = control.should_evaluate = control.should_save = False
        elif control.should_training_stop and self.is_asked:
            self.jit_manager.is_checkpoint_requested = False
            control.should_save = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        """Restore the signal's handler."""
        self._upstream.on_train_end(args, state, control)
