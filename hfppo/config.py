"""The configuration of a run, in the style of TrainingArguments."""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal

from transformers import TrainingArguments

from hfppo.functional import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS

CRITIC_FREE = tuple(name for name in ADVANTAGE_ESTIMATORS if name != "gae")
NEEDS_GROUPS = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")

# What a number must be, and the fields of which that is asked. Written so that NaN never meets it.
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda x: x >= 1,
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_ppo_epochs",
            "num_mini_batches",
            "num_generations",
            "max_completion_length",
            "local_rollout_forward_batch_size",
            "total_episodes",
            "max_prompt_length",
        ),
    ),
    (
        "at least 0",
        lambda x: x >= 0,
        (
            "kl_coef",
            "kl_loss_coef",
            "entropy_coef",
            "positive_nll_coef",
            "vf_coef",
            "missing_eos_penalty",
            "critic_warmup",
            "critic_learning_rate",
        ),
    ),
    ("in [0, 1]", lambda x: 0 <= x <= 1, ("gamma", "lam", "lam_critic")),
    (
        "above 0",
        lambda x: x > 0,
        ("temperature", "cliprange", "cliprange_high", "cliprange_value", "reward_clip", "lam_alpha", "target_kl"),
    ),
    ("above 1: below, it would undo the clip at ratio 1", lambda x: x > 1, ("dual_clip",)),
    ("below 1: the ratio is clipped to 1 − cliprange", lambda x: x < 1, ("cliprange",)),
)


# Inherited fields whose type is checked along with our own: rollouts are cut, and steps made, by them.
CHECKED = ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "max_grad_norm")


# What a name has in it that belongs to a secret.
SECRET_NAME = re.compile("token|key|secret|password", re.IGNORECASE)


