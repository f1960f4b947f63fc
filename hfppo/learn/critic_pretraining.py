"""Critic pretraining: fit the critic to the returns of the fixed starting policy, until that no longer helps.

VC-PPO, arXiv:2503.01491. Departures from the paper: prompts are held out, the number of epochs follows from them, and
the best weights are kept.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor, nn

from hfppo import functional as F
from hfppo.collect.collector import Collector
from hfppo.collect.forward import autocast
from hfppo.config import PPOConfig
from hfppo.learn.micro_batches import MiniBatchSize, cut_mini_batch, join_sequences
from hfppo.learn.nonfinite_guard import NonFiniteGuard
from hfppo.learn.optimizer import GradientClipper
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.layout import rows_at_once
from hfppo.rollout import Rollout, join_rollouts
from hfppo.state import HELD_OUT_STREAM, PRETRAINING_STREAM, stream_seed

HELD_OUT_SHARE = 8  # one prompt in so many is held out
PATIENCE = 3  # epochs without gain that end the fit
MAX_EPOCHS = 50
PARTS = ("start", "middle", "end")  # thirds of a completion
REMEDY = "This was a step of critic pretraining: lower critic_pretraining_learning_rate, or scale the scores."


def with_full_returns(collector: Collector) -> Collector:
    """Return a collector whose returns sum up all rewards that follow: λ = 1."""
    args = copy.copy(collector.args)
    args.lam_critic = 1.0
    return replace(collector, args=args)


@dataclass(frozen=True)
class CriticPretraining:
    """The critic's fit to λ = 1 returns. Every method is a collective call.

    The run's optimizer makes the steps, and PPO continues with its moments. Fresh Adam moments would make full-size
    first steps and undo much of the fit.
    """

    model: ActorCritic
    accelerator: Accelerator
    args: PPOConfig
    optimizer: AcceleratedOptimizer
    log: Callable[[dict[str, float]], None]  # takes the metrics of an epoch

    def fit(self, rollouts: list[Rollout], began: float) -> dict[str, float]:
        """Fit the critic, keep the weights of the best epoch, and return its measures as in `all_results.json`.

        Args:
            rollouts: this process's rows.
            began: time at which their collection began.
        Raises:
            ValueError: a process has no completion to train on.
            NonFiniteError: a loss or gradient is NaN or infinite.
        """
        args, parameters = self.args, self.model.critic_parameters()
        rows = join_rollouts(rollouts)
        held_out = rows_held_out(rows, args.seed, args.process_index)
        training, testing = (rows.select(chosen.nonzero().flatten()) for chosen in (~held_out, held_out))
        if (fewest := min(gather_object([len(training)]))) == 0:
            raise ValueError(
                f"critic_pretraining_completions={args.critic_pretraining_completions} are so few that a process "
                "has none to train on beside those that are held out; raise it"
            )
        num_steps = max(1, fewest // (args.per_device_train_batch_size * args.gradient_accumulation_steps))
        rate = args.critic_pretraining_learning_rate or args.critic_lr
        best: dict[str, float] = {}
        best_epoch, weights = 0, []
        with self.critic_alone():
            for epoch in range(MAX_EPOCHS + 1):  # 0 is the critic before the fit
                loss = {"loss": self.train_epoch(training, epoch, num_steps, rate)} if epoch else {}
                measured = self.measure(testing)
                if epoch == 0 or measured.get("r2", -math.inf) > best.get("r2", -math.inf):
                    best, best_epoch, weights = measured, epoch, [p.detach().cpu().clone() for p in parameters]
                else:  # at a rate that is too high, an epoch may lose what those before it learned
                    restore(parameters, weights)
                    rate /= 2
                logs = {f"critic_pretraining/{name}": x for name, x in {"epoch": epoch, **measured, **loss}.items()}
                before, began = began, time.perf_counter()
                self.log({**logs, "time/critic_pretraining": began - before})
                if epoch == best_epoch + PATIENCE:
                    break
        results = {**best, "completions": len(rows) * args.world_size, "epochs": epoch}
        return {f"critic_pretraining_{name}": value for name, value in results.items()}

    @contextmanager
    def critic_alone(self) -> Iterator[None]:
        """Keep the block's gradient from the actor, whose states a shared critic reads; restore the rates after it."""
        critic, groups = self.model.critic, self.optimizer.param_groups
        assert critic is not None
        detach, rates = critic.detach, [group["lr"] for group in groups]
        critic.detach = True
        try:
            yield
        finally:
            critic.detach = detach
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def train_epoch(self, training: Rollout, epoch: int, num_steps: int, rate: float) -> float:
        """Make the steps of an epoch, counted from 1, and return the mean of their losses."""
        for group in self.optimizer.param_groups:  # also the actor's, which has no gradient
            group["lr"] = rate
        seed = (self.args.seed, PRETRAINING_STREAM, epoch - 1, self.args.process_index)
        mini_batches = (training.mini_batch(index, num_steps, seed) for index in range(num_steps))
        loss = sum(self.step(rows, (epoch - 1) * num_steps + i) for i, rows in enumerate(mini_batches, start=1))
        return sum(gather_object([loss])) / num_steps

    def step(self, mini_batch: Rollout, number: int) -> float:
        """Make one optimizer step, and return this process's share of the loss.

        The model is called without DDP's wrapper, which would wait for the actor's gradients.
        """
        args, guard = self.args, NonFiniteGuard(self.accelerator, REMEDY)
        size = MiniBatchSize.of(mini_batch, self.accelerator)
        num_micro_batches = min(args.gradient_accumulation_steps, len(mini_batch))
        inputs = cut_mini_batch(mini_batch, num_micro_batches, args.max_tokens_per_micro_batch, self.accelerator)
        total = 0.0
        self.model.train()
        for piece in (piece for micro_batch in inputs for piece in micro_batch["pieces"] if len(piece)):
            batch = piece.to(args.device)
            values = self.values(batch)
            per_token = F.value_loss(values, values.detach(), cast(Tensor, batch.returns), clip_range=None)
            reduction, longest = args.loss_reduction, args.max_completion_length
            loss = F.reduce(per_token, batch.loss_mask, reduction, size.num_tokens, size.num_completions, longest)
            guard.record(batch, loss, {"value/loss": per_token})
            self.accelerator.backward(args.vf_coef * loss)  # as PPO's, so that the optimizer's moments fit it
            total += float(loss.detach())
        self.sum_gradients()
        clipper = GradientClipper(self.model, self.accelerator, guard)
        clipper.clip(args.max_grad_norm, self.optimizer, number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def values(self, batch: Rollout) -> Tensor:
        """Return V(s_t), (B, T), of rows on the device."""
        inputs = {**join_sequences(batch), "completion_mask": batch.mask, "base_states": batch.base_states}
        with autocast(self.accelerator):
            return self.model(**inputs, policy=False).values

    def sum_gradients(self) -> None:
        """Add up the gradients of all processes, in one tensor."""
        if self.accelerator.num_processes > 1:
            parameters = self.model.critic_parameters()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            total = self.accelerator.reduce(torch.cat([x.flatten() for x in gradients]), "sum")
            for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)

    @torch.no_grad()
    def measure(self, testing: Rollout) -> dict[str, float]:
        """Return R² on the held-out rows, in all and by part, where the returns vary."""
        sums = torch.zeros(1 + len(PARTS), 4, dtype=torch.float64)
        if len(testing):
            longest = int(testing.lengths.max())
            size = rows_at_once(self.args.local_rollout_forward_batch_size, longest, self.args.device)
            for batch in testing.micro_batches(-(-len(testing) // size)):
                sums += sum_by_part(self.values(batch.to(self.args.device)).cpu(), batch)
        everywhere = torch.tensor(gather_object([sums.tolist()]), dtype=torch.float64).sum(dim=0)
        names = ("r2", *(f"r2_{part}" for part in PARTS))
        measured = {name: r_squared(*part) for name, part in zip(names, everywhere.tolist(), strict=True)}
        return {name: value for name, value in measured.items() if math.isfinite(value)}


@torch.no_grad()
def restore(parameters: list[nn.Parameter], weights: list[Tensor]) -> None:
    """Copy the weights into the parameters."""
    for parameter, tensor in zip(parameters, weights, strict=True):
        parameter.copy_(tensor)


def rows_held_out(rollout: Rollout, seed: int, process: int) -> Tensor:
    """Return a (B,) bool mask of the rows to measure on, one prompt in `HELD_OUT_SHARE`. A collective call.

    Prompts are held out whole, on every process the same ones, since a critic may learn a prompt by heart; single rows
    where there are too few different prompts.

    Args:
        process: this one's number.
    """
    prompts = [tuple(ids[mask].tolist()) for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    numbers = [stream_seed(seed, HELD_OUT_STREAM, *prompt) for prompt in prompts]
    different = {number for others in gather_object([numbers]) for number in others}
    if len(different) < HELD_OUT_SHARE:
        numbers = [stream_seed(seed, HELD_OUT_STREAM, process, row) for row in range(len(rollout))]
        different = {number for others in gather_object([numbers]) for number in others}
    last = sorted(different)[-(-len(different) // HELD_OUT_SHARE) - 1]
    return torch.tensor([number <= last for number in numbers])


def sum_by_part(values: Tensor, batch: Rollout) -> Tensor:
    """Return sums over the tokens that count: of all, and of each third of the completions, (1 + 3, 4) float64.

    Args:
        values: (B, T).
    Returns:
        For each part the number of tokens, and the sums of (V − R)², R and R².
    """
    assert batch.returns is not None
    third = 3 * (batch.mask.cumsum(dim=1) - 1) // batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
    parts = torch.stack([batch.loss_mask, *(batch.loss_mask & (third == i) for i in range(len(PARTS)))]).double()
    returns = batch.returns.double()
    terms = torch.stack([torch.ones_like(returns), (values.double() - returns).square(), returns, returns.square()])
    return torch.einsum("pbt,kbt->pk", parts, terms)


def r_squared(count: float, squared_error: float, total: float, squares: float) -> float:
    """Return R² = 1 − mean (V − R)² / Var(R), the coefficient of determination; NaN where the returns do not vary.

    The explained variance, 1 − Var(V − R) / Var(R), does not count the error of the mean.

    Args:
        count: tokens.
        squared_error, total, squares: sums of (V − R)², R and R² over them.
    """
    deviations = squares - total**2 / count if count else 0.0
    return 1 - squared_error / deviations if deviations > 1e-12 * squares else math.nan
