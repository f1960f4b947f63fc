"""Pushing to the Hub: what `transformers.Trainer` leaves out of it."""

import logging
import shutil
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from hfppo.models.critic import CRITIC_FOLDER

logger = logging.getLogger(__name__)


class HubTrainer(Trainer):
    """A Trainer whose pushes hold the critic and the model card, and whose failed pushes are heard of."""

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `push_to_hub`; an error says where everything lies."""
        if not self.args.push_to_hub:  # upstream makes the repository first, and saves nothing where that fails
            self.save_model(_internal_call=True)
        try:
            return super().push_to_hub(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"The push to {self.hub_model_id or 'the Hub'} has failed. The model lies in {self.args.output_dir}; "
                "trainer.push_to_hub() tries again."
            )
            raise

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Private; upstream copies the adapter alone into the folder that it pushes, and writes no card.
        self.accelerator.wait_for_everyone()  # every process has written its part of the checkpoint
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if self.push_in_progress is not None and not self.push_in_progress.is_done() and not self.args.hub_always_push:
            return
        self._finish_current_push()  # it reads the folder that is written now
        if (critic := Path(checkpoint_folder) / CRITIC_FOLDER).is_dir():
            shutil.copytree(critic, Path(self.args.output_dir) / CRITIC_FOLDER, dirs_exist_ok=True)
        self.create_model_card()
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        # Private; upstream forgets that a push in the background has failed.
        super()._finish_current_push()
        push, self.push_in_progress = getattr(self, "push_in_progress", None), None
        for job in [] if push is None else push.jobs:
            if (error := job.exception()) is not None:
                logger.warning("A push to %s has failed: %s: %s", self.hub_model_id, type(error).__name__, error)
