"""The contract of samplers, and the completions they return."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hfppo.functional.shape_checks import require_same_shape
from hfppo.generation.stop_strings import StopStrings


@dataclass(frozen=True)
class Sampling:
    """Settings that all samplers of this package share."""

    temperature: float  # divides the logits
    max_tokens: int  # maximum number of tokens of a completion
    eos_ids: list[int]  # tokens that end a completion
    pad_id: int  # pads completions
    stops: StopStrings | None = None  # texts that end a completion as well


@dataclass(frozen=True)
class Completions:
    """B completions of T columns, padded on the right."""

    ids: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, True on sampled tokens, up to and including the first end of each turn
    truncated: Tensor  # (B,) bool, True where a limit ended it, False for EOS, a stop or the environment
    logprobs: Tensor  # (B, T) float32, log π_rollout of each token at temperature, nats, 0 where none was sampled
    context: Tensor | None = None  # (B, T) bool, True on tokens of tools and environments; None if there are none
    cut: Tensor | None = None  # (B,) bool, True where a limit of tokens ended it within a turn; None: as `truncated`
    open_ended: Tensor | None = None  # (B,) bool, True where the critic values the last state; None: as `truncated`

    def __post_init__(self) -> None:
        require_same_shape(ids=self.ids, mask=self.mask, logprobs=self.logprobs)
        require_same_shape(truncated=self.truncated, first_column=self.ids[:, 0])

    @property
    def real(self) -> Tensor:
        """(B, T) bool, True on all tokens, sampled ones and context: no holes, padding at the end."""
        return self.mask if self.context is None else self.mask | self.context

    def cpu(self) -> "Completions":
        """Return a copy on the CPU."""
        moved = {f.name: value.cpu() for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **moved)

    def rows(self, which: Tensor) -> "Completions":
        """Return some rows, (N,)."""
        given = {f.name: value[which] for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **given)


class Sampler(Protocol):
    """Anything that can sample completions from the current policy."""

    # Whether within `ready` it samples from the weights of the block's beginning, even if they are trained meanwhile.
    keeps_policy: bool = False

    def ready(self) -> AbstractContextManager[None]:
        """Load the current weights; the sampler may be called inside the block."""
        return nullcontext()

    def __call__(
        self, prompt_ids: Tensor, prompt_mask: Tensor, seeds: list[int] | None, budgets: list[int] | None = None
    ) -> Completions:
        """Sample one completion per row.

        Args:
            prompt_ids: (B, P), padded on the left, on the trainer's device; the completions may be on any.
            prompt_mask: (B, P) bool, True on real tokens.
            seeds: one per row; the completion of a row depends only on its own seed. None: greedy.
            budgets: the maximum number of tokens of each row; only given with tools or environments. None: the
                configured limit.
        """


def completions_from(
    ids: Tensor,
    logprobs: Tensor,
    eos_ids: list[int],
    limits: Tensor | None = None,
    stops: Tensor | None = None,
) -> Completions:
    """Find where completions end: at the first EOS or stop. Padding is not read, because it may be EOS too.

    Args:
        ids: (B, T), anything after the first end.
        logprobs: (B, T).
        eos_ids: tokens that end a completion.
        limits: (B,) the maximum number of tokens of each; None: T.
        stops: (B,) the number of tokens up to the end of the first stop string; 0 if there is none.
    """
    is_end = torch.isin(ids, torch.tensor(eos_ids, device=ids.device))
    counts = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    if stops is not None:
        is_end |= counts == stops[:, None]
    mask = (is_end.long().cumsum(dim=1) - is_end.long()) == 0
    if limits is not None:
        mask &= counts <= limits[:, None]
        is_end = is_end & mask
    return Completions(ids, mask, ~is_end.any(dim=1), logprobs.where(mask, 0.0))


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> list[int]:
    """Return the ids that end a completion: of the tokenizer and of the model's generation config.

    Call it before training starts: Trainer then rewrites the generation config.

    Raises:
        ValueError: there is none, so no completion ever ends.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ValueError(
            "neither the tokenizer nor the model's generation config has an EOS token, so no completion would end; "
            "set processing_class.eos_token"
        )
    return sorted(ids)


def completion_ids(text: str, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> list[int]:
    """Return the token ids of a written completion, ending in EOS as the policy's completions do."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    # Chat models end their turns with the tokenizer's EOS; their generation config has other ends, too.
    eos_id = eos_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    return ids if ids and ids[-1] in eos_ids else [*ids, eos_id]
