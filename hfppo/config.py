"""The configuration of a run, in the style of TrainingArguments."""

import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, cast

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from hfppo import functional as F
from hfppo.config_checks import METRIC_SCHEDULERS, accumulation_steps, check_config, check_fields
from hfppo.trl_names import translate_names

# Types with a range and its words; `check_fields` reads them from annotations, HfArgumentParser ignores them.
Count = Annotated[int, "at least 1", lambda x: x >= 1]
NotNegativeInt = Annotated[int, "at least 0", lambda x: x >= 0]
ZeroOrOne = Annotated[int, "0 or 1", lambda x: x in (0, 1)]
Seed = Annotated[int, "in [0, 2**32 − 1], NumPy's seeds", lambda x: 0 <= x < 2**32]
NotNegative = Annotated[float, "at least 0", lambda x: x >= 0]
Positive = Annotated[float, "above 0", lambda x: x > 0]
Share = Annotated[float, "in [0, 1]", lambda x: 0 <= x <= 1]
ClipRange = Annotated[float, "in (0, 1): the ratio is clipped to 1 − cliprange", lambda x: 0 < x < 1]
DualClip = Annotated[float, "above 1: below, it would undo the clip at ratio 1", lambda x: x > 1]
Range = Annotated[list[float], "two numbers, the lower one first", lambda x: len(x) == 2 and x[0] < x[1]]
WeightCap = Annotated[float, "at least 1: below, it would shrink weights of tokens without mismatch", lambda x: x >= 1]

logger = logging.getLogger(__name__)

Kwargs = dict[str, Any] | str | None  # or JSON of one

# For fields of TrainingArguments; the others have theirs below.
INHERITED = {
    "per_device_train_batch_size": Count,
    "per_device_eval_batch_size": Count,
    "gradient_accumulation_steps": Count,
    "max_grad_norm": NotNegative,
    "seed": Seed,
}

# The field's names: transformers 5.20 renamed it.
CHECKPOINTING = [
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
]


def follows_base(args: TrainingArguments) -> bool:
    """Return whether unset autocast and checkpointing follow the base: on CUDA, without an engine's own settings."""
    own_settings = args.deepspeed_plugin is not None or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    return args.device.type == "cuda" and not own_settings


def option(default: object, help: str, **metadata: object) -> Any:
    """Return a dataclass field with its text for `--help`."""
    return field(default=default, metadata={"help": help, **metadata})


