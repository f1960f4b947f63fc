"""Traces on disk: one file per rollout, with one JSON line per completion."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hfppo.config import PPOConfig
from hfppo.functional import CLIP_FRACTIONS, Clip
from hfppo.functional.kl import clamp_log_ratio
from hfppo.models.actor_critic import ActorCritic, Want
from hfppo.models.modes import eval_mode
from hfppo.reporting.token_table import TokenTable, mask_context
from hfppo.rollout import Rollout, Sequences
from hfppo.state import PPOState
from hfppo.support.files import ignore_write_errors, write_atomically

TRACES = "_traces"  # in the output folder; Trainer does not push folders whose name begins with "_"


@dataclass(frozen=True, kw_only=True)
class Trace(TokenTable):
    """The token table of one completion, with its place in the run. Its fields are plain values: a line of a file."""

    rollout: int  # number of the rollout in the run, from 1
    step: int  # optimizer steps before the rollout was collected
    kl_coef: float  # β in its rewards
    truncated: bool  # whether the length limit ended it
    prompt_ids: list[int]
    completion_ids: list[int]
    updated_step: int | None = None  # optimizer steps at the end of the update on this rollout; None until then
    kind: str = "prompts"  # "rollout": one of the run's own completions; "prompts": of a chosen prompt, not whitened

    def token_rows(self) -> list[dict[str, object]]:
        """Return a dictionary for each token, as a row of a table of many completions."""
        shared = {"rollout": self.rollout, "step": self.step, "prompt": self.prompt, "score": self.score}
        return [{**shared, **vars(row)} for row in self.rows]


def first_traces(
    rollout: Rollout,
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    args: PPOConfig,
    state: PPOState,
    step: int,
    kind: str,
) -> list[Trace]:
    """Return the traces of the first completions of a rollout.

    Args:
        state: PPO's on this rollout.
        step: optimizer steps before the rollout was collected.
        kind: see `Trace`.
    """
    return [
        Trace(
            **vars(TokenTable.from_rollout(rollout, i, tokenizer, args.reward_kl_estimator)),
            rollout=state.rollouts,
            step=step,
            kl_coef=state.kl_coef,
            truncated=bool(rollout.truncated[i]),
            prompt_ids=rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist(),
            completion_ids=rollout.completion_ids[i][rollout.real[i]].tolist(),
            kind=kind,
        )
        for i in range(min(count, len(rollout)))
    ]


@torch.no_grad()
def add_update(trace: Trace, model: ActorCritic, args: PPOConfig, clip: Clip, step: int) -> Trace:
    """Return a trace with the policy's log-probs and ratios after the update, and the tokens that are clipped.

    Args:
        clip: the clip of the policy loss.
        step: optimizer steps made so far.
    """
    columns, prompt = trace.columns, torch.tensor([trace.prompt_ids])
    sampled = torch.tensor([[x is not None for x in columns["logprob"]]])
    tape = Sequences(
        prompt_ids=prompt,
        prompt_mask=torch.ones_like(prompt, dtype=torch.bool),
        completion_ids=torch.tensor([trace.completion_ids]),
        mask=sampled,
        truncated=torch.tensor([trace.truncated]),
        rollout_logprobs=torch.zeros(sampled.shape),
        context=~sampled,
        conversation=torch.tensor([columns.get("conversation", [0] * len(trace.completion_ids))]),
    )
    read = tape.by_conversation()
    inputs = {name: x.to(args.device) for name, x in {**read.joined(), "completion_mask": read.mask}.items()}
    with eval_mode(model):
        new = model(**inputs, want=Want(temperature=args.temperature, values=False)).logprobs.cpu()
    new = tape.tape.collect(new)
    old, advantages = (torch.tensor([[x or 0.0 for x in columns[name]]]) for name in ("logprob", "advantage"))
    after = {"new_logprob": new, "ratio": clamp_log_ratio(new - old).exp()}
    if args.policy_loss in CLIP_FRACTIONS:
        found = CLIP_FRACTIONS[args.policy_loss](new, old, advantages, clip)
        after["clipped"] = found.low | found.high | found.dual
    updated = {name: mask_context(sampled[0].tolist(), x[0].tolist()) for name, x in after.items()}
    return replace(trace, columns=columns | updated, updated_step=step)


def trace_file(output_dir: str | Path, rollout: int, kind: str = "rollout") -> Path:
    """Return the path for a rollout's traces; `kind` is "rollout" for its own completions, or "prompts"."""
    return Path(output_dir) / TRACES / f"{kind}-{rollout:06d}.jsonl"


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write a rollout's traces atomically; an error is a warning."""
    lines = [json.dumps(vars(trace), ensure_ascii=False) for trace in traces]
    with ignore_write_errors(path):
        write_atomically(path, "\n".join([*lines, ""]))


def read_traces(path: Path) -> list[Trace]:
    """Read the traces of a file that `write_traces` wrote."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Trace(**json.loads(line)) for line in lines if line]


def list_trace_files(output_dir: str | Path, kinds: Sequence[str] = ("rollout", "prompts")) -> list[Path]:
    """Return the trace files of a run in the order of the rollouts."""
    found = [path for kind in kinds for path in Path(output_dir, TRACES).glob(f"{kind}-{'[0-9]' * 6}.jsonl")]
    return sorted(found, key=rollout_number)


def rollout_number(path: Path) -> int:
    """Return the rollout's number from the name of its trace file."""
    return int(path.stem.rpartition("-")[2])


def remove_traces(output_dir: str | Path, first: int, kind: str) -> None:
    """Remove the files from rollout `first` on: an earlier run wrote them, or this one before it was resumed."""
    for path in list_trace_files(output_dir, [kind]):
        if rollout_number(path) >= first:
            with ignore_write_errors(path):
                path.unlink()
