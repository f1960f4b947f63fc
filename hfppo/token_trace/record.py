"""Traces on disk: one JSON line per completion, one file per rollout."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hfppo.config import PPOConfig
from hfppo.data.prompts import pad_left
from hfppo.functional import clip_fractions
from hfppo.functional.kl import clamp_log_ratio
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.packing import eval_mode
from hfppo.rollout import Rollout
from hfppo.support.files import write_atomically
from hfppo.token_trace.table import TokenRow, TokenTable

TRACES = "_traces"  # in the output folder; Trainer leaves what begins with "_" out of what it pushes


@dataclass(frozen=True)
class Trace:
    """One completion of a rollout: its table, and where in the run it stands."""

    rollout: int  # its number in the run, from 1
    step: int  # optimiser steps made when it was collected
    kl_coef: float  # β in its rewards
    truncated: bool  # whether the length limit ended it
    prompt_ids: list[int]
    completion_ids: list[int]
    table: TokenTable
    updated_step: int | None = None  # optimiser steps made when what the update did was read; None: not yet

    def to_json(self) -> dict[str, Any]:
        """Plain values, the table by columns; a number that is not finite as text, which JSON has no number for."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "table"}
        columns = {f.name: [finite_or_text(getattr(row, f.name)) for row in self.table.rows] for f in fields(TokenRow)}
        return {**plain, "prompt": self.table.prompt, "score": finite_or_text(self.table.score), "columns": columns}

    def token_rows(self) -> list[dict[str, Any]]:
        """A row for each token, for tables of many completions."""
        shared = {"rollout": self.rollout, "step": self.step, "prompt": self.table.prompt, "score": self.table.score}
        return [{**shared, **asdict(row)} for row in self.table.rows]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Trace":
        """What `to_json` was taken from."""
        plain = {f.name: content[f.name] for f in fields(cls) if f.name != "table"}
        names = [f.name for f in fields(TokenRow)]
        rows = [
            TokenRow(token, *(number(x) for x in numbers))
            for token, *numbers in zip(*(content["columns"][name] for name in names), strict=True)
        ]
        return cls(**plain, table=TokenTable(content["prompt"], number(content["score"]), rows))


def finite_or_text(x: Any) -> Any:
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def number(x: Any) -> Any:
    return float(x) if isinstance(x, str) else x


def traces_of(rollout: Rollout, tables: list[TokenTable], number: int, step: int, kl_coef: float) -> list[Trace]:
    """The traces of a rollout's rows.

    Args:
        tables: one for each row.
        number: the rollout's, from 1.
        step: optimiser steps made when it was collected.
        kl_coef: β in its rewards.
    """
    return [
        Trace(
            rollout=number,
            step=step,
            kl_coef=kl_coef,
            truncated=bool(rollout.truncated[i]),
            prompt_ids=rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist(),
            completion_ids=rollout.completion_ids[i][rollout.mask[i]].tolist(),
            table=table,
        )
        for i, table in enumerate(tables)
    ]


@torch.no_grad()
def after_update(traces: list[Trace], model: ActorCritic, args: PPOConfig, step: int) -> list[Trace]:
    """The traces with what the policy says about their tokens now: log-probs, ratios, and where the clip holds.

    Args:
        step: optimiser steps made.
    """
    prompt_ids, prompt_mask = pad_left([trace.prompt_ids for trace in traces], 0)
    ids, mask = pad_right([trace.completion_ids for trace in traces])
    old = pad_right([[row.logprob for row in trace.table.rows] for trace in traces])[0]
    advantages = pad_right([[row.advantage for row in trace.table.rows] for trace in traces])[0]
    with eval_mode(model):
        new = model(
            input_ids=torch.cat([prompt_ids, ids], dim=1).to(args.device),
            attention_mask=torch.cat([prompt_mask, mask], dim=1).to(args.device),
            completion_mask=mask.to(args.device),
            temperature=args.temperature,
            values=False,
        ).logprobs.cpu()
    ratio = clamp_log_ratio(new - old).exp()
    clip = clip_fractions(new, old, advantages, args.cliprange, args.clip_high, args.dual_clip)
    clipped = clip.low | clip.high | clip.dual if args.policy_loss == "ppo" else None
    updated = []
    for i, trace in enumerate(traces):
        rows = [
            replace(
                row,
                new_logprob=float(new[i, t]),
                ratio=float(ratio[i, t]),
                clipped=None if clipped is None else bool(clipped[i, t]),
            )
            for t, row in enumerate(trace.table.rows)
        ]
        updated.append(replace(trace, table=replace(trace.table, rows=rows), updated_step=step))
    return updated


def pad_right(rows: list[list[Any]]) -> tuple[Tensor, Tensor]:
    """(B, T) numbers padded with 0 on the right, and the (B, T) bool mask that is True on the real ones."""
    padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return padded, torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def trace_file(output_dir: str | Path, rollout: int, kind: str = "rollout") -> Path:
    """The file of a rollout's traces: of its own completions, or of those of chosen "prompts"."""
    return Path(output_dir) / TRACES / f"{kind}-{rollout:06d}.jsonl"


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write a rollout's traces, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(trace.to_json(), ensure_ascii=False) for trace in traces]
    with write_atomically(path) as aside:
        aside.write_text("\n".join([*lines, ""]), encoding="utf-8")


def read_traces(path: Path) -> list[Trace]:
    """What `write_traces` wrote.

    Raises:
        ValueError: a line that it did not write; names it.
    """
    traces = []
    for n, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            traces += [Trace.from_json(json.loads(line))] if line else []
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {n} of {path} is no trace ({error!r}); remove the line, or the file") from error
    return traces


def recorded(output_dir: str | Path) -> list[Path]:
    """The files of a run's traces, in the order of the rollouts."""
    names = (f"{kind}-{'[0-9]' * 6}.jsonl" for kind in ("rollout", "prompts"))
    found = [path for name in names for path in (Path(output_dir) / TRACES).glob(name)]
    return sorted(found, key=rollout_of)


def rollout_of(path: Path) -> int:
    """The number of the rollout whose traces a file holds."""
    return int(path.stem.rpartition("-")[2])
