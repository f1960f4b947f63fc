"""`Rollout`: frozen data with a shape for each field, and its cuts into mini-batches and micro-batches."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hfppo.state import stream_seed
from hfppo.support.devices import copy_to
from hfppo.tape import Tape


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """B prompts with their completions. P prompt tokens, C tokens of the critic's prompt, T completion tokens.

    The completion of an agent's episode is the tape of its calls. `conversation` tells which rows models read for it.

    Index t of every (B, T) field is about completion token t. Log-probabilities are in nats, at the sampling
    temperature, float32.
    """

    prompt_ids: Tensor  # (B, P) int64, padded on the left
    prompt_mask: Tensor  # (B, P) bool, True on real tokens
    completion_ids: Tensor  # (B, T) int64, padded on the right
    mask: Tensor  # (B, T) bool, True on sampled tokens, the EOS of each turn included: where credit flows
    truncated: Tensor  # (B,) bool, True where a limit, not EOS or the environment, ended the completion
    rollout_logprobs: Tensor  # (B, T) log π_rollout, as the sampler reported it
    context: Tensor | None = None  # (B, T) bool, True on tokens of tools and environments: attended to, never credited
    conversation: Tensor | None = None  # (B, T) int64, number of each token's conversation; None: one each
    critic_prompt_ids: Tensor | None = None  # (B, C) as `prompt_ids`; None: the critic reads `prompt_ids`
    critic_prompt_mask: Tensor | None = None  # (B, C) as `prompt_mask`

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def real(self) -> Tensor:
        """(B, T) bool, True on all tokens of the completions, sampled ones and context; padding is at the end."""
        return self.mask if self.context is None else self.mask | self.context

    @property
    def lengths(self) -> Tensor:
        """(B,) real tokens of prompt and completion, with the critic's prompt if that is longer."""
        of_prompts = torch.maximum(self.prompt_mask.sum(dim=1), self.read_by_critic[1].sum(dim=1))
        return of_prompts + self.real.sum(dim=1)

    @property
    def read_by_critic(self) -> tuple[Tensor, Tensor]:
        """The prompts that the critic reads and their mask, its own or the actor's."""
        if self.critic_prompt_ids is None or self.critic_prompt_mask is None:
            return self.prompt_ids, self.prompt_mask
        return self.critic_prompt_ids, self.critic_prompt_mask

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: `base_states` are large, and can be computed again."""
        return {name: value for name, value in self.tensors().items() if name != "base_states"}

    @property
    def tape(self) -> Tape | None:
        """Where the tokens are in `by_conversation`; None: where they are here."""
        if self.conversation is None:
            return None
        return Tape.of(self.conversation, self.real, self.prompt_ids.shape[1])

    def by_conversation(self) -> Self:
        """Return a row for each conversation. The critic reads those after an episode's first after its own prompt."""
        if (tape := self.tape) is None:
            return self
        width, is_first = self.prompt_ids.shape[1], tape.is_first[:, None]
        rows: dict[str, Any] = {"conversation": None}
        for name, x in (("ids", self.completion_ids), ("mask", self.real)):
            first = tape.spread(x)[:, :width]
            rows[f"prompt_{name}"] = getattr(self, f"prompt_{name}")[tape.episodes].where(is_first, first)
            if (prompt := getattr(self, f"critic_prompt_{name}")) is not None:
                later = torch.cat([prompt[tape.episodes], first[:, -1:]], dim=1)
                rows[f"critic_prompt_{name}"] = F.pad(prompt[tape.episodes], (1, 0)).where(is_first, later)
        for name, x in self.stored_tensors().items():
            if name not in rows:
                rows[name] = x[tape.episodes] if x.dim() == 1 else tape.spread(x)[:, width:]
        return replace(self, **rows)

    def joined(self) -> dict[str, Tensor]:
        """Return token ids and attention mask of prompts and completions, (B, P + T) each.

        If the critic has prompts of its own, the same of these, (B, C + T), under names with "critic_" before.
        """
        inputs = self.after(self.prompt_ids, self.prompt_mask)
        if self.critic_prompt_ids is not None:
            inputs |= {f"critic_{name}": x for name, x in self.after(*self.read_by_critic).items()}
        return inputs

    def after(self, prompt_ids: Tensor, prompt_mask: Tensor) -> dict[str, Tensor]:
        """Return token ids and attention mask of the completions after some prompts."""
        return {
            "input_ids": torch.cat([prompt_ids, self.completion_ids], dim=1),
            "attention_mask": torch.cat([prompt_mask, self.real], dim=1),
        }


