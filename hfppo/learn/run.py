"""The data of one run of `PPOTrainer.train`."""

import time
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from hfppo.collect.check_finite import NonFiniteGuard
from hfppo.config import PPOConfig
from hfppo.learn.micro_batches import MiniBatchSize
from hfppo.learn.optimizer import groups_of, measure_grad_norms, present_rate
from hfppo.metrics import Measures, Meter, UpdateStep, parts, parts_of
from hfppo.models.actor_critic import ActorCritic, TokenOutputs
from hfppo.rollout import Rollout
from hfppo.state import PPOState


class Run:
    """The rollout in use, the optimizer step that is made, and the metrics that are not logged yet."""

    def __init__(self, model: ActorCritic, accelerator: Accelerator, args: PPOConfig):
        self.model, self.accelerator, self.args = model, accelerator, args
        self.rollout: Rollout | None = None  # None before the first one
        self.log = Meter()  # metrics until the next log
        self.steps: list[UpdateStep] = []  # the steps on the rollout in use
        self.guard = NonFiniteGuard(accelerator)
        self._rates: list[tuple[dict[str, Any], Any]] = []  # the actor's groups in a step, each with its own rate
        self._step = Meter()  # metrics of one step
        self._moved: set[str] = set()  # of actor and critic, those that a loss moves in this step
        self.flops = 0  # floating-point operations of the step
        self._began = 0.0

    @property
    def parameters(self) -> dict[str, list[nn.Parameter]]:
        """The trainable parameters by owner."""
        return {"actor": self.model.actor_parameters(), "critic": self.model.critic_parameters()}

    @property
    def has_two_graphs(self) -> bool:
        """Whether actor and critic share no states, and the engine allows a backward pass without some weights."""
        critic, args = self.model.critic, self.args
        if critic is None or critic.is_shared or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return False
        return args.world_size == 1 or args.ddp_find_unused_parameters is not False

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self._step, self.flops, self._moved = Meter(), 0, set()
        self._began = time.perf_counter()

    def measure(self, measures: Measures) -> None:
        """Add measures to the step and to the next log."""
        self.log.update(measures)
        self._step.update(measures)

    def connect(self, loss: Tensor, outputs: TokenOutputs, size: MiniBatchSize, plan: "StepPlan") -> Tensor:
        """Note what a loss moves, and return the loss with a graph for its backward pass.

        A loss without a term of a weight above 0, or without a token that counts, moves nothing.
        """
        if loss.requires_grad:
            counts = {"actor": size.actor.tokens, "critic": size.critic.tokens}
            self._moved |= {name for name in plan.moved if counts[name]}
        needs_all = self.args.world_size > 1 and self.args.ddp_find_unused_parameters is False
        if loss.requires_grad and not needs_all:
            return loss
        return loss + sum(0.0 * x.sum() for x in outputs if x is not None and x.requires_grad)

    def clip(self, max_norm: float, step: int) -> Tensor:
        """Clip the gradients of actor and critic separately, so that a large one does not shrink the other's step.

        DeepSpeed has clipped both together before this call; then the joint norm is returned.

        Args:
            max_norm: inf measures without clipping.
            step: number of the step, for errors; 0 in critic pretraining.
        Returns:
            The norm of the actor's gradient; the critic's in critic-only steps.
        Raises:
            NonFiniteError: a loss or gradient is not finite on some process.
        """
        self.accelerator.unscale_gradients()
        parameters = self.parameters
        norms = measure_grad_norms(self.accelerator, parameters)
        if "critic" in norms and self.accelerator.is_main_process:  # once: a log may span two numbers of processes
            self.measure({"value/grad_norm": parts(norms["critic"])})
        self.guard.check(norms, self.model, step)
        for name, norm in norms.items():
            nn.utils.clip_grads_with_norm_(parameters.get(name, []), max_norm, norm)
        return next(iter(norms.values()))

    def before_step(self, optimizer: Optimizer, rate_factor: float) -> None:
        """Freeze weights that no loss moves, scale the actor's learning rate, and measure both rates of the step.

        Callbacks may have changed the optimizer's rates; its scheduler does not see that.
        """
        parameters = self.parameters
        for name in parameters.keys() - self._moved:
            for parameter in parameters[name]:  # without gradient: no decay, no momentum, no changed bit
                parameter.grad = None
        self._rates = [(group, group["lr"]) for group in groups_of(optimizer, parameters["actor"])]
        for group, rate in self._rates:
            group["lr"] = rate * rate_factor
        self.measure({"learning_rate": parts_of(present_rate(optimizer, parameters["actor"], 0))})
        if parameters["critic"]:
            self.measure({"critic_learning_rate": parts_of(present_rate(optimizer, parameters["critic"], -1))})

    def end_step(self, number: int) -> UpdateStep:
        """Restore the unscaled learning rates, from which the schedule computes the next ones, and return the step.

        Its metrics are over all processes. A collective call.

        Args:
            number: the step's number on the rollout in use, from 0.
        """
        for group, rate in self._rates:
            group["lr"] = rate
        seconds = time.perf_counter() - self._began
        self.log.update({"time/update": parts_of(self.args.updates_per_rollout * seconds)})
        self.log.update({"time/update_tflops": parts_of(self.flops / seconds / 1e12)})
        epoch, mini_batch = divmod(number, self.args.num_mini_batches)
        self.steps.append(UpdateStep(epoch, mini_batch, self._step.gather()))
        return self.steps[-1]


@dataclass(frozen=True)
class StepPlan:
    """The passes that a step makes on the rollout in use, and the weights that it moves."""

    epoch: int  # number of the pass over the rollout, from 0
    policy: bool  # whether the actor's losses are computed: never in critic pretraining
    values: bool  # whether the critic's losses are computed, and the critic moves
    warms_up: bool  # whether the rollout belongs to `critic_warmup`, in which the actor does not move

    @classmethod
    def of(cls, step: int, state: PPOState, args: PPOConfig) -> "StepPlan":
        """Return the plan of the step after `step` others; during `critic_warmup` the critic moves in all of them.

        After the last step on a rollout, this is the plan of the next rollout's first step.
        """
        epoch = (step - state.first_step) % args.updates_per_rollout // args.num_mini_batches
        pretrains = state.rollouts == 0 and state.pretraining_rollouts > 0
        warms_up = state.rollouts <= args.critic_warmup
        return cls(
            epoch=epoch,
            policy=epoch < args.num_ppo_epochs and not pretrains,
            values=warms_up or (epoch >= args.num_ppo_epochs if args.critic_follows else epoch < args.critic_epochs),
            warms_up=warms_up,
        )

    @property
    def moved(self) -> set[str]:
        """Of actor and critic, those whose weights change."""
        moves = {"actor": self.policy and not self.warms_up, "critic": self.values}
        return {name for name, moved in moves.items() if moved}

    def apart(self) -> list["StepPlan"]:
        """Return a plan for the actor's losses and a plan for the critic's; only one if the other has no losses."""
        both = self.policy and self.values
        return [replace(self, values=False), replace(self, policy=False)] if both else [self]
