"""Critic pretraining: fit the critic to the returns of the fixed starting policy, as long as it improves.

VC-PPO, arXiv:2503.01491. Departures from the paper: some rollouts are held out, the number of epochs follows from
them, and the best running average of the weights is kept.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hfppo import functional as F
from hfppo.collect.collector import Collector
from hfppo.collect.forward import single_pass
from hfppo.learn.micro_batches import MiniBatchSize, cut_mini_batch
from hfppo.learn.run import Run
from hfppo.metrics import Meter, parts
from hfppo.models.actor_critic import Want
from hfppo.rollout import Rollout
from hfppo.state import PRETRAINING_STREAM

HELD_OUT_SHARE = 8  # one rollout in this many is held out
PATIENCE = 3  # epochs without gain that halve the rate; as many again end the fit
MAX_EPOCHS = 50


def with_full_returns(collector: Collector) -> Collector:
    """Return a collector whose returns sum up all rewards that follow: λ = 1."""
    args = copy.copy(collector.args)
    args.lam_critic = 1.0
    return replace(collector, args=args)


@dataclass(frozen=True)
class CriticPretraining:
    """The critic's fit to λ = 1 returns, in the trainer's own steps. Every method is a collective call.

    PPO continues with the moments of these steps. Fresh Adam moments would make full-size first steps and undo much of
    the fit.
    """

    run: Run
    optimizer: Optimizer
    backward: Callable[[list[Rollout], MiniBatchSize], object]  # `PPOTrainer.training_step` on micro-batches
    log: Callable[[dict[str, float]], None]  # takes the metrics of an epoch

    def fit(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Fit the critic, restore the best epoch's weights, and return the metrics for `all_results.json`.

        Args:
            rollouts: at least two, with this process's rows; the last ones are held out.
        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite.
        """
        num_training = len(rollouts) - math.ceil(len(rollouts) / HELD_OUT_SHARE)
        training, held_out = rollouts[:num_training], rollouts[num_training:]
        parameters, rate = self.run.model.critic_parameters(), self.run.args.critic_lr
        best, best_epoch, weights = self.r_squared(held_out), 0, copies(parameters)
        average = [parameter.detach().clone() for parameter in parameters]
        self.log({"critic_pretraining/epoch": 0, "critic_pretraining/r2": best})
        for epoch in range(1, MAX_EPOCHS + 1):
            loss, present = self.train_epoch(training, epoch, rate, average), copies(parameters)
            restore(parameters, average)
            r2 = self.r_squared(held_out)
            if r2 > best:
                best, best_epoch, weights = r2, epoch, copies(parameters)
            elif epoch == best_epoch + PATIENCE:  # the rate may be too high
                present, rate = weights, rate / 2
                restore(average, weights)
            measured = {"epoch": epoch, "loss": loss, "r2": r2}
            self.log({f"critic_pretraining/{name}": value for name, value in measured.items()})
            if epoch == best_epoch + 2 * PATIENCE:
                break
            restore(parameters, present)
        restore(parameters, weights)
        completions = sum(map(len, rollouts)) * self.run.args.world_size
        results = {"r2": best, "completions": completions, "epochs": epoch}
        return {f"critic_pretraining_{name}": value for name, value in results.items()}

    def train_epoch(self, training: list[Rollout], epoch: int, rate: float, average: list[Tensor]) -> float:
        """Train the critic once on each rollout, update its average, and return the mean loss per token.

        The weights' running average, over about as many steps as an epoch has, overfits later than the weights do.
        The schedule of the learning rate begins with PPO: its warmup, which starts at 0, does not apply here.
        """
        args, scheduled = self.run.args, [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for number, rollout in enumerate(training):
            seed = (args.seed, PRETRAINING_STREAM, epoch, number)
            sizes = args.num_mini_batches, seed, args.num_generations, args.process_index
            for index in range(args.num_mini_batches):
                self.step(rollout.mini_batch(index, *sizes))
                for mean, parameter in zip(average, self.run.model.critic_parameters(), strict=True):
                    mean.lerp_(parameter.detach(), 1 / (len(training) * args.num_mini_batches))
        for group, lr in zip(self.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = lr
        return self.run.log.read().get("value/loss", 0.0)

    def step(self, mini_batch: Rollout) -> None:
        """Make an optimizer step, as Trainer's loop does."""
        args, accelerator = self.run.args, self.run.accelerator
        self.run.begin_step()
        cut = cut_mini_batch(
            self.run.model, mini_batch, args.gradient_accumulation_steps, args.max_tokens_per_micro_batch, accelerator
        )
        pieces = [piece for micro_batch in cut for piece in micro_batch["pieces"]]
        self.backward(pieces, MiniBatchSize.of(mini_batch, accelerator))
        self.run.clip(args.max_grad_norm, 0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def r_squared(self, held_out: list[Rollout]) -> float:
        """Return R² = 1 − mean (V − R)²/Var(R), the coefficient of determination; 0 where the returns do not vary.

        The explained variance, 1 − Var(V − R)/Var(R), does not count the error of the mean.
        """
        run, meter = self.run, Meter()
        for rollout in held_out:
            values = single_pass(run.model, rollout, run.accelerator, run.args, Want(policy=False)).values
            assert values is not None
            assert rollout.returns is not None
            loss = parts(F.value_loss(values, rollout.returns), rollout.fitted)
            meter.update({"value/loss": loss, "value/return_std": parts(rollout.returns, rollout.fitted)})
        found = meter.read()
        deviation = found.get("value/return_std", 0.0)
        return 1 - 2 * found["value/loss"] / deviation**2 if deviation > 1e-6 else 0.0


def copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return copies of the weights in the CPU's memory."""
    return [parameter.detach().cpu().clone() for parameter in parameters]


@torch.no_grad()
def restore(parameters: Sequence[Tensor], weights: list[Tensor]) -> None:
    """Copy the weights into the parameters."""
    for parameter, tensor in zip(parameters, weights, strict=True):
        parameter.copy_(tensor)