@dataclass(frozen=True, kw_only=True)
class Rollout(Sequences):
    """B completions of one process with everything the update needs.

    It stays on the CPU; the update moves its pieces to the device.
    """

    loss_mask: Tensor  # (B, T) bool, the tokens of `mask` that the actor's losses count
    scores: Tensor  # (B,) float32, weighted sum of the reward functions, penalties included
    old_logprobs: Tensor  # (B, T) log π_old, the proximal anchor of the update
    rewards: Tensor  # (B, T) the reward of each token
    advantages: Tensor  # (B, T)
    ref_logprobs: Tensor | None = None  # (B, T) log π_ref; None when nothing needs it
    values: Tensor | None = None  # (B, T) V(s_t) before token t; None without a critic
    weights: Tensor | None = None  # (B, T) π_old/π_rollout, bounded, for the policy loss; None: not corrected
    td_errors: Tensor | None = None  # (B, T) δ_t = r_t + γ·V(s_{t+1}) − V(s_t); None without a critic
    returns: Tensor | None = None  # (B, T) the targets of the values; None without a critic
    # (B, T) π/π_rollout after the actor's steps, by which the critic's weight the returns; None: not computed.
    value_ratio: Tensor | None = None
    value_mask: Tensor | None = None  # (B, T) bool, the tokens that the critic's loss counts; None: as the actor's
    share: Tensor | None = None  # (B,) a conversation's part of its episode's tokens in the loss; None: all
    # (N, H) states of the base below the critic's layers, of all rows' real tokens, row after row; None: not kept.
    base_states: Tensor | None = None

    @property
    def fitted(self) -> Tensor:
        """(B, T) bool, True on the tokens that the critic's loss counts."""
        return self.loss_mask if self.value_mask is None else self.value_mask

    def by_conversation(self) -> Self:
        """Return a row for each conversation, with its share of the episode; see `Sequences`."""
        rows = super().by_conversation()
        if (tape := self.tape) is None:
            return rows
        return replace(rows, share=rows.fitted.sum(dim=1) / self.fitted.sum(dim=1).clamp(min=1)[tape.episodes])

    def select(self, rows: Tensor) -> "Rollout":
        """Return the given rows, (N,) int64, without the columns that are padding in all of them."""
        chosen = {name: value[rows] for name, value in self.stored_tensors().items()}
        if self.base_states is not None:
            chosen["base_states"] = select_packed(self.base_states, self.lengths, rows)
        return replace(self, **chosen).trim()

    def trim(self) -> "Rollout":
        """Remove the prompt and completion columns that are padding in every row; at least one of each stays."""
        width = max([1, *self.real.sum(dim=1).tolist()])  # a process may have no row of a mini-batch
        prompt = trimmed("prompt", self.prompt_ids, self.prompt_mask)
        if self.critic_prompt_ids is not None and self.critic_prompt_mask is not None:
            prompt |= trimmed("critic_prompt", self.critic_prompt_ids, self.critic_prompt_mask)
        per_token = {
            name: value[:, :width]
            for name, value in self.stored_tensors().items()
            if value.dim() == 2 and name not in prompt
        }
        return replace(self, **prompt, **per_token)

    def to(self, device: torch.device | str) -> "Rollout":
        """Return a copy on the device."""
        return replace(self, **{name: copy_to(value, device) for name, value in self.tensors().items()})

    def mini_batch(
        self, index: int, num_mini_batches: int, seed: tuple[int, ...], group_size: int = 1, process: int = 0
    ) -> "Rollout":
        """Return this process's rows of mini-batch `index` of an epoch.

        The groups of all processes are cut, in their order, into blocks of `num_mini_batches` groups. Each block is
        shuffled, and gives each mini-batch one group. So no number of processes changes a mini-batch.

        Args:
            seed: of the epoch's draws.
            group_size: rows that follow each other and stay together, since they share a prompt.
            process: number of this process. All have equally many rows, a multiple of both sizes.
        """
        num_blocks = len(self) // group_size // num_mini_batches
        groups = []
        for block in range(num_blocks):
            generator = torch.Generator().manual_seed(stream_seed(*seed, process * num_blocks + block))
            groups.append(block * num_mini_batches + torch.randperm(num_mini_batches, generator=generator)[index])
        rows = torch.stack(groups)[:, None] * group_size + torch.arange(group_size)
        return self.select(rows.flatten())

    @classmethod
    def join(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """Return the rows of several rollouts in one, padded to the widest."""
        columns = [part.stored_tensors() for part in parts]
        joined = {}
        for name in columns[0]:
            width = max(part[name].shape[-1] for part in columns)
            widened = []
            for x in (part[name] for part in columns):
                missing = 0 if x.dim() == 1 else width - x.shape[1]
                widened.append(F.pad(x, (missing, 0) if name.startswith("prompt_") else (0, missing)))
            joined[name] = torch.cat(widened)
        return cls(**joined)

    def micro_batches(
        self, num_micro_batches: int, order: Tensor | None = None, shared: Tensor | None = None
    ) -> list["Rollout"]:
        """Cut the rows so that the largest micro-batch has the fewest tokens, as `sizes_within` counts them.

        Args:
            order: (B,) rows in the order in which they are cut; None: the longest first.
            shared: (B,) tokens that each row of that order has in common with the one before; None: none.
        """
        order = self.lengths.argsort(descending=True, stable=True) if order is None else order
        shared = torch.zeros_like(order) if shared is None else shared
        sizes = balanced_sizes(self.lengths[order].tolist(), shared.tolist(), num_micro_batches)
        return [self.select(rows) for rows in order.split(sizes)]


def trimmed(name: str, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return prompts and their mask, (B, P) each, by field, without the columns on the left that are all padding."""
    first = min(int(mask.any(dim=0).int().argmax()), mask.shape[1] - 1)
    return {f"{name}_ids": ids[:, first:], f"{name}_mask": mask[:, first:]}


def select_packed(packed: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
    """Return the entries of the given rows, from a tensor with rows of these lengths one after another."""
    parts = packed.split(lengths.tolist())
    return torch.cat([packed[:0], *(parts[row] for row in rows.tolist())])


def sizes_within(lengths: list[int], shared: list[int], max_tokens: int) -> list[int]:
    """Return the rows of each micro-batch: as many as have at most `max_tokens` tokens, and at least one.

    Rows with a common beginning have each token once and no padding; others are padded to the longest.

    Args:
        lengths: tokens of each row, in the order in which they are cut.
        shared: tokens of each row that the row before begins with, too.
    """
    sizes: list[int] = []
    longest = own = alike = 0
    for length, known in zip(lengths, shared, strict=True):
        longest, own, alike = max(longest, length), own + length - known, alike + known
        if sizes and (own if alike else (sizes[-1] + 1) * longest) <= max_tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest, own, alike = length, length, 0
    return sizes


def balanced_sizes(lengths: list[int], shared: list[int], num_micro_batches: int) -> list[int]:
    """Return the rows of each micro-batch, with the largest as small as possible.

    Args:
        lengths, shared: see `sizes_within`; at least one row per micro-batch.
    """
    longest = max(lengths)
    budgets = range(longest, longest * len(lengths))
    enough = bisect_left(budgets, True, key=lambda most: len(sizes_within(lengths, shared, most)) <= num_micro_batches)
    sizes = sizes_within(lengths, shared, longest + enough)
    while len(sizes) < num_micro_batches:
        largest = sizes.index(max(sizes))
        sizes[largest : largest + 1] = [sizes[largest] - sizes[largest] // 2, sizes[largest] // 2]
    return sizes


@dataclass(frozen=True)
class Transcript:
    """The same B completions as text, with the scores of each reward function."""

    prompts: Sequence[object]  # text or conversations
    completions: Sequence[object]  # text or messages
    scores: dict[str, list[float]]  # keyed by reward function; NaN where it returned None
    extra: dict[str, list]  # columns that reward functions passed to log_extra
