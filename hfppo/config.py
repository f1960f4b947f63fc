"""The configuration of a run, in the style of TrainingArguments."""

import logging
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, cast

from transformers import TrainingArguments

from hfppo.checks.config import AT_LEAST_0, METRIC_SCHEDULERS, Requirement, check_config, check_fields
from hfppo.checks.names import check_names
from hfppo.functional import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    KL_LOSS_ESTIMATORS,
    MISMATCH_MODES,
    POLICY_LOSSES,
    REDUCTIONS,
    estimator_needs,
    estimator_whitens,
)

logger = logging.getLogger(__name__)

# What a field must be beside its type; `check_fields` reads it from the annotation, HfArgumentParser ignores it.
Count = Annotated[int, Requirement("at least 1", lambda x: x >= 1)]
NotNegative = Annotated[float, AT_LEAST_0]
Positive = Annotated[float, Requirement("above 0", lambda x: x > 0)]
Share = Annotated[float, Requirement("in [0, 1]", lambda x: 0 <= x <= 1)]
GPU_SHARE = Requirement("in (0, 1]", lambda x: 0 < x <= 1)
CLIP = Requirement("in (0, 1): the ratio is clipped to 1 − cliprange", lambda x: 0 < x < 1)
DUAL_CLIP = Requirement("above 1: below, it would undo the clip at ratio 1", lambda x: x > 1)
CLIP_MAX = Requirement("at least 1: below, it would shrink the weights of tokens without mismatch", lambda x: x >= 1)


