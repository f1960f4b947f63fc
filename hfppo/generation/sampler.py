"""The contract of samplers: token ids in, turns out."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from transformers import GenerationConfig, PreTrainedTokenizerBase

from hfppo.generation.stop_strings import StopStrings
from hfppo.sample import Ids, Turn


@dataclass(frozen=True)
class Sampling:
    """Settings that all samplers of this package share.

    One that changes the distribution must change log π_old, too.
    """

    temperature: float  # divides the logits
    max_tokens: int  # maximum number of tokens of a completion
    eos_ids: list[int]  # tokens that end a completion
    pad_id: int  # pads completions
    stops: StopStrings | None = None  # texts that end a completion as well


class Sampler(Protocol):
    """Anything that can sample completions from the current policy."""

    # Whether within `ready` it samples from the weights of the block's beginning, even if they are trained meanwhile.
    keeps_policy: bool = False

    def ready(self) -> AbstractContextManager[None]:
        """Load the current weights; the sampler may be called inside the block."""
        return nullcontext()

    def __call__(self, prompts: list[Ids], seeds: list[int] | None, budgets: list[int] | None = None) -> list[Turn]:
        """Sample one turn per prompt.

        Args:
            prompts: token ids.
            seeds: one per prompt; a turn depends only on its own prompt and seed. None: greedy.
            budgets: the maximum number of tokens of each turn; only given with tools, environments or an agent, whose
                turns may follow. None: the configured limit.
        """


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