class TranslatesNames(type):
    """Class of a configuration that may be called with TRL's names.

    A dataclass that inherits from the configuration has an `__init__` of its own, and this method.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **translate_names(cls, kwargs))


@dataclass
class PPOConfig(TrainingArguments, metaclass=TranslatesNames):
    """Configuration of `PPOTrainer`: the fields of `transformers.TrainingArguments` and PPO's own.

    Example::

        from hfppo import PPOConfig

        args = PPOConfig(output_dir="out", learning_rate=1e-4, num_mini_batches=4, kl_coef=0.02)
        print(args.rollout_size_per_process)  # 8 × 1 × 4 = 32 completions
        print(args.updates_per_rollout)  # 1 × 4 = 4 optimizer steps

    A rollout has `per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches` completions per
    process, or `rollout_size` of all processes. It is used for `num_ppo_epochs × num_mini_batches` optimizer steps, or
    more with `num_critic_epochs`.

    Fields by TRL's names are translated, and one line in the log names them.

    Raises:
        TypeError: fields that do not exist, or values of TRL's fields that have no counterpart.
        ValueError: a field outside its range, or fields that contradict each other.
    """

    # Fields of TrainingArguments with another default.
    learning_rate: NotNegative = option(2e-4, "Learning rate of actor and critic (LoRA; from 0.5B on 1e-5 to 5e-5).")
    logging_steps: float | None = option(None, "Optimizer steps between logs; None: one log per rollout.")
    save_steps: float | None = option(
        None, "Optimizer steps between checkpoints; None: ten in a run; each evaluation with load_best_model_at_end."
    )
    logging_nan_inf_filter: bool = option(False, "Hide non-finite losses from the log; False shows them.")
    remove_unused_columns: bool = option(False, "Not used: all columns of the dataset reach the reward functions.")
    ddp_find_unused_parameters: bool | None = option(
        True, "True keeps resumed runs exact with any number of processes, False with one or two."
    )

    # Chosen by the dtype of the base if you leave them out.
    bf16: bool | None = option(
        None, "Autocast in bfloat16. None: on where a CUDA GPU trains a bfloat16 base.", nargs="?", const=True
    )
    gradient_checkpointing: bool | None = option(
        None, "Name of activation_checkpointing before transformers 5.20.", nargs="?", const=True
    )

    # Changes the result: the rollout.
    num_ppo_epochs: Count = option(1, "Number of passes over each rollout (TRL).")
    num_mini_batches: Count = option(8, "Mini-batches of a rollout: optimizer steps per PPO epoch (TRL).")
    rollout_size: Count | None = option(None, "Completions of all processes; sets gradient_accumulation_steps.")
    total_episodes: Count | None = option(None, "Completions to train on, in whole rollouts; sets max_steps (TRL).")
    num_generations: Count = option(1, "Completions per prompt (GRPO).")
    prompt_candidates: Count = option(1, "Candidates per prompt; the most informative are kept (arXiv:2510.01135).")
    max_prompt_length: Count | None = option(512, "Longest prompt in tokens; longer ones are dropped. None: no limit.")
    max_completion_length: Count = option(256, "Longest completion in tokens, with those of tools (GRPO).")
    max_turn_length: Count | None = option(None, "Longest turn of the model in tokens; None: no limit.")
    max_tool_calling_iterations: Count | None = option(None, "Rounds of tool calls per completion (GRPO).")
    tool_timeout: Positive | None = option(None, "Seconds for a call of a tool or environment; None: no limit.")
    temperature: Positive = option(1.0, "Divides the logits in every pass: sampling, old, reference, update (GRPO).")
    chat_template_kwargs: Kwargs = option(None, "Passed to apply_chat_template: {'enable_thinking': false} (GRPO).")
    generation_kwargs: Kwargs = option(None, "What ends a completion: stop_strings, stop_token_ids (GRPO).")

    # Changes the last digits of the result, see `policy_mode`: the sampler.
    use_vllm: bool = option(False, "Sample with vLLM instead of `generate` (GRPO).")
    vllm_mode: Literal["colocate", "server"] = option("colocate", "Engines in the processes, or a server (GRPO).")
    vllm_server_base_url: list[str] | str | None = option(
        None, "Address of `vllm serve`, or several addresses; None: 127.0.0.1:8000 (GRPO).", nargs="+"
    )
    vllm_server_timeout: Positive = option(240.0, "Seconds to wait for the server to start, and to answer (GRPO).")
    vllm_engine_kwargs: Kwargs = option(None, "Passed to vllm.LLM; gpu_memory_utilization is 0.3 unless given.")

    # Changes the result: which policy samples.
    rollouts_ahead: ZeroOrOne = option(0, "1: sample the next rollout during the update (arXiv:2410.18252).")

    # Changes the result: rewards.
    reward_weights: list[float] | None = option(None, "A weight per reward function; None: 1 each (GRPO).")
    missing_eos_penalty: NotNegative | None = option(None, "Subtracted from a truncated completion's score (TRL).")
    mask_truncated_completions: bool = option(False, "Leave truncated completions out of the actor's losses (GRPO).")

    # Changes the result: KL to the reference.
    kl_coef: NotNegative = option(0.05, "β of the KL penalty in the reward; 0 turns it off (TRL).")
    kl_loss_coef: NotNegative = option(0.0, "Coefficient of the KL term in the loss; 0 turns it off.")
    kl_estimator: str | None = option(
        None, "KL estimator (TRL); None: k1 in the reward, k3 in the loss.", choices=F.KL_ESTIMATORS
    )

    # Changes the result: advantages.
    advantage_estimator: str = option(
        "gae", "Estimator of the advantages; only gae has a critic.", choices=F.ADVANTAGE_ESTIMATORS
    )
    gamma: Share = option(1.0, "Discount per token (TRL).")
    lam: Share = option(1.0, "λ of GAE (TRL, whose default is 0.95; arXiv:1506.02438).")
    gamma_turn: Share | None = option(None, "Discount from one turn to the next; None: `gamma`.")
    lam_turn: Share | None = option(None, "λ from one turn to the next; None: the λ within a turn.")
    lam_critic: Share | None = option(None, "λ of the returns; None: the advantages' λ (arXiv:2503.01491).")
    lam_alpha: Positive | None = option(None, "α of λ = 1 − 1/(α·length), in place of lam (arXiv:2504.05118).")
    whiten_advantages: bool | None = option(None, "Whiten over the global rollout; None: as the estimator's paper.")
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "With grpo: divide by the deviation of the group, of the rollout, or not (GRPO; arXiv:2503.20783)."
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = option(
        "sum_then_normalize", "With grpo: scale the sum of rewards, or each reward and then their sum (GRPO)."
    )
    bootstrap_truncated: bool = option(False, "A truncated completion ends with the critic's value instead of 0.")

    # Changes the result: the losses.
    policy_loss: str = option("ppo", "The surrogate objective.", choices=F.POLICY_LOSSES)
    policy_mode: str | None = option(
        None,
        "log π_old: recomputed (decoupled), the sampler's (bypass), or recomputed, and the loss weighted by "
        "π_old/π_rollout. None: bypass with dis, token_truncate with `rollouts_ahead`, otherwise decoupled.",
        choices=("decoupled", "bypass", *F.MISMATCH_MODES),
    )
    vllm_importance_sampling_clip_max: WeightCap = option(2.0, "Largest weight c of policy_mode, or [1/c, c] (GRPO).")
    cliprange: ClipRange = option(0.2, "ε of the policy clip (TRL; arXiv:1707.06347).")
    cliprange_high: Positive | None = option(None, "ε above 1; None: cliprange (arXiv:2503.14476).")
    dual_clip: DualClip | None = option(None, "c > 1 bounds the loss where A < 0 (arXiv:1912.09729).")
    loss_reduction: str = option("token-mean", "Reduces the losses of tokens to one number.", choices=F.REDUCTIONS)
    entropy_coef: NotNegative = option(0.0, "Weight of the entropy bonus; 0 turns it off (GRPO).")

    # Changes the result: the critic.
    critic_learning_rate: NotNegative | None = option(None, "Learning rate of the critic; None: `learning_rate`.")
    num_critic_epochs: Count | None = option(None, "The critic's passes over each rollout; None: num_ppo_epochs.")
    value_range: Range | None = option(None, "[low, high] of the return; None: no bound (arXiv:2608.23566).")
    value_loss: str = option("mse", "mse; or with `value_range` bce (arXiv:2609.26355).", choices=F.VALUE_LOSSES)
    critic_update: Literal["together", "after_actor", "policy_aligned"] = option(
        "together", "The critic's steps: with the actor's, after them, or after them with weighted returns."
    )
    vf_coef: NotNegative = option(0.1, "Weight of the value loss; couples only through a shared trunk (TRL).")
    critic_pretraining_completions: NotNegativeInt = option(0, "Completions for the critic alone, before PPO.")
    critic_warmup: NotNegativeInt = option(0, "Rollouts at the start that train only the critic.")
    critic_layers: Count | None = option(None, "Top layers that critic='adapter' adapts; None: all.")

    # Changes the result: evaluation and loading.
    model_init_kwargs: Kwargs = option(None, "Passed to from_pretrained for models given by id or path (GRPO).")

    # Output only.
    log_completions: bool = option(False, "Print eight completions of each rollout with their scores (GRPO).")

    # Speed and memory only.
    max_tokens_per_micro_batch: Count | None = option(None, "Most tokens in a forward of the update, with padding.")
    local_rollout_forward_batch_size: Count | None = option(
        None, "Rows per process in one call of the sampler, or one pass without gradient (TRL); None: by memory."
    )

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (as upstream declares it)
        *TrainingArguments._VALID_DICT_FIELDS,
        "chat_template_kwargs",
        "generation_kwargs",
        "model_init_kwargs",
        "vllm_engine_kwargs",
    ]

    def __post_init__(self) -> None:
        if self.max_grad_norm in (None, math.inf):  # infinite in a copy, see below
            self.max_grad_norm = 0.0  # no clipping
        check_fields(self, INHERITED)
        if self.rollout_size is not None:
            # Before TrainingArguments makes DeepSpeed's configuration of it, and knows the number of processes.
            self.gradient_accumulation_steps = accumulation_steps(self)
        self._fill_in()
        unset = [name for name in CHECKPOINTING if getattr(self, name) is None]
        super().__post_init__()
        self.output_dir = os.path.abspath(cast(str, self.output_dir))  # a reward function may change the folder
        if not follows_base(self):
            self.bf16 = bool(self.bf16)
            vars(self).update({name: bool(getattr(self, name)) for name in CHECKPOINTING})
        elif len(unset) == len(CHECKPOINTING):
            vars(self).update(dict.fromkeys(CHECKPOINTING))
        check_config(self)
        if self.max_grad_norm == 0:
            self.max_grad_norm = math.inf  # Trainer calls the clipping hook, which also measures the norm
        if self.total_episodes is not None:
            rollouts = self.rollouts_for(self.total_episodes) - self.critic_pretraining_rollouts
            steps = rollouts * self.updates_per_rollout
            if self.max_steps not in (-1, steps):
                logger.warning("total_episodes makes max_steps=%s; %s is not used", steps, self.max_steps)
            self.max_steps = steps

    def _fill_in(self) -> None:
        """Set the fields whose default follows from other fields."""
        compares = self.load_best_model_at_end or self.save_strategy == "best"
        if self.metric_for_best_model is None and (compares or self.lr_scheduler_type in METRIC_SCHEDULERS):
            self.metric_for_best_model = "eval_reward"  # Trainer's default is eval_loss, which prompts do not have
        if self.policy_mode is None:
            otherwise = "token_truncate" if self.rollouts_ahead else "decoupled"
            self.policy_mode = "bypass" if self.policy_loss == "dis" else otherwise
        if self.logging_steps is None:
            self.logging_steps = self.updates_per_rollout
        if self.save_steps is None:  # the best evaluation counts only if its step is saved
            every = self.eval_steps or self.logging_steps
            self.save_steps = every if self.load_best_model_at_end else 0.1  # of the run

    def __getstate__(self) -> dict[str, object]:
        # Trainer pickles the configuration, with the token, into `training_args.bin`, and pushes that file.
        return vars(self) | {"hub_token": None}

    @classmethod
    def translate_names(cls, given: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
        """Return fields by their names here, for scripts that read them from a file or from flags.

        Args:
            given: fields by their names here or in TRL.
            others: names that exist elsewhere, such as other arguments of the script.
        Raises:
            TypeError: a name is neither a field nor in `others`, or a value of TRL's has no counterpart.
            ValueError: two names give a field different values.
        """
        return translate_names(cls, given, others)

    def for_base(self, dtype: torch.dtype) -> Self:
        """Return the configuration of a run with this base, with autocast and checkpointing set.

        If unset, both are on for a bfloat16 base on a CUDA GPU, and otherwise off.
        """
        unset = [name for name in ("bf16", *CHECKPOINTING) if getattr(self, name) is None]
        if not unset:
            return self
        chosen = object.__new__(type(self))  # copy.copy leaves out the token, as `__getstate__` does
        vars(chosen).update(vars(self) | dict.fromkeys(unset, dtype == torch.bfloat16))
        if "bf16" in unset and (self.mixed_precision != "no" or not is_torch_bf16_gpu_available()):
            chosen.bf16 = False  # `fp16` or the launcher has chosen another precision
        if chosen.bf16:
            chosen.mixed_precision = "bf16"  # TrainingArguments has read `bf16` already
        return chosen

    @property
    def rollout_size_per_process(self) -> int:
        """Completions per process in a rollout."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_mini_batches

    @property
    def prompts_per_process(self) -> int:
        """Prompts per process in a rollout."""
        return self.rollout_size_per_process // self.num_generations

    def rollouts_for(self, completions: int) -> int:
        """Return the number of rollouts with at least this many completions of all processes."""
        return -(-completions // (self.rollout_size_per_process * self.world_size))

    @property
    def counts_completions(self) -> bool:
        """Whether the run's length is a number of completions, not of optimizer steps."""
        return self.total_episodes is not None or self.max_steps <= 0

    @property
    def critic_pretraining_rollouts(self) -> int:
        """Rollouts that the critic's pretraining collects: at least two, since one is held out; 0 without it."""
        rollouts = self.rollouts_for(self.critic_pretraining_completions)
        return max(rollouts, 2) if rollouts else 0

    @property
    def critic_lr(self) -> float:
        """Learning rate of the critic: `critic_learning_rate`, or the actor's."""
        return self.learning_rate if self.critic_learning_rate is None else self.critic_learning_rate

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout that move actor, critic or both."""
        epochs = (self.num_ppo_epochs, self.critic_epochs)
        return (sum(epochs) if self.critic_follows else max(epochs)) * self.num_mini_batches

    @property
    def critic_follows(self) -> bool:
        """Whether the critic's steps on a rollout come after the actor's."""
        return self.critic_update != "together"

    @property
    def critic_epochs(self) -> int:
        """Number of the critic's passes over each rollout: `num_critic_epochs`, or `num_ppo_epochs`."""
        return self.num_ppo_epochs if self.num_critic_epochs is None else self.num_critic_epochs

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end a completion."""
        return cast(dict, self.generation_kwargs or {}).get("stop_strings", [])

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens other than EOS that end a completion."""
        return cast(dict, self.generation_kwargs or {}).get("stop_token_ids", [])

    @property
    def clip_high(self) -> float:
        """ε of the policy clip above 1."""
        return self.cliprange if self.cliprange_high is None else self.cliprange_high

    @property
    def bounds(self) -> F.ValueRange | None:
        """The range of the values with the link that fits `value_loss`; None: no bound."""
        if self.value_range is None:
            return None
        low, high = self.value_range
        return F.ValueRange(low, high, F.VALUE_LOSSES[self.value_loss])

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator reads values."""
        return F.estimator_needs(self.advantage_estimator, "values")

    @property
    def selects_groups(self) -> bool:
        """Whether more groups are sampled than a rollout has, and those with spread are kept."""
        return self.prompt_candidates > 1 and not self.needs_critic

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages are whitened: `whiten_advantages`, or as the estimator's paper does."""
        habit = F.estimator_whitens(self.advantage_estimator)
        return habit if self.whiten_advantages is None else self.whiten_advantages

    @property
    def reward_scale(self) -> str:
        """What `grpo` divides by: `scale_rewards`; the rollout's deviation if scores are normalized by function."""
        return self.scale_rewards if self.multi_objective_aggregation == "sum_then_normalize" else "batch"

    @property
    def reward_kl_estimator(self) -> str:
        """KL estimator of the reward, and of the metric `kl`: `kl_estimator`, or k1."""
        return self.kl_estimator or "k1"

    @property
    def needs_reference(self) -> bool:
        """Whether the reward or the loss has a KL term."""
        return self.kl_coef != 0 or self.kl_loss_coef != 0