@dataclass
class PPOConfig(TrainingArguments):
    """Everything a PPO run can be told, on top of `transformers.TrainingArguments`.

    A rollout holds `per_device_train_batch_size × gradient_accumulation_steps × num_mini_batches` completions per
    process and is used for `num_ppo_epochs × num_mini_batches` optimiser steps.

    Raises:
        ValueError: a field outside its range, or fields that contradict each other; the message names them.
    """

    # Defaults of TrainingArguments that fit PPO with a LoRA actor better.
    learning_rate: float = field(
        default=1e-5,
        metadata={"help": "Learning rate of the actor; ten times a usual full fine-tuning rate, for LoRA."},
    )
    logging_steps: float = field(default=10, metadata={"help": "Optimiser steps between logs."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide non-finite losses from the log. Off: a broken run shows."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Unused here: all columns of the dataset reach the reward functions."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every trainable parameter takes part in each step; searching costs time."}
    )

    # Changes the result: the rollout.
    num_ppo_epochs: int = field(
        default=4, metadata={"help": "Times that each rollout is gone through (TRL; arXiv:2403.17031)."}
    )
    num_mini_batches: int = field(
        default=1, metadata={"help": "Optimiser steps per PPO epoch (TRL). The rollout grows with it."}
    )
    total_episodes: int | None = field(
        default=None, metadata={"help": "Completions to train on in all, rounded up to rollouts; sets `max_steps`."}
    )
    num_generations: int = field(default=1, metadata={"help": "Completions per prompt."})
    max_prompt_length: int | None = field(
        default=512, metadata={"help": "Longest prompt in tokens, None for any; see `overlong_prompts`."}
    )
    overlong_prompts: Literal["drop", "truncate"] = field(
        default="drop", metadata={"help": "Drop longer prompts, or cut their beginning off; the count is logged."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Longest completion in tokens (GRPO)."})
    temperature: float = field(
        default=1.0, metadata={"help": "Logits are divided by it in every pass: sampling, old, reference, update."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Passed to `apply_chat_template`, for example {'enable_thinking': false}."}
    )

    # Changes the result: rewards.
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per reward function, 0 to only log it; None: 1 each (GRPO)."}
    )
    reward_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Passed to `from_pretrained` for reward models given by id or path."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a completion cut by the length limit (TRL)."}
    )
    normalize_scores: bool = field(
        default=False,
        metadata={"help": "Shift and scale scores by the mean and deviation of all scores so far (arXiv:2307.04964)."},
    )
    reward_clip: float | None = field(
        default=None, metadata={"help": "Scores are clipped to ± this, after they are normalised."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Scale token rewards to unit variance, keeping their mean (TRL)."}
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={"help": "Leave completions cut by the length limit out of the losses (arXiv:2503.14476)."},
    )

    # Changes the result: KL to the reference.
    kl_coef: float = field(default=0.05, metadata={"help": "β of the KL penalty in the reward (TRL); 0 turns it off."})
    kl_estimator: str = field(default="k1", metadata={"help": f"For the reward: {', '.join(KL_ESTIMATORS)}."})
    kl_loss_coef: float = field(default=0.0, metadata={"help": "λ of the KL term in the loss; 0 turns it off."})
    kl_loss_estimator: str = field(default="k3", metadata={"help": f"For the loss: {', '.join(KL_ESTIMATORS)}."})
    kl_loss_straight_through: bool = field(
        default=False, metadata={"help": "Give the KL in the loss the gradient of k2, which is unbiased on-policy."}
    )

    # Changes the result: advantages.
    advantage_estimator: str = field(
        default="gae", metadata={"help": f"{', '.join(ADVANTAGE_ESTIMATORS)}; only gae has a critic."}
    )
    gamma: float = field(default=1.0, metadata={"help": "Discount per token (TRL)."})
    lam: float = field(default=0.95, metadata={"help": "λ of GAE (TRL; arXiv:1506.02438)."})
    lam_critic: float | None = field(
        default=None, metadata={"help": "λ for the returns; None: `lam`. 1.0 decouples them (arXiv:2503.01491)."}
    )
    lam_alpha: float | None = field(
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
    policy_loss: str = field(default="ppo", metadata={"help": f"The surrogate: {', '.join(POLICY_LOSSES)}."})
    policy_mode: Literal["decoupled", "bypass"] = field(
        default="decoupled",
        metadata={"help": "π_old recomputed by the training model, or the sampler's log-probs as they are."},
    )
    cliprange: float = field(default=0.2, metadata={"help": "ε of the policy clip (TRL; arXiv:1707.06347)."})
    cliprange_high: float | None = field(
        default=None, metadata={"help": "ε above 1; None: `cliprange`. Larger is clip-higher (arXiv:2503.14476)."}
    )
    dual_clip: float | None = field(
        default=None, metadata={"help": "c > 1 bounds the loss of tokens with A < 0 (arXiv:1912.09729)."}
    )
    loss_reduction: str = field(default="token-mean", metadata={"help": f"{', '.join(REDUCTIONS)}."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus; 0 turns it off."})
    positive_nll_coef: float = field(
        default=0.0, metadata={"help": "Weight of the NLL on completions with full score (arXiv:2504.05118)."}
    )
    positive_score: float = field(default=1.0, metadata={"help": "The score from which `positive_nll_coef` counts."})
    target_kl: float | None = field(
        default=None,
        metadata={"help": "Drop the rest of a rollout once `policy/approx_kl` of a mini-batch passes this."},
    )

    # Changes the result: the critic.
    critic_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the critic; None: `learning_rate`."}
    )
    cliprange_value: float | None = field(
        default=0.2, metadata={"help": "ε of the value clip in units of the return (TRL); None turns it off."}
    )
    vf_coef: float = field(
        default=0.1, metadata={"help": "Weight of the value loss (TRL); couples only through a shared trunk."}
    )
    critic_warmup: int = field(
        default=0, metadata={"help": "Rollouts at the start that train the critic only; the actor does not move."}
    )
    detach_shared_critic: bool = field(
        default=False, metadata={"help": "With critic='shared': the value loss does not reach the actor's weights."}
    )

    # Changes the result: evaluation and loading.
    eval_do_sample: bool = field(
        default=False, metadata={"help": "Evaluate with sampled completions instead of greedy ones."}
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Passed to `from_pretrained` when a model is given by its id or path."}
    )

    # What is shown.
    log_completions: bool = field(
        default=False, metadata={"help": "Print some completions of each rollout with their scores (GRPO)."}
    )

    # Speed and memory only.
    local_rollout_forward_batch_size: int = field(
        default=64, metadata={"help": "Rows per process that are sampled, or passed without gradient, at once (TRL)."}
    )

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (as upstream declares it)
        *TrainingArguments._VALID_DICT_FIELDS,
        "chat_template_kwargs",
        "model_init_kwargs",
        "reward_model_init_kwargs",
    ]

    def __post_init__(self) -> None:
        self._check_types()
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            self.metric_for_best_model = "eval_reward"  # Trainer would take eval_loss, which prompts do not have
        super().__post_init__()
        self._check_choices()
        self._check_ranges()
        self._check_combinations()
        if self.total_episodes is not None:
            rollouts = -(-self.total_episodes // (self.rollout_size * self.world_size))
            self.max_steps = rollouts * self.updates_per_rollout

    def to_dict(self) -> dict[str, Any]:
        """The fields as trackers, checkpoints and the model card show them: also nested tokens and keys are hidden."""
        return {name: without_secrets(value) for name, value in super().to_dict().items()}

    def __getstate__(self) -> dict[str, Any]:
        # `training_args.bin` is this, pickled, and Trainer pushes it.
        return {name: without_secrets(value) for name, value in vars(self).items()} | {"hub_token": None}

    @property
    def rollout_size(self) -> int:
        """Completions per process in a rollout."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_mini_batches

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser steps per rollout."""
        return self.num_ppo_epochs * self.num_mini_batches

    @property
    def clip_high(self) -> float:
        """ε of the policy clip above 1."""
        return self.cliprange if self.cliprange_high is None else self.cliprange_high

    @property
    def needs_critic(self) -> bool:
        """False for the estimators that compare completions instead."""
        return self.advantage_estimator not in CRITIC_FREE

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, or the habit of the estimator."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.advantage_estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for log π_ref."""
        return self.kl_coef != 0 or self.kl_loss_coef != 0

    def _check_types(self) -> None:
        for f in fields(PPOConfig):
            value = getattr(self, f.name)
            if (f.name in TrainingArguments.__dataclass_fields__ and f.name not in CHECKED) or value is None:
                continue
            if f.type in (int, int | None) and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{f.name}={value!r} must be a whole number")
            if f.type in (float, float | None) and not (isinstance(value, Real) and math.isfinite(value)):
                raise ValueError(
                    f"{f.name}={value!r} must be a finite number; YAML wants 1.0e-5, and takes 1e-5 for text"
                )

    def _check_choices(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "overlong_prompts": ("drop", "truncate"),
            "kl_estimator": tuple(KL_ESTIMATORS),
            "kl_loss_estimator": tuple(KL_ESTIMATORS),
            "advantage_estimator": tuple(ADVANTAGE_ESTIMATORS),
            "policy_loss": tuple(POLICY_LOSSES),
            "policy_mode": ("decoupled", "bypass"),
            "loss_reduction": tuple(REDUCTIONS),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(allowed)}")

    def _check_ranges(self) -> None:
        for demand, is_met, names in RANGES:
            for name in names:
                if (value := getattr(self, name)) is not None and not is_met(value):
                    raise ValueError(f"{name}={value} must be {demand}")

    def _check_combinations(self) -> None:
        if self.advantage_estimator in NEEDS_GROUPS and self.num_generations < 2:
            raise ValueError(
                f"advantage_estimator={self.advantage_estimator!r} compares completions of one prompt, but "
                f"num_generations={self.num_generations}; raise num_generations to 2 or more"
            )
        if self.rollout_size % self.num_generations:
            raise ValueError(
                f"a rollout of {self.rollout_size} completions per process (per_device_train_batch_size="
                f"{self.per_device_train_batch_size} × gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} × num_mini_batches={self.num_mini_batches}) cannot be divided "
                f"into groups of num_generations={self.num_generations}; choose sizes that divide"
            )
        if self.kl_loss_coef and self.kl_loss_estimator == "k1" and not self.kl_loss_straight_through:
            warnings.warn(
                "kl_loss_estimator='k1' has a gradient of zero mean as a loss: it adds noise and holds nothing back. "
                "Use k2 or k3, or kl_loss_straight_through=True.",
                stacklevel=3,
            )
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True would change the rollouts in the middle of a run; lower "
                "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor, which changes "
                "no gradient"
            )
        if self.normalize_scores and self.positive_nll_coef:
            raise ValueError(
                f"positive_nll_coef={self.positive_nll_coef} looks for scores from positive_score="
                f"{self.positive_score}, and normalize_scores=True moves all scores; set one of them back"
            )
        if self.critic_warmup and not self.needs_critic:
            raise ValueError(
                f"critic_warmup={self.critic_warmup} has nothing to train: advantage_estimator="
                f"{self.advantage_estimator!r} has no critic; set critic_warmup=0 or advantage_estimator='gae'"
            )


def without_secrets(value: Any) -> Any:
    """A value in which the texts under names such as "token" or "api_key" are hidden."""
    if not isinstance(value, dict):
        return value
    return {
        name: f"<{name.upper()}>"
        if isinstance(inner, str) and isinstance(name, str) and SECRET_NAME.search(name)
        else without_secrets(inner)
        for name, inner in value.items()
    }


def resume_argument(args: TrainingArguments) -> str | bool | None:
    """`args.resume_from_checkpoint` as `Trainer.train` wants it: "true" is the last checkpoint in `output_dir`."""
    value = args.resume_from_checkpoint
    return {"true": True, "false": None}.get(value.lower(), value) if isinstance(value, str) else value
