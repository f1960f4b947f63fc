"""PPO's part of saving and loading a run, in the places where Trainer does its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hfppo.checkpoint import RunDescription, check_checkpoint, load_ppo_state, own_rates, save_ppo_state
from hfppo.metrics import Meter
from hfppo.models.actor_critic import ActorCritic
from hfppo.rollout import Rollout
from hfppo.run_state import PPOState
from hfppo.saving.crash_safe import CrashSafeTrainer


@dataclass(frozen=True)
class StepStart:
    """What was not yet logged when a step was begun."""

    step: int  # optimiser steps made
    metrics: dict[str, Any]


class ResumableTrainer(CrashSafeTrainer):
    """A trainer whose checkpoints hold the state of PPO, the rollout in use and the critic, and bring them back."""

    model: ActorCritic
    ppo_state: PPOState
    _rollout: Rollout | None
    _meter: Meter
    _step_start: StepStart | None  # of the last step; None where checkpoints are written after steps alone
    _run: RunDescription

    def _save_rng_state(self, output_dir: str) -> None:
        # Private, but it runs on every process for every kind of checkpoint; `on_save` runs after the fact.
        super()._save_rng_state(output_dir)
        in_use = self._rollout if self.state.global_step < self.ppo_state.last_step else None
        # With `enable_jit_checkpoint` within a step, which the resumed run makes from its beginning.
        start = self._step_start
        within = start is not None and start.step == self.state.global_step
        metrics = start.metrics if within else self._meter.state_dict()
        save_ppo_state(output_dir, self.args.process_index, self._run, self.ppo_state, metrics, in_use)

    def _checkpoint_for(self, resume_from_checkpoint: str | bool | None) -> str | bool | None:
        found = super()._checkpoint_for(resume_from_checkpoint)
        if isinstance(found, str):
            check_checkpoint(found, self.args.process_index, self._run)
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Private; upstream loads the adapter only.
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.model.load_critic(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        # Private; upstream loads the adapter only.
        super()._load_best_model()
        if Path(self.state.best_model_checkpoint).is_dir():  # else upstream has warned that it is gone
            self.model.load_critic(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Private, but the one place where all that training has to go on with is loaded.
        if checkpoint is not None:
            loaded = load_ppo_state(checkpoint, self.args.process_index, self._run, self._meter)
            self.ppo_state, self._rollout = loaded
        with own_rates(self.optimizer, self.lr_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)
