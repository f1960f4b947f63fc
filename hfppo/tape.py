"""The tape of an episode's calls, and the rows that models read: one for each conversation.

Rewards, KL and advantages belong to the tape, on which the tokens of all calls follow each other. An agent that
shortens its history, or asks for something else in between, has several conversations on one tape.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Tape:
    """Where the tokens of E episodes of N tokens are in B rows of `width` columns."""

    places: Tensor  # (E, N) int64 positions in the flattened rows; B·width on padding
    episodes: Tensor  # (B,) int64, the episode of each row
    width: int

    @classmethod
    def of(cls, conversation: Tensor, real: Tensor, prompt: int) -> "Tape":
        """Find the place of each token.

        The conversations of an episode are rows one after another, with `prompt` columns before the completion. The
        first one begins after these columns. The others have their first token in the last of them, because V(s₀) is
        read at a prompt's last token.

        Args:
            conversation: (E, N) number of each token's conversation in its episode, from 0.
            real: (E, N) bool, True on tokens; padding is at the end.
        """
        counts = conversation.where(real, 0).amax(dim=1) + 1
        owner = conversation.where(real, counts.max())  # padding comes last
        sizes = torch.zeros(len(counts), int(counts.max()) + 1, dtype=torch.int64, device=counts.device)
        sizes = sizes.scatter_add(1, owner, torch.ones_like(owner))
        order = owner.argsort(dim=1, stable=True).argsort(dim=1)
        columns = order - (sizes.cumsum(dim=1) - sizes).gather(1, owner) + prompt - (conversation > 0).long()
        episodes = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        width = int(columns.where(real, 0).max()) + 1
        rows = (counts.cumsum(dim=0) - counts)[:, None] + conversation
        return cls((rows * width + columns).where(real, len(episodes) * width), episodes, width)

    @property
    def is_first(self) -> Tensor:
        """(B,) bool, True on the first row of each episode."""
        return F.pad(self.episodes.diff().bool(), (1, 0), value=True)

    def spread(self, x: Tensor) -> Tensor:
        """Return numbers of the tape's tokens, (E, N), by row: (B, width), 0 elsewhere."""
        flat = x.new_zeros(len(self.episodes) * self.width + 1).scatter(0, self.places.flatten(), x.flatten())
        return flat[:-1].view(-1, self.width)

    def collect(self, x: Tensor) -> Tensor:
        """Return numbers of the rows' last T columns, (B, T), by token of the tape: (E, N), 0 on padding.

        Of numbers for the end of each row, (B,), an episode gets the one of its last token's row: (E,).
        """
        if x.dim() == 1:
            lengths = (self.places < len(x) * self.width).sum(dim=1, keepdim=True)
            return x[self.places.gather(1, lengths - 1)[:, 0] // self.width]
        return F.pad(F.pad(x, (self.width - x.shape[1], 0)).flatten(), (0, 1))[self.places]
