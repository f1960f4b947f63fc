"""Critic pretraining: fit the critic to the returns of the fixed starting policy, until that no longer helps.

VC-PPO, arXiv:2503.01491. Departures from the paper: prompts are held out, the number of epochs follows from them, and
the best weights are kept.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hfppo import functional as F
from hfppo.collect.check_finite import NonFiniteError
from hfppo.collect.collector import Collector
from hfppo.collect.forward import autocast
from hfppo.learn.micro_batches import MiniBatchSize, cut_mini_batch, join_sequences
from hfppo.models.actor_critic import TokenOutputs
from hfppo.models.packing import rows_at_once
from hfppo.rollout import Rollout
from hfppo.run_state import PretrainingProgress
from hfppo.seeds import HELD_OUT_STREAM, PRETRAINING_STREAM, stream_seed

HELD_OUT_SHARE = 8  # one prompt in so many is held out
PARTS = ("start", "middle", "end")  # thirds of a completion
PROMPT_FIELDS = ("prompt_ids", "prompt_mask")  # of a rollout; padded on the left


class CriticPretraining:
    """The critic's fit to λ = 1 returns, which can be saved and continued between any two of its steps.

    The steps are made by the run's optimizer, so that PPO begins with its moments: Adam's first steps without any
    would move each weight by the whole rate, and undo much of the fit.

    Args:
        collector: of the run; its models are trained, its configuration applies but for λ.
        progress: where the fit stands; changed in place.
    """

    def __init__(self, collector: Collector, progress: PretrainingProgress):
        self.args, self.accelerator, self.model = collector.args, collector.accelerator, collector.model
        args = copy.copy(self.args)
        args.lam_critic = 1.0
        self.collector = replace(collector, args=args)
        self.progress = progress
        self.rollouts: list[Rollout] = []  # this process's rows
        self.best: dict[str, Tensor] = {}  # the critic's weights after the best epoch so far
        self.saved_at = progress.work
        self.logged_at = time.perf_counter()

    # The fit

    def run(
        self,
        optimizer: AcceleratedOptimizer,
        collect: Callable[[], Rollout],
        log: Callable[[dict[str, float]], None],
        show: Callable[[float], None],
    ) -> Iterator[None]:
        """Collect, fit, and keep the best weights; yield wherever the state can be saved.

        Args:
            optimizer: of the run; its learning rates are changed.
            collect: returns the next rollout.
            log: takes the metrics of an epoch.
            show: takes the share of the rollouts, or of an epoch, that is done.
        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite.
        """
        progress, wanted = self.progress, self.args.critic_pretraining_rollouts
        while len(self.rollouts) < wanted:
            self.rollouts.append(collect())
            progress.completions += len(self.rollouts[-1]) * self.accelerator.num_processes
            progress.work += self.args.updates_per_rollout
            show(len(self.rollouts) / wanted)
            yield
        rows = join_rollouts([self.collector.restore_base_states(rollout) for rollout in self.rollouts])
        self.rollouts = [replace(rollout, base_states=None) for rollout in self.rollouts]  # `rows` holds them
        held_out = rows_held_out(rows, self.args.seed, self.accelerator.process_index)
        num_steps = self.count_steps(int((~held_out).sum()))
        training = rows.select((~held_out).nonzero().flatten())
        testing = rows.select(held_out.nonzero().flatten()) if held_out.any() else None
        del rows
        if not progress.held_out:
            self.measure(testing, log)
        while not self.is_over():
            self.set_learning_rate(optimizer)
            for index in range(progress.step, num_steps):
                progress.loss += self.step(self.mini_batch(training, index, num_steps), optimizer)
                progress.step += 1
                progress.work += 1
                show(progress.step / num_steps)
                if progress.step == num_steps:
                    progress.epoch += 1
                    self.measure(testing, log, training_loss=sum(gather_object([progress.loss])) / num_steps)
                    progress.step, progress.loss = 0, 0.0
                yield
        progress.done = True

    def save_is_due(self, save_steps: int) -> bool:
        """Whether `save_steps` steps were made since this was last the case."""
        if due := self.progress.work >= self.saved_at + save_steps:
            self.saved_at = self.progress.work
        return due

    def is_over(self) -> bool:
        """Whether the last `critic_pretraining_patience` epochs explained no more, or the limit is reached."""
        waited = self.progress.epoch - self.progress.best_epoch
        return waited >= self.args.critic_pretraining_patience or (
            self.progress.epoch >= self.args.critic_pretraining_epochs
        )

    def set_learning_rate(self, optimizer: AcceleratedOptimizer) -> None:
        """Set the rate of the fit, halved for each epoch so far that explained no more than those before it."""
        args = self.args
        first = (
            args.critic_lr if args.critic_pretraining_learning_rate is None else args.critic_pretraining_learning_rate
        )
        explained = [measured.get("r2", -math.inf) for measured in self.progress.held_out]
        without_gain = sum(now <= max(explained[:i]) for i, now in enumerate(explained) if i)
        for group in optimizer.param_groups:  # also the actor's, which has no gradient
            group["lr"] = first / 2**without_gain

    def count_steps(self, rows: int) -> int:
        """Return the optimizer steps of an epoch, the same on every process. A collective call.

        Args:
            rows: that this process trains on.
        """
        fewest = min(gather_object([rows]))
        if fewest == 0:
            raise ValueError(
                f"critic_pretraining_completions={self.args.critic_pretraining_completions} are so few that a process "
                "has none to train on beside those that are held out; raise it"
            )
        return max(1, fewest // (self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps))

    def mini_batch(self, training: Rollout, index: int, num_steps: int) -> Rollout:
        """Return this process's rows for a step of the epoch that is running."""
        seed = stream_seed(self.args.seed, PRETRAINING_STREAM, self.progress.epoch, self.accelerator.process_index)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
        return training.select(order.tensor_split(num_steps)[index])

    def step(self, mini_batch: Rollout, optimizer: AcceleratedOptimizer) -> float:
        """Make one optimizer step, and return this process's share of the loss.

        The model is called without DDP's wrapper, which would wait for the actor's gradients.

        Raises:
            NonFiniteError: the loss or the gradient is NaN or infinite.
        """
        args, scaler = self.args, self.accelerator.scaler
        size = MiniBatchSize.of(mini_batch, self.accelerator)
        num_micro_batches = min(args.gradient_accumulation_steps, len(mini_batch))
        inputs = cut_mini_batch(mini_batch, num_micro_batches, args.max_tokens_per_micro_batch, self.accelerator)
        total = 0.0
        self.model.train()
        with self.critic_alone():
            # As many pieces on each process; one with fewer rows has empty ones.
            for piece in (piece for micro_batch in inputs for piece in micro_batch["pieces"] if len(piece)):
                batch = piece.to(args.device)
                loss = self.loss(self.values(batch), batch, size)
                scaled = args.vf_coef * loss  # as PPO's, so that the optimizer's moments fit it
                (scaled if scaler is None else scaler.scale(scaled)).backward()
                total += float(loss.detach())
        self.reduce_gradients()
        self.accelerator.unscale_gradients(optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.critic_parameters(), args.max_grad_norm or math.inf)
        # float16's scaler leaves a step out whose gradient overflowed.
        if not math.isfinite(total) or (scaler is None and not norm.isfinite()):
            raise NonFiniteError(
                f"the loss ({total}) or its gradient ({float(norm)}) is not finite in epoch "
                f"{self.progress.epoch + 1} of critic pretraining; lower critic_pretraining_learning_rate, or scale "
                "the scores"
            )
        optimizer.step()
        optimizer.zero_grad()
        return total

    def values(self, batch: Rollout) -> Tensor:
        """Return V(s_t), (B, T), of rows on the device."""
        with autocast(self.accelerator):
            outputs: TokenOutputs = self.model(
                **join_sequences(batch), completion_mask=batch.mask, policy=False, base_states=batch.base_states
            )
        assert outputs.values is not None
        return outputs.values

    def loss(self, values: Tensor, batch: Rollout, size: MiniBatchSize) -> Tensor:
        """Return ½·(V − R)², reduced as the losses of PPO; the scalars of a mini-batch's pieces add up."""
        assert batch.returns is not None
        per_token = F.value_loss(values, values.detach(), batch.returns, clip_range=None)
        reduction, longest = self.args.loss_reduction, self.args.max_completion_length
        return F.reduce(per_token, batch.loss_mask, reduction, size.num_tokens, size.num_completions, longest)

    @contextmanager
    def critic_alone(self) -> Iterator[None]:
        """Keep the gradient of the block from the actor, whose states a shared critic reads."""
        critic = self.model.critic
        assert critic is not None
        before, critic.detach = critic.detach, True
        try:
            yield
        finally:
            critic.detach = before

    def reduce_gradients(self) -> None:
        """Add up the gradients of all processes, in one tensor."""
        if self.accelerator.num_processes == 1:
            return
        parameters = self.model.critic_parameters()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self.accelerator.reduce(torch.cat([x.flatten() for x in gradients]), "sum")
        for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    # The held-out part

    @torch.no_grad()
    def measure(
        self, testing: Rollout | None, log: Callable[[dict[str, float]], None], training_loss: float | None = None
    ) -> None:
        """Measure the critic on the held-out rows and log it; keep its weights, or return to the best. Collective.

        Args:
            training_loss: mean of the epoch's losses.
        """
        sums = torch.zeros(1 + len(PARTS), 4, dtype=torch.float64)
        if testing is not None:
            longest = int(testing.lengths.max())
            size = rows_at_once(self.args.local_rollout_forward_batch_size, longest, self.args.device)
            for batch in testing.micro_batches(-(-len(testing) // size)):
                sums += sum_by_part(self.values(batch.to(self.args.device)).cpu(), batch)
        everywhere = torch.tensor(gather_object([sums.tolist()]), dtype=torch.float64).sum(dim=0)
        names = ["r2", *(f"r2_{part}" for part in PARTS)]
        measured = {name: r_squared(*part) for name, part in zip(names, everywhere.tolist(), strict=True)}
        measured = {name: value for name, value in measured.items() if math.isfinite(value)}
        self.progress.held_out.append(measured)
        if self.progress.best_epoch == self.progress.epoch:
            self.best = {name: p.detach().cpu().clone() for name, p in self.named_parameters().items()}
        else:
            self.restore_best()  # at a rate that is too high, an epoch may lose what those before it learned
        logs = {f"critic_pretraining/{name}": value for name, value in measured.items()}
        if training_loss is not None:
            logs["critic_pretraining/loss"] = training_loss
        before, self.logged_at = self.logged_at, time.perf_counter()
        seconds = {"time/critic_pretraining": self.logged_at - before}
        log({"critic_pretraining/epoch": self.progress.epoch, **logs, **seconds})

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the critic's trainable parameters by name."""
        assert self.model.critic is not None
        return {name: p for name, p in self.model.critic.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def restore_best(self) -> None:
        """Give the critic the weights of the best epoch."""
        for name, parameter in self.named_parameters().items():
            parameter.copy_(self.best[name])

    # Checkpoints

    def file(self, folder: str | Path) -> Path:
        """Return the path of this process's tensors in a checkpoint."""
        return Path(folder) / f"critic_pretraining_{self.accelerator.process_index}.safetensors"

    def save(self, folder: str | Path) -> None:
        """Write rollouts and best weights into a checkpoint, which holds critic and optimizer already."""
        tensors = {f"best.{name}": tensor for name, tensor in self.best.items()}
        for i, rollout in enumerate(self.rollouts):
            tensors |= {f"rollout.{i}.{name}": tensor.clone() for name, tensor in rollout.stored_tensors().items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.file(folder))

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote."""
        tensors = load_file(self.file(folder))
        self.best = select_prefix(tensors, "best.")
        kept = 0
        while of_rollout := select_prefix(tensors, f"rollout.{kept}."):
            self.rollouts.append(Rollout(**of_rollout))
            kept += 1


def select_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def join_rollouts(rollouts: list[Rollout]) -> Rollout:
    """Return the rows of several rollouts in one, with prompts padded on the left and completions on the right."""
    each = [rollout.tensors() for rollout in rollouts]
    return Rollout(**{name: join_rows([x[name] for x in each], left=name in PROMPT_FIELDS) for name in each[0]})


def join_rows(parts: list[Tensor], left: bool) -> Tensor:
    """Join (B,) tensors, or (B, T) tensors of several widths, padded with 0 on one side."""
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    missing = [width - part.shape[1] for part in parts]
    return torch.cat(
        [nn.functional.pad(part, (n, 0) if left else (0, n)) for part, n in zip(parts, missing, strict=True)]
    )


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