@dataclass
class PPOConfig(TrainingArguments):
    """Configuration of `PPOTrainer`: `transformers.TrainingArguments` and the fields of PPO.

    A rollout has `per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches` completions per
    process and is used for `num_ppo_epochs × num_mini_batches` optimizer steps, or more with `num_critic_epochs`.

    Raises:
        TypeError: fields that do not exist; the message names them all.
        ValueError: a field outside its range, or fields that contradict each other; the message names them.
    """

    # Fields of TrainingArguments with defaults that fit PPO with a LoRA actor better, or with words that fit.
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Completions per process in one forward and backward pass."}
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata={"help": "Such passes per optimizer step; the two together are a mini-batch."}
    )
    learning_rate: NotNegative = field(
        default=5e-5,
        metadata={"help": "Learning rate of the actor's LoRA; chosen by measurement on 135M, docs/decisions.md."},
    )
    logging_steps: float = field(default=10, metadata={"help": "Optimizer steps between logs."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide non-finite losses from the log. Off: a broken run shows."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Unused here: all columns of the dataset reach the reward functions."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=True,
        metadata={
            "help": "On: DDP sums gradients in one order from the first step on, so that resumed runs are exact with "
            "any number of processes. Off: a little faster; exact with up to two."
        },
    )

    # Changes the result: the rollout.
    num_ppo_epochs: Count = field(
        default=2,
        metadata={"help": "Times that each rollout is gone through; chosen by measurement, docs/decisions.md."},
    )
    num_mini_batches: Count = field(
        default=8,
        metadata={
            "help": "Optimizer steps per PPO epoch. A rollout has this many mini-batches: by default 8 × 1 × 8 = 64 "
            "completions per process. Chosen by measurement, docs/decisions.md."
        },
    )
    total_episodes: Count | None = field(
        default=None, metadata={"help": "Completions to train on in all, rounded up to rollouts; sets `max_steps`."}
    )
    num_generations: Count = field(default=1, metadata={"help": "Completions per prompt."})
    max_prompt_length: Count | None = field(
        default=512, metadata={"help": "Longest prompt in tokens, None for any; see `overlong_prompts`."}
    )
    overlong_prompts: Literal["drop", "truncate"] = field(
        default="drop", metadata={"help": "Drop longer prompts, or cut their beginning off; the count is logged."}
    )
    max_completion_length: Count = field(
        default=256,
        metadata={"help": "Longest completion in tokens, those of tools and environments included (GRPO)."},
    )
    max_turn_length: Count | None = field(
        default=None,
        metadata={"help": "Longest turn of the model in tokens, with tools or environments; None: any."},
    )
    max_tool_calling_iterations: Count | None = field(
        default=None,
        metadata={"help": "Rounds of tool calls, or steps of an environment, per completion; None: any (GRPO)."},
    )
    tool_timeout: Positive | None = field(
        default=None, metadata={"help": "Seconds for one call of a tool or an environment; None: any."}
    )
    temperature: Positive = field(
        default=1.0, metadata={"help": "Logits are divided by it in every pass: sampling, old, reference, update."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Passed to `apply_chat_template`, for example {'enable_thinking': false}."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "What ends a completion beside EOS: lists `stop_strings` and `stop_token_ids` (GRPO)."},
    )

    # Changes the result: what samples (up to numerics, see `policy_mode`).
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM instead of `generate` (GRPO)."})
    vllm_mode: Literal["colocate", "server"] = field(
        default="colocate", metadata={"help": "An engine in each training process, or a server by its address (GRPO)."}
    )
    vllm_server_base_url: str = field(
        default="http://127.0.0.1:8000", metadata={"help": "Address of the server that `vllm serve` started (GRPO)."}
    )
    vllm_server_timeout: Positive = field(
        default=240.0, metadata={"help": "Seconds to wait for the server, at the start and for an answer (GRPO)."}
    )
    vllm_gpu_memory_utilization: Annotated[float, GPU_SHARE] = field(
        default=0.3, metadata={"help": "Share of the GPU that the colocated engine takes (GRPO)."}
    )
    vllm_enable_sleep_mode: bool = field(
        default=False, metadata={"help": "Free the colocated engine's memory between rollouts (GRPO)."}
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Passed to `vllm.LLM` with 'colocate': tensor_parallel_size, max_model_len, dtype."},
    )

    # Changes the result: rewards.
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per reward function, 0 to only log it; None: 1 each (GRPO)."}
    )
    reward_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Passed to `from_pretrained` for reward models given by id or path."}
    )
    missing_eos_penalty: NotNegative | None = field(
        default=None, metadata={"help": "Subtracted from the score of a completion cut by the length limit (TRL)."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Scale token rewards to unit variance, keeping their mean (TRL)."}
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={"help": "Leave completions cut by the length limit out of the losses (arXiv:2503.14476)."},
    )

    # Changes the result: KL to the reference.
    kl_coef: NotNegative = field(default=0.05, metadata={"help": "β of the KL penalty in the reward (TRL); 0 is off."})
    kl_estimator: str = field(default="k1", metadata={"choices": KL_ESTIMATORS, "help": "KL estimator of the reward."})
    kl_loss_coef: NotNegative = field(default=0.0, metadata={"help": "λ of the KL term in the loss; 0 turns it off."})
    kl_loss_estimator: str = field(
        default="k3",
        metadata={
            "choices": KL_LOSS_ESTIMATORS,
            "help": "KL estimator of the loss; with a + the gradient is that of k2, unbiased on-policy (verl).",
        },
    )

    # Changes the result: advantages.
    advantage_estimator: str = field(
        default="gae",
        metadata={"choices": ADVANTAGE_ESTIMATORS, "help": "How advantages are estimated; only gae has a critic."},
    )
    gamma: Share = field(default=1.0, metadata={"help": "Discount per token (TRL)."})
    lam: Share = field(default=0.95, metadata={"help": "λ of GAE (TRL; arXiv:1506.02438)."})
    gamma_turn: Share | None = field(
        default=None, metadata={"help": "Discount from one turn of an episode to the next; None: `gamma`."}
    )
    lam_turn: Share | None = field(
        default=None, metadata={"help": "λ from one turn of an episode to the next; None: as within a turn."}
    )
    lam_critic: Share | None = field(
        default=None,
        metadata={"help": "λ for the returns, within and between turns; None: the advantages' λ (arXiv:2503.01491)."},
    )
    lam_alpha: Positive | None = field(
        default=None, metadata={"help": "α of the length-adaptive λ = 1 − 1/(α·length) in place of `lam`."}
    )
    whiten_advantages: bool | None = field(
        default=None,
        metadata={
            "help": "Shift and scale advantages to mean 0, variance 1 over the global rollout; None: as the "
            "estimator's paper does, so with gae and the two reinforce_plus_plus."
        },
    )
    scale_rewards: bool = field(
        default=True, metadata={"help": "Divide by the standard deviation of the group, with grpo (arXiv:2503.20783)."}
    )
    bootstrap_truncated: bool = field(
        default=False, metadata={"help": "A completion cut by length ends with the critic's value instead of 0."}
    )

    # Changes the result: the losses.
    policy_loss: str = field(default="ppo", metadata={"choices": POLICY_LOSSES, "help": "The surrogate objective."})
    policy_mode: Literal["decoupled", "bypass", "corrected"] = field(
        default="decoupled",
        metadata={
            "help": "π_old: recomputed by the training model; or the sampler's log-probs as they are; or recomputed, "
            "and the policy loss weighted by π_old/π_rollout."
        },
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "choices": MISMATCH_MODES,
            "help": "With 'corrected', for any sampler: a weight per token, or one per completion; cap it (TIS), or "
            "set it to 0 outside the band (IcePop, arXiv:2510.18855), or leave such tokens out of all losses (GRPO).",
        },
    )
    vllm_importance_sampling_clip_max: Annotated[float, CLIP_MAX] = field(
        default=2.0, metadata={"help": "With 'corrected': the largest weight; the band is [1/this, this] (GRPO)."}
    )
    cliprange: Annotated[float, CLIP] = field(
        default=0.2, metadata={"help": "ε of the policy clip (arXiv:1707.06347)."}
    )
    cliprange_high: Positive | None = field(
        default=None, metadata={"help": "ε above 1; None: `cliprange`. Larger is clip-higher (arXiv:2503.14476)."}
    )
    dual_clip: Annotated[float, DUAL_CLIP] | None = field(
        default=None, metadata={"help": "c > 1 bounds the loss of tokens with A < 0 (arXiv:1912.09729)."}
    )
    loss_reduction: str = field(
        default="token-mean", metadata={"choices": REDUCTIONS, "help": "Reduces the losses of tokens to one number."}
    )
    entropy_coef: NotNegative = field(default=0.0, metadata={"help": "Weight of the entropy bonus; 0 turns it off."})
    positive_nll_coef: NotNegative = field(
        default=0.0,
        metadata={"help": "Weight of the NLL on completions with full score, at least 1 (arXiv:2504.05118)."},
    )

    # Changes the result: the critic.
    critic_learning_rate: NotNegative | None = field(
        default=None, metadata={"help": "Learning rate of the critic; None: `learning_rate`, see docs/decisions.md."}
    )
    num_critic_epochs: Count | None = field(
        default=None,
        metadata={"help": "Times that the critic goes through each rollout (verl); None: `num_ppo_epochs`."},
    )
    cliprange_value: Positive | None = field(
        default=None,
        metadata={"help": "ε of the value clip in units of the return; None, off: it only slows the critic down."},
    )
    vf_coef: NotNegative = field(
        default=0.1,
        metadata={"help": "Weight of the value loss (TRL, measured); couples only through a shared trunk."},
    )
    critic_pretraining_completions: Annotated[int, AT_LEAST_0] = field(
        default=0,
        metadata={"help": "Completions to whose returns the critic is fitted before PPO begins (arXiv:2503.01491)."},
    )
    critic_pretraining_learning_rate: Positive | None = field(
        default=None, metadata={"help": "Learning rate of the pretraining at its beginning; None: the critic's."}
    )
    critic_warmup: Annotated[int, AT_LEAST_0] = field(
        default=0, metadata={"help": "Rollouts at the start that train the critic only; the actor does not move."}
    )
    critic_layers: Count | None = field(
        default=None,
        metadata={
            "help": "With critic='adapter': it adapts the top layers only, so many, and the states below them are "
            "computed once per rollout; None: all layers."
        },
    )

    # Changes the result: evaluation and loading.
    eval_do_sample: bool = field(
        default=False, metadata={"help": "Evaluate with sampled completions instead of greedy ones."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Passed to `from_pretrained` for `model`, `ref_model` and `critic` given by id or path."},
    )

    # What is shown.
    log_completions: bool = field(
        default=False, metadata={"help": "Print some completions of each rollout with their scores (GRPO)."}
    )

    # Speed and memory only.
    max_tokens_per_micro_batch: Count | None = field(
        default=None,
        metadata={
            "help": "Cut micro-batches of the update further, to this many tokens of prompts and completions with "
            "their padding; a single row may have more. None: `per_device_train_batch_size` rows on average."
        },
    )
    local_rollout_forward_batch_size: Count = field(
        default=64, metadata={"help": "Rows per process that are sampled, or passed without gradient, at once (TRL)."}
    )

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (as upstream declares it)
        *TrainingArguments._VALID_DICT_FIELDS,
        "chat_template_kwargs",
        "generation_kwargs",
        "model_init_kwargs",
        "reward_model_init_kwargs",
        "vllm_engine_kwargs",
    ]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Python's own error names one unknown field, without its word here. Not in `__init__`: a subclass that is a
        # dataclass has its own.
        check_names(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_grad_norm is None:
            self.max_grad_norm = 0.0  # as Trainer reads it: no clipping
        check_fields(self)
        compares = self.load_best_model_at_end or self.save_strategy == "best"
        if self.metric_for_best_model is None and (compares or self.lr_scheduler_type in METRIC_SCHEDULERS):
            self.metric_for_best_model = "eval_reward"  # Trainer would take eval_loss, which prompts do not have
        super().__post_init__()
        check_config(self)
        if self.max_grad_norm == 0:
            self.max_grad_norm = math.inf  # Trainer calls the hook that clips, which measures as well
        if self.total_episodes is not None:
            rollouts = self.rollouts_for(self.total_episodes) - self.critic_pretraining_rollouts
            steps = rollouts * self.updates_per_rollout
            if self.max_steps not in (-1, steps):
                logger.warning("total_episodes makes max_steps=%s; %s is not used", steps, self.max_steps)
            self.max_steps = steps

    def __getstate__(self) -> dict[str, Any]:
        # Trainer pickles the configuration into `training_args.bin` in two places, and pushes it with the token.
        return vars(self) | {"hub_token": None}

    @property
    def rollout_size_per_process(self) -> int:
        """Completions per process in a rollout."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_mini_batches

    def rollouts_for(self, completions: int) -> int:
        """Return the rollouts of all processes that hold so many completions."""
        return -(-completions // (self.rollout_size_per_process * self.world_size))

    @property
    def counts_completions(self) -> bool:
        """Whether the run's length is a number of completions, not of optimizer steps."""
        return self.total_episodes is not None or self.max_steps <= 0

    @property
    def critic_pretraining_rollouts(self) -> int:
        """Rollouts that the critic's pretraining collects."""
        return self.rollouts_for(self.critic_pretraining_completions)

    @property
    def critic_lr(self) -> float:
        """Learning rate of the critic: `critic_learning_rate`, or the actor's."""
        return self.learning_rate if self.critic_learning_rate is None else self.critic_learning_rate

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout, of the actor, the critic or both."""
        return max(self.num_ppo_epochs, self.critic_epochs) * self.num_mini_batches

    @property
    def critic_epochs(self) -> int:
        """Times that the critic goes through a rollout: `num_critic_epochs`, or as often as the actor."""
        return self.num_ppo_epochs if self.num_critic_epochs is None else self.num_critic_epochs

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end a completion."""
        return cast(dict[str, Any], self.generation_kwargs or {}).get("stop_strings", [])

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a completion beside EOS."""
        return cast(dict[str, Any], self.generation_kwargs or {}).get("stop_token_ids", [])

    @property
    def clip_high(self) -> float:
        """ε of the policy clip above 1."""
        return self.cliprange if self.cliprange_high is None else self.cliprange_high

    @property
    def needs_critic(self) -> bool:
        """False for the estimators that compare completions instead."""
        return estimator_needs(self.advantage_estimator, "values")

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages are whitened: `whiten_advantages`, or the estimator's own mark."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return estimator_whitens(self.advantage_estimator)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for log π_ref."""
        return self.kl_coef != 0 or self.kl_loss_coef != 0
