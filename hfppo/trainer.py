"""PPO on the loop of `transformers.Trainer`.

Nothing here loops over training steps. Trainer asks for the batches of an optimiser step, for their loss and for the
optimiser; these hooks answer for PPO.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    set_seed,
)

from hfppo.callbacks.events import PPOCallback, TrainerHooks
from hfppo.checkpoint import describe_run
from hfppo.collect.collector import Collector, grouped
from hfppo.collect.finite import NonFiniteError
from hfppo.config import PPOConfig
from hfppo.data.prompts import Prompts, dataset_of
from hfppo.engine_checks import check_engine, wait_at_exit
from hfppo.evaluation import check_best
from hfppo.generation import Sampler, make_sampler
from hfppo.learn.loss import MiniBatchSize, flat_sequences, loss_terms, measure_kl, measure_update, ppo_loss, sequence
from hfppo.learn.nonfinite import NonFiniteGuard
from hfppo.learn.optimizer import OptimizingTrainer, StepHooks
from hfppo.metrics import Meter
from hfppo.models.compilation import compile_layers
from hfppo.reporting.card import write_card
from hfppo.reporting.defaults import with_default_callbacks
from hfppo.reporting.progress import RunProgress
from hfppo.rewards.contract import RewardFunc
from hfppo.rollout import Rollout
from hfppo.run_state import PPOState
from hfppo.saving.resume import StepStart
from hfppo.seeds import SHUFFLE_STREAM
from hfppo.setup import assemble, check_arguments, check_output_folder, later_prompts
from hfppo.support.out_of_memory import explained_memory


class PPOTrainer(OptimizingTrainer):
    """Proximal Policy Optimisation of a LoRA actor, with the disabled adapter as its reference and a critic.

    Args:
        model: a base or an adapter to train on, loaded or as an id or path.
        reward_funcs: one or several functions after the contract of TRL's GRPOTrainer, see `hfppo.rewards.contract`,
            and reward models, loaded or as an id or path, see `hfppo.rewards.model`.
        args: the configuration.
        train_dataset: a "prompt" column of text or messages; other columns reach the reward functions.
        eval_dataset: the same, or several of them by name.
        processing_class: the tokenizer; None: the model's own.
        peft_config: the actor's adapter; None: LoRA of rank 16 on all linear layers.
        ref_model: the reference; None: the base with the adapter disabled, or a frozen copy of the adapter that
            training starts from.
        critic: "adapter" (its own LoRA on the same base), "shared" (a value head on the actor), a model or its id, or
            a folder or repository with a saved critic.
        callbacks: `PPOCallback`s see rollouts as well.
        compute_metrics: takes an EvalPrediction with `predictions` (completions), `label_ids` (the dataset's columns)
            and `inputs` (prompts).
        reward_processing_classes: a tokenizer for each reward function, alone for a single one; None for functions and
            for a model's own.

    Raises:
        TypeError, ValueError: input that cannot be trained on; before anything is generated.
    """

    args: PPOConfig
    processing_class: PreTrainedTokenizerBase
    loss_is_scaled_for_ga = True  # `compute_loss` divides by the counts of the whole mini-batch

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: RewardFunc | str | PreTrainedModel | Sequence[RewardFunc | str | PreTrainedModel],
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        ref_model: str | PreTrainedModel | None = None,
        critic: str | PreTrainedModel = "adapter",
        callbacks: list[TrainerCallback] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
    ):
        args = PPOConfig() if args is None else args
        check_arguments(model, ref_model, args, callbacks)
        set_seed(args.seed)  # the adapter is initialised here, before Trainer sets the seed
        parts = assemble(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            peft_config,
            ref_model,
            critic,
            reward_processing_classes,
        )
        check_best(args, parts.prompts.eval, parts.rewards, compute_metrics)
        super().__init__(
            model=parts.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=parts.tokenizer,
            callbacks=[
                *with_default_callbacks(callbacks, args.log_completions),
                TrainerHooks(lambda: self._step_hooks.follow(self.optimizer), self._end_update),
            ],
            compute_metrics=compute_metrics,
        )
        if parts.model.ref_model is None:
            parts.model.warn_of_start()
        check_engine(self.accelerator, parts.model, parts.rewards.funcs, args)
        if args.world_size > 1:
            wait_at_exit()
        compile_layers(parts.model, self.accelerator, args)
        self.collector = Collector(
            model=parts.model,
            sampler=self.create_sampler(parts.eos_ids),
            rewards=parts.rewards,
            tokenizer=parts.tokenizer,
            accelerator=self.accelerator,
            args=args,
        )
        self._progress = RunProgress.of(self)
        self.collector.sampler.on_progress = self._progress.advance
        self.ppo_state = PPOState(kl_coef=args.kl_coef)
        self._train_prompts, self._eval_prompts = parts.prompts.train, parts.prompts.eval
        self._prepared_train, self._prepared_eval = train_dataset, eval_dataset
        self._rollout = None
        self._meter = Meter()
        self._step_meter = Meter()  # for `target_kl`
        self._step_start: StepStart | None = None
        self._step_began = 0.0
        self._step_hooks = StepHooks(self._before_step, self._measure_step)
        self._guard = NonFiniteGuard(args, self.accelerator)
        self._sources = parts.sources
        self._run = describe_run(args, parts.prompts.train, parts.model, parts.peft_config, parts.rewards.names)

    def create_sampler(self, eos_ids: list[int]) -> Sampler:
        """What completes the prompts; a subclass may give a sampler of its own.

        Args:
            eos_ids: tokens that end a completion.
        """
        return make_sampler(self.model, eos_ids, self.processing_class.pad_token_id, self.args, self.accelerator)

    def get_train_dataloader(self) -> DataLoader:
        """A clock with one tick per micro-batch of an epoch: Trainer counts, skips and resumes by it.

        What a tick stands for follows from `ppo_state`, so no sampler has a state to lose.
        """
        if self.train_dataset is not self._prepared_train:
            raise ValueError(
                "trainer.train_dataset is not the one that the trainer was made with; make a new trainer with it, and "
                "with the folder that save_model wrote as model"
            )
        if self._train_prompts is None:
            raise ValueError("train_dataset is missing; PPOTrainer.train needs prompts")
        steps = self.args.max_steps  # of a stream, whose end is not known, the run is the epoch
        if isinstance(self._train_prompts, Prompts):
            completions = len(self._train_prompts) * self.args.num_generations
            rollouts = max(1, completions // (self.args.rollout_size_per_process * self.args.world_size))
            steps = rollouts * self.args.updates_per_rollout
        size = self.args.per_device_train_batch_size * self.args.world_size  # by which Trainer counts samples
        ticks = range(steps * self.args.gradient_accumulation_steps * size)
        return DataLoader(cast(Any, ticks), batch_size=size)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], MiniBatchSize]:
        """The micro-batches of the next optimiser step, after a new rollout where one is due."""
        if self.state.global_step >= self.state.max_steps:
            # Resumed at its end, Trainer would make one step more.
            self.control.should_training_stop = True
            return [], MiniBatchSize(0, 0)
        if self._just_in_time is not None and self._just_in_time.save_between_steps(self.control):
            return [], MiniBatchSize(0, 0)
        for _ in range(num_batches):
            next(epoch_iterator)
        mini_batch = self._next_mini_batch()
        pieces = mini_batch.micro_batches(self._num_pieces(mini_batch, num_batches))
        cuts = [i * len(pieces) // num_batches for i in range(num_batches + 1)]
        inputs = [{**flat_sequences(some), "pieces": some} for some in (pieces[a:b] for a, b in pairwise(cuts))]
        self._step_meter = Meter()  # that of a step which float16's scaler left out is still there
        if self._just_in_time is not None:
            self._step_start = StepStart(self.state.global_step, self._meter.state_dict())
        self._step_began = time.perf_counter()
        return inputs, self._size_of(mini_batch)

    def _next_mini_batch(self) -> Rollout:
        """This process's rows for the next optimiser step, of a new rollout where one is due."""
        state, args = self.ppo_state, self.args
        if self._rollout is None or self.state.global_step >= state.last_step:
            self._rollout = self._collect_rollout()
        epoch, index = divmod(self.state.global_step - state.first_step, args.num_mini_batches)
        seed = (args.seed, SHUFFLE_STREAM, state.rollouts, epoch, args.process_index)
        return self._rollout.mini_batch(index, args.num_mini_batches, seed)

    def _size_of(self, mini_batch: Rollout) -> MiniBatchSize:
        """What the mini-batch holds on all processes."""
        counts = torch.stack([mini_batch.loss_mask.sum(), mini_batch.loss_mask.any(dim=1).sum()])
        tokens, completions = self.accelerator.reduce(counts.to(self.args.device), "sum").tolist()
        return MiniBatchSize(tokens, completions)

    def _num_pieces(self, mini_batch: Rollout, num_micro_batches: int) -> int:
        """How many pieces to compute a mini-batch in, the same on all processes: sharded models compute together."""
        if (limit := self.args.max_tokens_per_micro_batch) is None:
            return num_micro_batches
        own = torch.tensor([mini_batch.num_within(limit)], device=self.args.device)
        return max(num_micro_batches, int(self.accelerator.gather(own).max()))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Trainer's, piece by piece where a micro-batch has more tokens than it may."""
        *before, last = inputs["pieces"]
        loss = torch.zeros((), device=self.args.device)
        for piece in before:
            with self.accelerator.no_sync(model):
                loss += super().training_step(model, {"batch": piece}, num_items_in_batch)
        loss += super().training_step(model, {"batch": last}, num_items_in_batch)
        self._meter.add("loss", loss * self.args.gradient_accumulation_steps)  # they add up to a step's
        return loss

    def _collect_rollout(self) -> Rollout:
        """Collect the next rollout and tell the callbacks."""
        state = self.ppo_state
        collected = None
        while collected is None:
            rows = self.collector.training_rows(self._train_prompts, state.rollouts)
            meter = Meter(self._progress.phase)
            try:
                collected = self.collector.collect(rows, state, self.state, meter)
            except NonFiniteError as error:
                self._guard.drop(error, state.rollouts + 1, self._meter)
                state.dropped += 1
            state.rollouts += 1
        rollout, transcript = collected
        state.first_step = self.state.global_step
        state.last_step = state.first_step + self.args.updates_per_rollout
        if self.args.on_nonfinite == "skip":
            meter.add_number("nonfinite/rollout_frac", 0.0)
        self._meter.take_from(meter)
        self._tell("on_rollout_end", rollout=rollout, transcript=transcript, metrics=meter.read())
        return rollout

    def _end_update(self) -> None:
        """After an optimiser step, tell the callbacks if it was the last one on its rollout."""
        if self.state.global_step >= min(self.ppo_state.last_step, self.state.max_steps):
            self._tell("on_update_end", model=self.model, rollout=self._rollout)

    def _tell(self, event: str, **what: Any) -> None:
        """Call an event of every `PPOCallback`."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, PPOCallback):
                call = getattr(callback, event)
                control = call(self.args, self.state, self.control, **what, ppo_state=self.ppo_state)
                if isinstance(control, TrainerControl):
                    vars(self.control).update(vars(control))  # Trainer's handler holds on to this one

    def rollout(self, prompts: Sequence[str] | Sequence[list[dict[str, Any]]], **columns: Sequence[Any]) -> Rollout:
        """Collect a rollout for given prompts, to look at on the CPU; training does not notice.

        Neither rewards nor advantages are whitened, so that they add up: with one λ, returns − values. Advantages that
        compare the completions of a prompt need it several times. A collective call: of several processes each makes
        it, with as many prompts, and as many different ones.

        Args:
            prompts: texts or conversations.
            columns: what else the reward functions need, one entry per prompt each. Rows equal in all are a group.
        Raises:
            TypeError, ValueError: prompts or columns that do not fit; names them.
        """
        dataset = dataset_of(prompts, columns)
        rewards = self.collector.rewards
        prepared = later_prompts(dataset, "prompts", self.model, rewards, self.processing_class, self.args)
        rows = grouped(self.collector.eval_rows(prepared))
        self.place_model()
        return self.collector.collect(rows, self.ppo_state, self.state, Meter(), training=False)[0]

    @property
    def _critic_only(self) -> bool:
        """Whether the rollout in use belongs to `critic_warmup`."""
        return self.ppo_state.rollouts - self.ppo_state.dropped <= self.args.critic_warmup

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: MiniBatchSize | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The PPO loss of a micro-batch, scaled so that DDP's mean over processes is the sum that it must be."""
        batch: Rollout = inputs["batch"].to(self.args.device)
        outputs = model(
            **sequence(batch),
            completion_mask=batch.mask,
            temperature=self.args.temperature,
            entropy="differentiable" if self.args.entropy_coef else "constant",
        )
        terms = loss_terms(outputs, batch, self.args)
        loss = ppo_loss(terms, outputs, batch, num_items_in_batch, self.args, self._critic_only)
        with torch.no_grad():
            self._guard.note(batch, loss, {term.name: term.per_token for term in terms})
            first = self.state.global_step == self.ppo_state.first_step
            measure_update(self._meter, terms, outputs, batch, self.args, first)
            if self.args.target_kl is not None:
                measure_kl(self._step_meter, outputs, batch)
        loss = loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def _before_step(self) -> None:
        """What the end of a mini-batch decides, before its step."""
        if self._critic_only:
            self._hold_actor()
        limit = self.args.target_kl
        if limit is not None and self._step_meter.read().get("policy/approx_kl", 0.0) > limit:
            self.ppo_state.last_step = self.state.global_step + 1

    def _measure_step(self) -> None:
        self._meter.add_number("time/update", self.args.updates_per_rollout * (time.perf_counter() - self._step_began))

    def _hold_actor(self) -> None:
        """Leave the actor without gradients: no decay, no momentum, no change by one bit."""
        for parameter in self.model.actor_parameters():
            parameter.grad = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics of PPO to the logs of training steps.

        The loss among them replaces Trainer's, which forgets the steps between the last log and a checkpoint.
        """
        if "loss" in logs:
            logs.update(self._meter.read())
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`, from a new rollout unless a checkpoint brings one.

        A second call goes on with `ppo_state`: the next prompts, the adapted β, and no second warmup.

        Raises:
            ValueError: a checkpoint that cannot be gone on with, or an output folder that training starts from.
            NonFiniteError: a number is NaN or infinite; see `on_nonfinite`.
            OutOfMemory: with the settings that help.
        """
        check_output_folder(self._sources, self.args)
        self._rollout = None
        self._meter = Meter()
        self._step_meter = Meter()
        self._guard = NonFiniteGuard(self.args, self.accelerator)
        with explained_memory("the update", self.args):
            return super().train(*args, **kwargs)

    def create_model_card(self, **given: Any) -> None:
        """Write the model card into the output folder; takes what Trainer's does, by keyword."""
        # Not upstream's card: it reports supervised training and an eval_loss, which prompts do not have.
        if self.is_world_process_zero():
            rewards = self.collector.rewards
            prompts = self._train_prompts
            weights = dict(zip(rewards.names, rewards.weights, strict=True))
            chat = prompts is not None and prompts.head.conversational
            write_card(
                self.args.output_dir, self.model, self.args, self.state, weights, self.hub_model_id, chat, **given
            )
