"""Prompts with their completions: as tensors for the models, as text for reward functions and callbacks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState
from transformers.utils.logging import get_logger

from hfppo.data.prompts import Row
from hfppo.environments.chat_format import parse_turn
from hfppo.environments.episodes import Episode, completions_of
from hfppo.generation.sampler import Completions
from hfppo.rewards.reward_func import RewardBatch, Text

logger = get_logger(__name__)

RESERVED = ("prompt", "completion", "completion_ids")  # columns of a dataset that reward functions do not get


@dataclass(frozen=True)
class Completed:
    """B rows with their completions. An environment may have added text to the dataset's prompts."""

    rows: list[Row]
    completions: Completions
    texts: Sequence[Text]  # the completions that reward functions get
    episodes: list[Episode]  # one per row; [] without tools and environments

    @classmethod
    def in_one_turn(cls, rows: list[Row], completions: Completions, tokenizer: PreTrainedTokenizerBase) -> "Completed":
        """Decode completions: as text, or as messages that answer conversations."""
        ids = token_ids(completions)
        if not isinstance(rows[0].columns["prompt"], list):
            return cls(rows, completions, tokenizer.batch_decode(ids, skip_special_tokens=True), [])
        turns = zip(ids, rows, strict=True)
        messages = [[parse_turn(tokenizer, turn, row.prompt_ids, tools=[])[0]] for turn, row in turns]
        return cls(rows, completions, messages, [])

    @classmethod
    def in_episodes(cls, episodes: list[Episode], pad_id: int) -> "Completed":
        """Return episodes as completions."""
        messages = [episode.messages for episode in episodes]
        return cls([episode.row for episode in episodes], completions_of(episodes, pad_id), messages, episodes)

    def batches(self, count: int, size: int) -> Iterator["Completed"]:
        """Yield the first `count` rows, at most `size` at a time."""
        for start in range(0, count, size):
            yield self.at(torch.arange(start, min(start + size, count)))

    def at(self, rows: Tensor) -> "Completed":
        """Return some rows, (N,)."""
        return Completed(
            [self.rows[i] for i in rows.tolist()],
            self.completions.rows(rows),
            [self.texts[i] for i in rows.tolist()],
            [self.episodes[i] for i in rows.tolist() if self.episodes],
        )

    @property
    def prompts(self) -> list[Text]:
        """The prompts as text or conversations."""
        return [row.columns["prompt"] for row in self.rows]

    def reward_batch(self, tokenizer: PreTrainedTokenizerBase, state: TrainerState) -> RewardBatch:
        """Return what the reward functions are given."""
        warn_of_hidden(self.completions, str(self.texts), tokenizer)
        names = [name for name in self.rows[0].columns if name not in RESERVED]
        columns = {name: [row.columns[name] for row in self.rows] for name in names}
        if any(episode.environment is not None for episode in self.episodes):
            columns["environments"] = [episode.environment for episode in self.episodes]
        return RewardBatch(
            prompts=self.prompts,
            completions=self.texts,
            completion_ids=token_ids(self.completions),
            mask=self.completions.mask,
            columns=columns,
            trainer_state=state,
            episodes=self.episodes,
            prompt_ids=[row.prompt_ids for row in self.rows],
            tokenizer=tokenizer,
        )


def warn_of_hidden(completions: Completions, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the policy samples special tokens that the text leaves out, other than EOS and the like.

    Args:
        text: contains the text of all completions.
    """
    mask, usual = completions.mask, set(map(str, tokenizer.special_tokens_map.values()))
    inside = set(completions.ids[:, :-1][mask[:, :-1] & mask[:, 1:]].tolist())  # a turn's last token may end it
    for number, token in tokenizer.added_tokens_decoder.items():
        if number in inside and token.special and str(token) not in usual and str(token) not in text:
            logger.warning_once(
                "the policy samples %r, which the text for reward functions leaves out because it is a special token "
                "of the tokenizer; look for it in completion_ids",
                str(token),
            )


def token_ids(completions: Completions) -> list[list[int]]:
    """Return the completions' token ids, EOS and the tokens of tools and environments included."""
    return [row[real].tolist() for row, real in zip(completions.ids, completions.real, strict=True)]
