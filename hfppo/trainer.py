"""PPO on the loop of `transformers.Trainer`.

Trainer's loop is unchanged. The hooks below supply PPO's micro-batches, loss and optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy, SaveStrategy
from transformers.utils.quantization_config import QuantizationConfigMixin

from hfppo.callbacks import PPOControl, TrainerHooks, call_event
from hfppo.checkpoint import PPOCheckpoint, Standing, describe_run, saved_run, starting_values
from hfppo.checks.data import check_output_folder, check_types
from hfppo.checks.engine import check_engine, end_at_exit
from hfppo.checks.processes import check_processes
from hfppo.collect.ahead import Order, RolloutAhead
from hfppo.collect.candidates import Choice, judge
from hfppo.collect.collector import Collected, Collector, group_equal_rows
from hfppo.collect.evaluation import check_best_metric, choose_dataset, eval_output, evaluate_prompts
from hfppo.collect.forward import autocast
from hfppo.config import PPOConfig
from hfppo.config_checks import find_faults_of_range
from hfppo.data.chat_template import Message
from hfppo.data.prompt_stream import EvalDataset, PromptStream
from hfppo.data.prompts import Prompts, dataset_of
from hfppo.endpoint.player import Agent
from hfppo.environments.agents import EnvironmentFactories, default_dataset
from hfppo.environments.environment import Tool
from hfppo.functional import Clip
from hfppo.generation import configured_sampling, make_sampler
from hfppo.generation.sampler import Sampler
from hfppo.generation.sampler_check import check_sampler
from hfppo.learn.critic_pretraining import CriticPretraining, with_full_returns
from hfppo.learn.flops import FlopCounter
from hfppo.learn.loss import LossTerm, measure_update, ppo_loss, ppo_terms
from hfppo.learn.micro_batches import MiniBatchSize, cut_mini_batch
from hfppo.learn.optimizer import keep_own_settings, split_critic_groups
from hfppo.learn.run import Run, StepPlan
from hfppo.metrics import Meter, metrics_of, parts, parts_of
from hfppo.models.actor_critic import ActorCritic, TokenOutputs, Want
from hfppo.models.critic import CRITIC_FOLDER
from hfppo.models.loading import as_name, load_whole
from hfppo.models.modes import attributes, compile_layers, place_model
from hfppo.models.output_checks import check_outputs
from hfppo.parts import ModelSource, RewardSource, TrainerInputs, check_prompts, load_parts
from hfppo.prompt_maker import EVAL, TRAIN
from hfppo.reporting.card import write_card
from hfppo.reporting.default_callbacks import show_progress, with_default_callbacks
from hfppo.reporting.progress import show_resume
from hfppo.rollout import Rollout
from hfppo.saving.crash_safe import CrashSafeTrainer
from hfppo.state import SHUFFLE_STREAM, PPOState
from hfppo.support.log_entries import plain_entry
from hfppo.support.out_of_memory import explain_out_of_memory
from hfppo.support.processes import check_alike
from hfppo.support.refusals import raise_first


class PPOTrainer(CrashSafeTrainer):
    """Proximal Policy Optimization of a LoRA actor, with the disabled adapter as its reference and a critic.

    Example::

        from datasets import Dataset
        from hfppo import PPOConfig, PPOTrainer

        def right_answer(completions, answer, **kwargs):
            return [float(answer[i] in completion) for i, completion in enumerate(completions)]

        trainer = PPOTrainer(
            model="Qwen/Qwen2.5-0.5B",
            reward_funcs=right_answer,
            args=PPOConfig(output_dir="out", total_episodes=64, max_completion_length=16),
            train_dataset=Dataset.from_dict({"prompt": ["1+1=", "2+3="], "answer": ["2", "5"]}),
        )
        trainer.train()
        trainer.save_model()

    The first six arguments are GRPOTrainer's, and may be given by position.

    Args:
        model: a base, or an adapter to train further; loaded, or its id or path. A loaded one is changed: its dropouts
            become 0, and a PeftModel is unloaded, so use `trainer.model` afterwards.
        reward_funcs: one or several functions after the contract of TRL's GRPOTrainer, see
            `hfppo.rewards.reward_func`;
            reward models, loaded or as an id or path, see `hfppo.rewards.model`; None if tools or an environment give
            the rewards, or if a teacher as `ref_model` replaces them.
        args: the configuration.
        train_dataset: a "prompt" column of text or messages; other columns reach the reward functions. With an
            environment the column may be missing, and with a single one and `max_steps` the dataset. The trainer's
            attribute cannot be replaced later. The critic reads "critic_prompt", if there is such a column, in place
            of "prompt".
        eval_dataset: the same, or several of them by name.
        processing_class: the tokenizer, not a processor; None: the model's own. Without a padding token EOS pads.
        peft_config: the actor's adapter; None: LoRA of rank 16 on all linear layers. The whole model is never trained;
            in RL, ranks of 1 to 32 suffice.
        ref_model: the reference; None: the base with the adapter disabled, or a frozen copy of the adapter that
            training starts from.
        critic: "adapter" (its own LoRA on the same base), "shared" (a value head on the actor), "shared_detached" (the
            same, and the value loss does not reach the actor), a model or its id, or a folder or repository with a
            saved critic. By id or path it is loaded with `args.model_init_kwargs`.
        critic_peft_config: the critic's adapter; None: as the actor's, or the saved critic's own.
        callbacks: `PPOCallback`s see rollouts as well.
        compute_metrics: takes an EvalPrediction with `predictions` (completions), `label_ids` (the dataset's columns)
            and `inputs` (prompts).
        reward_processing_classes: a tokenizer for each reward function, or one for a single function; None for Python
            functions, and for a model's own tokenizer.
        tools: functions that the model may call, plain or async, as in GRPOTrainer; see
            `hfppo.environments.environment`.
        environment_factory: makes the environment that a completion is played in, as in GRPOTrainer; or several
            factories by the value of the dataset's column "environment".
        agent: a program that plays each episode by itself, in place of tools and environments: a function, plain or
            async, or a `Command`. It gets the dataset's columns, `base_url` and `api_key` of an endpoint with OpenAI's
            interface to the policy, and `seed` and `episode_seed` if it names them. It returns its reward, or None for
            no score; anything else reaches the reward functions as `outputs`.
        quantization_config: quantization of models given by name.

    Raises:
        TypeError, ValueError: input that cannot be trained on; before anything is generated.
    """

    args: PPOConfig
    model: ActorCritic
    processing_class: PreTrainedTokenizerBase
    loss_is_scaled_for_ga = True  # `compute_loss` divides by the counts of the whole mini-batch
    pushed_folders = (CRITIC_FOLDER,)

    def __init__(
        self,
        model: ModelSource | PeftModel,
        reward_funcs: RewardSource | Sequence[RewardSource] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: EvalDataset = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        peft_config: PeftConfig | None = None,
        ref_model: ModelSource | None = None,
        critic: ModelSource = "adapter",
        critic_peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        tools: Sequence[Tool] | None = None,
        environment_factory: EnvironmentFactories | None = None,
        agent: Agent | None = None,
        quantization_config: QuantizationConfigMixin | dict[str, Any] | None = None,
    ):
        args = PPOConfig() if args is None else args
        train_dataset = default_dataset(environment_factory, args) if train_dataset is None else train_dataset
        inputs = TrainerInputs(
            model=as_name(model),
            args=args,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            ref_model=None if ref_model == model else as_name(ref_model),  # None: the model before training
            critic=as_name(critic),
            critic_peft_config=critic_peft_config,
            reward_processing_classes=reward_processing_classes,
            tools=tools,
            environment_factory=environment_factory,
            agent=agent,
            quantization_config=quantization_config,
        )
        check_types(**vars(inputs))
        set_seed(args.seed)  # the adapter is initialized here, before Trainer sets the seed
        with load_whole(args):
            parts = load_parts(inputs)
        args = args.for_base(parts.model.dtype)
        check_best_metric(args, eval_dataset, parts.rewards, compute_metrics)
        hooks = TrainerHooks(self._before_step, self._after_step, self._end_update)
        super().__init__(
            model=parts.model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=parts.prompt_maker.tokenizer,
            callbacks=[*with_default_callbacks(callbacks, args), hooks],
            compute_metrics=compute_metrics,
        )
        check_engine(self.accelerator, parts.model, parts.rewards.funcs, args, has_agent=agent is not None)
        if is_initialized():
            end_at_exit()
        self._flop_counter = FlopCounter.of(parts.model)
        compile_layers(parts.model, self.accelerator, args)
        self._progress = show_progress(self)
        self.collector = Collector(
            model=parts.model,
            sampler=self.create_sampler(parts.eos_ids),
            rewards=parts.rewards,
            tokenizer=parts.prompt_maker.tokenizer,
            accelerator=self.accelerator,
            args=args,
            player=parts.player,
        )
        self._ahead = RolloutAhead(self.collector) if args.rollouts_ahead else None
        self._prompt_maker = parts.prompt_maker
        self.ppo_state = PPOState(**starting_values(vars(args)))
        self._eval_sampling = False
        self._sources = parts.sources
        self._outputs_checked = False
        engine = self.accelerator.distributed_type.value
        run = describe_run(parts.model, parts.peft_config, parts.rewards.names, parts.prompt_maker, engine)
        check_processes(run, parts.model, parts.prompt_maker)
        self._checkpoint = PPOCheckpoint(run, args.process_index)
        self._begin_run()

    def _begin_run(self) -> None:
        """Forget the rollout and the metrics of an earlier run."""
        self.ppo_state.skipped_steps = 0
        self._run = Run(self.model, self.accelerator, self.args)

    def create_sampler(self, eos_ids: list[int]) -> Sampler:
        """Return the sampler that completes prompts; a subclass may return its own.

        Args:
            eos_ids: tokens that end a completion.
        """
        sampling = configured_sampling(self.args, self.processing_class, eos_ids)
        return make_sampler(self.model, self.args, self.accelerator, sampling, self._progress.advance)

    def _prepare_model(self) -> None:
        """Move the model to its device, and check its outputs there before they are used for the first time."""
        place_model(self.model, self.args.device)
        if not self._outputs_checked:
            with autocast(self.accelerator):
                check_outputs(self.model, self.args.device)
                check_sampler(self.collector.sampler, self.args.device)
                if self._ahead is not None:
                    self._ahead.prepare(self.args.device)
            self._outputs_checked = True

    @property
    def _train_prompts(self) -> Prompts | PromptStream:
        """The prompts to train on. Raise ValueError if there are none."""
        if (prompts := self._prompt_maker.prompts.get(TRAIN)) is None:
            raise ValueError(
                "train_dataset is missing; PPOTrainer.train needs prompts. With one environment, whose reset writes "
                "them, set max_steps or total_episodes"
            )
        return prompts

    def _prompts_of(self, dataset: Dataset | IterableDataset, name: str, alike: bool = True) -> Prompts:
        """Return the checked prompts of a dataset, made before or now; see `PromptMaker.of_dataset`."""
        maker = self._prompt_maker
        if (prompts := maker.find(dataset)) is None:
            prompts = maker.of_dataset(dataset, name, alike=alike)
            check_prompts({name: prompts}, {"the model": self.model.causal_lm}, self.collector.rewards, maker)
        return prompts

    # Training: a rollout, then mini-batches of it

    @contextmanager
    def training_context(self) -> Iterator[None]:
        """Start without a rollout, unless a checkpoint has one; load the best critic at the end if asked.

        A second call of `train` keeps `ppo_state`: it continues with the next prompts and the adapted β, without a
        second warmup.

        Raises:
            ValueError: the output folder is one that training starts from.
            NonFiniteError: a number is NaN or infinite.
            OutOfMemory: with the settings that help.
        """
        check_output_folder(self._sources, self.args)
        self._begin_run()
        try:
            with explain_out_of_memory("update"):
                yield
        finally:
            if self._ahead is not None:
                self._ahead.close()
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if best is not None and Path(best).is_dir() and not self.is_deepspeed_enabled:  # DeepSpeed loads its own
            self.model.load_critic(best)  # upstream has warned of a folder that is gone

    def get_train_dataloader(self) -> DataLoader:
        """Return a dummy dataloader with one item per micro-batch; it only drives Trainer's step counting and resume.

        The data come from `ppo_state`, so there is no sampler state to save.
        """
        if self.train_dataset is not self._prompt_maker.datasets.get(TRAIN):
            raise ValueError(
                "trainer.train_dataset was replaced after construction; make a new trainer with the new dataset, and "
                "with the folder that save_model wrote as model"
            )
        prompts = self._train_prompts
        steps = self.args.max_steps  # a stream's length is unknown, so one epoch is the whole run
        if isinstance(prompts, Prompts):
            completions = len(prompts) * self.args.num_generations
            rollouts = max(1, completions // (self.args.rollout_size_per_process * self.args.world_size))
            steps = rollouts * self.args.updates_per_rollout
        size = self.args.per_device_train_batch_size * self.args.world_size  # Trainer counts samples by it
        ticks = range(steps * self.args.gradient_accumulation_steps * size)
        return DataLoader(ticks, batch_size=size)  # type: ignore[arg-type]  # torch takes any sequence

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor | list[Rollout]]], MiniBatchSize]:
        """Return the micro-batches of the next optimizer step, after a new rollout if one is due."""
        if self.state.global_step >= self.state.max_steps:
            # Without this, resuming a finished run would make one extra step.
            self.control.should_training_stop = True
            return [], MiniBatchSize()
        if self.saves_at_signal():
            return [], MiniBatchSize()
        self._prepare_model()  # even if a checkpoint brings a rollout
        self._pretrain_critic()
        for _ in range(num_batches):
            next(epoch_iterator)
        mini_batch = self._next_mini_batch()
        if self.saves_at_signal():  # while a rollout was collected
            return [], MiniBatchSize()
        max_tokens = self.args.max_tokens_per_micro_batch
        inputs = cut_mini_batch(self.model, mini_batch, num_batches, max_tokens, self.accelerator)
        self._run.begin_step()
        return inputs, MiniBatchSize.of(mini_batch, self.accelerator)

    def _next_mini_batch(self) -> Rollout:
        """Return this process's rows for the next optimizer step, from a new rollout if one is due."""
        state, args, run = self.ppo_state, self.args, self._run
        if self._ahead is not None:
            self._ahead.resume(self._train_prompts)
        if run.rollout is None or self.state.global_step >= state.last_step:
            run.rollout = self._collect_rollout()
        run.rollout = self.collector.restore_base_states(run.rollout)
        aligns = args.critic_update == "policy_aligned" and self._plan.epoch >= args.num_ppo_epochs
        if aligns and run.rollout.value_ratio is None:
            run.rollout, measures = self.collector.align_returns(run.rollout)
            run.log.update(measures)
        index = (self.state.global_step - state.first_step) % args.num_mini_batches
        seed = (args.seed, SHUFFLE_STREAM, state.rollouts, self._plan.epoch)
        return run.rollout.mini_batch(index, args.num_mini_batches, seed, args.num_generations, args.process_index)

    def _collect_rollout(self) -> Rollout:
        """Collect the next rollout and tell the callbacks."""
        state, ahead = self.ppo_state, self._ahead
        choice, collected = self._collect_next(self.collector) if ahead is None else self._collect_ahead(ahead)
        rollout, measures = collected.rollout, collected.measures
        if self.args.prompt_candidates > 1:
            state.uniform_scores, of_choice = judge(state, choice, rollout, self.collector.gather)
            measures |= of_choice
        metrics = Meter(measures).read()
        state.passed_over += choice.passed_over
        state.spread = metrics.get("candidates/spread", 1.0)
        state.rollouts += 1
        state.first_step = self.state.global_step
        state.last_step = state.first_step + self.args.updates_per_rollout
        self._run.steps = []
        self._run.log.update(measures)
        self._call_callbacks("on_rollout_end", rollout=rollout, transcript=collected.transcript, metrics=metrics)
        return rollout

    def _collect_next(self, collector: Collector) -> tuple[Choice, Collected]:
        """Collect a rollout for the next prompts."""
        choice = collector.choose_prompts(self._train_prompts, self.ppo_state, self._progress.phase)
        rows = collector.rows_of(choice, self._train_prompts)
        return choice, collector.collect(rows, self.ppo_state, self.state, show=self._progress.phase)

    def _collect_ahead(self, ahead: RolloutAhead) -> tuple[Choice, Collected]:
        """Finish the rollout that was sampled ahead, after the next one has begun."""
        state, step, prompts = self.ppo_state, self.state.global_step, self._train_prompts
        show = self._progress.phase
        if ahead.order is None:  # the first rollout, or one that a callback has made necessary
            ahead.begin(self.collector.choose_prompts(prompts, state, show), prompts, self.state)
        order, sampled = ahead.take(step, show)
        if step + self.args.updates_per_rollout < self.state.max_steps:
            passed_over = state.passed_over + order.choice.passed_over
            later = replace(state, rollouts=state.rollouts + 1, passed_over=passed_over)
            ahead.begin(self.collector.choose_prompts(prompts, later, show), prompts, self.state)
        return order.choice, self.collector.finish(sampled, state)

    def _wait_for_ahead(self) -> None:
        """Wait until nothing is sampled ahead; sampler, environments and rewards serve one caller at a time."""
        if self._ahead is not None:
            self._ahead.wait()

    def _pretrain_critic(self) -> None:
        """Pretrain the critic if that is asked for and was not done; callbacks see its logs only."""
        state = self.ppo_state
        if not self.args.critic_pretraining_completions or state.pretraining_results or state.rollouts:
            return
        collector, rollouts = with_full_returns(self.collector), []
        state.pretraining_rollouts = 0
        with self._progress.phase("critic_pretraining"):
            while state.pretraining_rollouts < self.args.critic_pretraining_rollouts:
                rollouts.append(self._collect_next(collector)[1].rollout)
                state.pretraining_rollouts += 1
            pretraining = CriticPretraining(self._run, cast(Optimizer, self.optimizer), self._backward, self.log)
            state.pretraining_results = pretraining.fit(rollouts)
        if self.args.save_strategy != SaveStrategy.NO:
            self.save_checkpoint()

    def _backward(self, pieces: list[Rollout], size: MiniBatchSize) -> Tensor:
        """Add the gradient of a mini-batch, outside of Trainer's loop."""
        return self.training_step(self.model_wrapped, {"pieces": pieces}, size)

    def rollout(
        self, /, prompts: Sequence[str] | Sequence[list[Message]] | None = None, **columns: Sequence[object]
    ) -> Rollout:
        """Collect a rollout for given prompts, on the CPU, without changing the state of training.

        Advantages are not whitened: with one λ, they are returns − values. An estimator that compares the completions
        of a prompt needs that prompt several times. A collective call: each process makes it, with equally many
        prompts, and equally many different ones.

        Args:
            prompts: texts or conversations; None: an agent or an environment writes them.
            columns: further columns for the reward functions, one entry per prompt each. Equal rows form a group. A
                critic that was trained with `critic_prompt` needs that column.
        Raises:
            TypeError, ValueError: prompts or columns that do not fit.
        """
        if self.model.critic is not None:
            self.model.critic.check_columns(columns)
        given = self._prompts_of(dataset_of(prompts, columns), "prompts", alike=False)
        rows = group_equal_rows(self.collector.eval_rows(given))
        check_alike({"number of prompts": len(rows), "number of different ones": len({row.group for row in rows})})
        self._prepare_model()
        self._wait_for_ahead()
        return self.collector.collect(rows, self.ppo_state, self.state, training=False).rollout

    # The loss

    @property
    def _plan(self) -> StepPlan:
        """What the present step computes and moves."""
        return StepPlan.of(self.state.global_step, self.ppo_state, self.args)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Call Trainer's step for each piece of a micro-batch, for the actor's losses and then for the critic's.

        Each graph is freed before the next one is built, so that memory holds the larger of the two. Where the critic
        reads the actor's states there is one graph only.
        """
        plans = self._plan.apart() if self._run.has_two_graphs else [self._plan]
        self._run.flops += self._flop_counter.count(inputs["pieces"], self._plan)
        *before, last = ({"batch": piece, "plan": plan} for piece in inputs["pieces"] for plan in plans)
        loss = torch.zeros((), dtype=torch.float32, device=self.args.device)
        for one in before:
            with self.accelerator.no_sync(model):
                loss += super().training_step(model, one, num_items_in_batch)
        loss += super().training_step(model, last, num_items_in_batch)
        whole = loss * self.args.gradient_accumulation_steps  # the micro-batches add up to a step's
        self._run.log.update({"loss": parts(whole)})
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: MiniBatchSize | None = None,
    ) -> Tensor | tuple[Tensor, TokenOutputs]:
        """Return the PPO loss of a micro-batch, scaled so that DDP's mean over processes is the sum."""
        assert num_items_in_batch is not None
        plan: StepPlan = inputs.get("plan", self._plan)
        batch: Rollout = inputs["batch"]
        batch = (batch if plan.values else replace(batch, base_states=None)).to(self.args.device)
        outputs = model(
            **batch.joined(),
            completion_mask=batch.mask,
            want=Want(
                temperature=self.args.temperature,
                policy=plan.policy,
                values=plan.values,
                entropy="differentiable" if self.args.entropy_coef else "constant",
                router_loss=True,
            ),
            base_states=batch.base_states,
        )
        terms = self.loss_terms(outputs, batch)
        loss = ppo_loss(terms, batch, num_items_in_batch, self.args, plan.warms_up)
        loss = self._run.connect(loss, outputs, num_items_in_batch, plan)
        with torch.no_grad():
            self._run.guard.record(batch, loss, {term.name: term.per_token for term in terms})
            first = self.state.global_step == self.ppo_state.first_step
            self._run.measure(measure_update(terms, outputs, batch, self.args, self._clip, first))
        loss = loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss

    def loss_terms(self, outputs: TokenOutputs, batch: Rollout) -> list[LossTerm]:
        """Return the terms of the loss; a subclass may add its own to `super().loss_terms`.

        Args:
            outputs: (B, T) tensors of π_θ, the policy being optimized. A critic with a trunk of its own has its losses
                in a second call: then the first has no values, and the second values only.
            batch: the rollout's data about the same tokens.
        """
        return ppo_terms(outputs, batch, self.args, self._clip)

    @property
    def _clip(self) -> Clip:
        """The clip of the policy loss, which a callback may have changed."""
        return Clip(self.ppo_state.cliprange, self.ppo_state.cliprange_high, self.args.dual_clip)

    # The optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Create Trainer's optimizer, with the critic's parameters in groups of their own."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        split_critic_groups(optimizer, self.model.critic_parameters(), self.args.critic_lr)
        return optimizer

    def loading_optimizer(self) -> AbstractContextManager:
        """Keep this run's learning rates while a checkpoint's optimizer is loaded."""
        return keep_own_settings(cast(Optimizer, self.optimizer), cast(LambdaLR, self.lr_scheduler))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        # Private upstream hook: the one place between backward and step where gradients are clipped.
        return self._run.clip(self.args.max_grad_norm, self.state.global_step + 1)

    def _before_step(self) -> None:
        self._run.before_step(cast(Optimizer, self.optimizer), self.ppo_state.learning_rate_factor)

    def _after_step(self) -> None:
        """Call the callbacks after an optimizer step; drop the remaining steps on the rollout if one asks for it."""
        if self.ppo_state.rollouts == 0:  # critic pretraining
            return
        step = self._run.end_step(self.state.global_step - self.ppo_state.first_step)
        if self._call_callbacks("on_mini_batch_end", step=step).should_end_rollout:
            state, last = self.ppo_state, self.state.global_step + 1
            actor_ends = state.first_step + self.args.num_ppo_epochs * self.args.num_mini_batches
            follows = self.args.critic_follows and last <= actor_ends  # the critic's steps are made all the same
            left = (actor_ends if follows else state.last_step) - last
            if self.args.counts_completions:  # no other rollout makes up for the steps that are left out
                skipped = min(left, self.state.max_steps - last)
                state.skipped_steps += skipped
                self.state.max_steps -= skipped
            state.last_step -= left
            if follows:
                state.first_step -= left

    def _end_update(self) -> None:
        """Tell the callbacks after the last optimizer step on a rollout, and log there if each rollout has its log."""
        is_last = self.state.global_step >= min(self.ppo_state.last_step, self.state.max_steps)
        if self.args.logging_strategy == IntervalStrategy.STEPS:
            every = self.state.logging_steps
            # A rollout may have fewer steps than the others: one that a callback ends, or the last of a run.
            if every == self.args.updates_per_rollout and (is_last or self.state.global_step % every == 0):
                self.control.should_log = is_last
        if is_last:
            steps = self._run.steps
            self._call_callbacks("on_update_end", rollout=self._run.rollout, metrics=metrics_of(steps), steps=steps)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: str | Dataset | IterableDataset | None = None) -> DataLoader:
        """Return the prompts of an evaluation; `evaluation_loop` shares them out among the processes."""
        prompts = self._prompts_of(choose_dataset(eval_dataset, self.eval_dataset), EVAL)
        size = self.args.eval_batch_size * self.args.world_size
        return DataLoader(prompts, batch_size=size, collate_fn=list)  # type: ignore[arg-type]

    def get_test_dataloader(self, test_dataset: Dataset | IterableDataset) -> DataLoader:
        """Return the prompts of `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def eval_sampling(self, do_sample: bool) -> AbstractContextManager[None]:
        """Make evaluations in the block sample, or decode greedily."""
        return attributes(self, _eval_sampling=do_sample)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Complete and score the prompts; Trainer's loop computes losses on labels, which prompts do not have."""
        self._prepare_model()
        self._wait_for_ahead()
        prompts = cast(Prompts, dataloader.dataset)
        self.callback_handler.eval_dataloader = dataloader

        def on_batch() -> None:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        evaluated = evaluate_prompts(self.collector, prompts, self.state, self._eval_sampling, on_batch)
        return eval_output(*evaluated, prompts, self.compute_metrics, metric_key_prefix)

    # Checkpoints

    def check_resume(self, checkpoint: str) -> None:
        """Take over the date of the checkpoint's chat templates.

        Raises:
            ValueError: base, dataset, critic or batch layout differ.
        """
        saved, maker = saved_run(checkpoint, self.args.process_index), self._prompt_maker
        if saved is not None and saved.run_date != maker.date:
            maker.move_to(saved.run_date)
            self._checkpoint = self._checkpoint.moved_to(maker)
        self._checkpoint.check(checkpoint)

    def weights_to_save(self) -> dict[str, Tensor]:
        """Return the trained weights."""
        return self.model.weights_to_save()

    def save_run_state(self, folder: str) -> None:
        """Save PPO's state, the rollout in use and the metrics that are not logged yet."""
        run = self._run
        in_use = run.rollout if self.state.global_step < self.ppo_state.last_step else None
        steps = [] if in_use is None else run.steps
        order = None if self._ahead is None else self._ahead.order
        ahead = None if order is None else order.split()
        self._checkpoint.save(folder, Standing(self.ppo_state, run.log.state_dict(), steps, in_use, ahead))

    def load_run_state(self, folder: str) -> None:
        """Load PPO's state, and the critic, which upstream does not load."""
        found = self._checkpoint.load(folder)
        self.ppo_state, self._run.steps, self._run.rollout = found.state, found.steps, found.rollout
        self._run.log.load_state_dict(found.metrics)
        if self._ahead is not None and found.ahead is not None:
            self._ahead.order = Order.join(*found.ahead)
        self.state.max_steps -= self.ppo_state.skipped_steps
        if not self.is_deepspeed_enabled:  # DeepSpeed's checkpoint contains the critic
            self.model.load_critic(folder)
        show_resume(folder, self.ppo_state.rollouts + (found.rollout is None), self.state)

    # Logs, callbacks and the card

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add PPO's metrics to the logs of training steps.

        Their loss replaces Trainer's, which forgets the steps between the last log and a checkpoint; their learning
        rate is the step's, where Trainer's is the scheduler's. The metrics of `train` include those of the critic's
        pretraining.
        """
        if "loss" in logs:
            logs.update(self._run.log.read())
        if "train_runtime" in logs:
            logs.update(self.ppo_state.pretraining_results)
        place = len(self.state.log_history)
        super().log(logs, start_time)
        self.state.log_history[place] = plain_entry(self.state.log_history[place])  # checkpoints write it as JSON

    def _call_callbacks(self, event: str, **arguments: object) -> PPOControl:
        """Call an event of every `PPOCallback`, and apply their changes to `control`.

        Raises:
            AttributeError: `args` has been changed where only `control` has an effect.
            ValueError: β is above 0 with a `value_range`.
        """
        for name, given in starting_values(self._checkpoint.run.settings).items():
            if starting_values(vars(self.args))[name] != given:
                raise AttributeError(
                    f"args.{name} was changed after the trainer was made, and the change has no effect; set "
                    f"control.{name} in a PPOCallback, see docs/callbacks.md"
                )
        control = PPOControl.of(self.control, self.ppo_state)
        call_event(self, event, control, ppo_state=self.ppo_state, **arguments)
        raise_first(find_faults_of_range(self.args, control.kl_coef))
        vars(self.control).update(control.flags())  # Trainer's handler keeps this object
        vars(self.ppo_state).update({name: getattr(control, name) for name in PPOState.STEERED})
        self._run.log.update({name: parts_of(number) for name, number in control.logs.items()})
        return control

    def create_model_card(self, **given: object) -> None:
        """Write the model card into the output folder; takes the keywords of Trainer's."""
        # Not upstream's card: it reports supervised training and an eval_loss, which prompts do not have.
        if self.is_world_process_zero():
            self.save_card(str(self.args.output_dir), ask_hub=True, **given)

    def save_card(self, folder: str, ask_hub: bool = False, **given: object) -> None:
        """Write the model card into a folder."""
        rewards, prompts = self.collector.rewards, self._prompt_maker.prompts.get(TRAIN)
        weights = dict(zip(rewards.names, rewards.weights, strict=True))
        chat = prompts is not None and prompts.head.conversational
        write_card(self, Path(folder), weights, chat, ask_hub, **given)
