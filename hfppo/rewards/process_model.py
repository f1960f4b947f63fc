"""Process reward models: a reward for each step of a completion, or for each token.

    reward_funcs=[right_answer, "org/process-reward-model"]

Steps are those of TRL's PRMTrainer: the model reads a step with its separator, and judges at the last token of both.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from peft import PeftModel
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hfppo.rewards.model import RewardModel
from hfppo.rewards.reward_func import Log, RewardBatch


class Part(NamedTuple):
    """A part of a completion that the model judges at its last token."""

    ids: list[int]  # the reward model's tokens
    token: int  # the completion token that gets the reward


class ProcessRewardModel(RewardModel):
    """A token-classification model that follows the contract of `hfppo.rewards.reward_func`, with token rewards.

    A step ends with the separator or with the completion. Its reward is on the token that writes its last character;
    all other tokens get 0. Prompt, steps and separators are tokenized one by one, as TRL's PRMTrainer does; in a
    conversation the prompt is rendered by the reward tokenizer's chat template.

    Args:
        model: its logits are (B, T, labels). One label is the reward itself; of several, `label`'s probability is.
        tokenizer: the model's own.
        batch_size: completions at once.
        label: index or name; None for a model with one label, or for 1 of two: TRL's label of right steps.
        device: see `RewardModel`.
        step_separator: the text that ends a step; None: each token is a step. Where the policy has another tokenizer,
            a token's reward goes to the token that writes its last character.
        step_token: a token that the model reads instead of the separator, such as "<extra_0>"; None: the separator.

    Raises:
        ValueError: an unknown label or step token, or an empty separator.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        label: int | str | None = None,
        device: torch.device | None = None,
        step_separator: str | None = "\n",
        step_token: str | None = None,
    ):
        label = 1 if label is None and model.config.num_labels == 2 else label  # as PRMTrainer's models
        super().__init__(model, tokenizer, batch_size, label, device)
        if step_separator == "" or (step_separator is None and step_token is not None):
            raise ValueError(
                f"step_separator={step_separator!r} with step_token={step_token!r}: pass the text that ends a step, "
                "or None for both to reward each token"
            )
        if step_token is not None and step_token not in tokenizer.get_vocab():
            raise ValueError(
                f"step_token={step_token!r} is not a token of {self.__name__}'s tokenizer; pass one that is"
            )
        self.step_separator, self.step_token = step_separator, step_token

    def check(self, tokenizer: PreTrainedTokenizerBase, several_turns: bool) -> None:
        """Raise if the completions of a run cannot be judged.

        Args:
            tokenizer: the policy's.
        Raises:
            ValueError: completions have several turns, or a tokenizer does not say which text a token writes.
        """
        if several_turns:
            raise ValueError(
                f"reward model {self.__name__!r} rewards the steps of one turn, but completions with tools or an "
                "environment have several turns; leave the model, or tools and environment, out"
            )
        own = [("its tokenizer", self.tokenizer)] if self.step_separator is None else []
        for name, given in [("processing_class", tokenizer), *own]:
            if not isinstance(given, PreTrainedTokenizerFast):
                raise ValueError(
                    f"reward model {self.__name__!r} needs the text of each token, but {name}, a "
                    f"{type(given).__name__}, does not have it; pass a PreTrainedTokenizerFast"
                )

    def score_batch(self, batch: RewardBatch, log: Log) -> list[list[float] | None]:
        """Return a reward for each token; None for a completion that is longer than the model's positions."""
        parts = self.parts_of(batch)
        read = [[token for part in some for token in part.ids] for some in parts]
        fits = [self.max_length is None or len(ids) <= self.max_length for ids in read]
        rewards = [[0.0] * len(ids) for ids in batch.completion_ids]
        rows = [row for row, ids in enumerate(read) if ids and fits[row]]
        whole = [self.prompt_of(batch, row) + read[row] for row in rows]
        sequences = [ids if self.max_length is None else ids[-self.max_length :] for ids in whole]
        for row, ids, logits in zip(rows, sequences, self.outputs(sequences), strict=True):
            judged = self.judged(logits[: len(ids)])[-len(read[row]) :].tolist()  # without the padding
            for end, part in zip(accumulate(len(part.ids) for part in parts[row]), parts[row], strict=True):
                rewards[row][part.token] += judged[end - 1]
        return [some if fit else None for some, fit in zip(rewards, fits, strict=True)]

    def parts_of(self, batch: RewardBatch) -> list[list[Part]]:
        """Return the parts of each completion."""
        policy = cast(PreTrainedTokenizerFast, batch.tokenizer)
        if self.step_separator is None and policy.get_vocab() == self.tokenizer.get_vocab():
            return [[Part([token], at) for at, token in enumerate(ids)] for ids in batch.completion_ids]
        return [self.parts_of_text(*written(policy, one.row.prompt_ids, one.ids)) for one in batch.samples]

    def parts_of_text(self, text: str, ends: list[int]) -> list[Part]:
        """Return the parts of one completion.

        Args:
            ends: length of the text up to and including each of its tokens.
        """
        if self.step_separator is None:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            return [Part([token], bisect_left(ends, end)) for token, (_, end) in pairs]
        mark, parts, end = self.ids_of(self.step_token or self.step_separator), [], 0
        for step in text.split(self.step_separator):
            end = min(end + len(step + self.step_separator), len(text))
            if step.strip():
                parts.append(Part(self.ids_of(step) + mark, bisect_left(ends, end)))
        return parts

    def prompt_of(self, batch: RewardBatch, row: int) -> list[int]:
        """Return the tokens before a completion, as TRL's PRMTrainer or the chat template writes them."""
        prompt = batch.prompts[row]
        if isinstance(prompt, str):
            start = self.tokenizer.bos_token_id
            return ([] if start is None else [start]) + self.ids_of(prompt)
        begun = prompt[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not begun, "continue_final_message": begun}
        return self.ids_of(self.rendered(prompt, batch.columns, row, **options))

    def ids_of(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def judged(self, logits: Tensor) -> Tensor:
        """Return the reward at each position, (T,), from (T, labels) logits."""
        return logits[:, 0] if logits.shape[1] == 1 else logits.softmax(dim=1)[:, self.label]

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, T, labels) logits of (B, T) token ids."""
        return self.model(input_ids=ids, attention_mask=mask).logits


def written(tokenizer: PreTrainedTokenizerFast, prompt_ids: list[int], ids: list[int]) -> tuple[str, list[int]]:
    """Return the text that a completion adds to its prompt, and for each of its tokens where the text then ends.

    The bytes of a character may be on several tokens; the last of them writes it.
    """
    added = list(texts_of(tokenizer, [*prompt_ids, *ids]))[len(prompt_ids) :]
    return "".join(added), list(accumulate(map(len, added)))


def texts_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> Iterator[str]:
    """Yield the text that each token adds to the text of the tokens before it."""
    stream = DecodeStream(skip_special_tokens=True)
    for token in ids:
        try:
            text = stream.step(tokenizer.backend_tokenizer, token)
        except Exception:  # tokenizers has no class for it: this token shows that earlier bytes are not a character
            stream = DecodeStream(skip_special_tokens=True)
            text = stream.step(tokenizer.backend_tokenizer, token)
        yield text or ""
