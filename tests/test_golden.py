"""Golden record: two rollouts of each kind, token by token.

    python tests/test_golden.py     # writes tests/golden/*.json anew, after a change that is meant to change numbers

Ids, masks and scores are equal to the last bit, floats to rounding. The record is ragged, so padding is not in it.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from helpers.agents import Doors, agent_trainer, call, collect, talking_trainer
from helpers.runs import SUMS, Keep, count_digits, small_trainer
from helpers.tiny import ragged_model
from hfppo import Rollout, Transcript

FOLDER = Path(__file__).parent / "golden"
PER_TOKEN = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "rewards",
    "returns",
    "advantages",
    "weights",
)

Record = dict[str, Any]


def record_of(rollout: Rollout, transcript: Transcript) -> Record:
    """Return a rollout row by row, without padding, and its texts."""
    return {
        "rows": [row_of(rollout, i) for i in range(len(rollout))],
        "prompts": transcript.prompts,
        "completions": transcript.completions,
        "scores": {name: [none_if_nan(x) for x in column] for name, column in transcript.scores.items()},
    }


def row_of(rollout: Rollout, i: int) -> Record:
    real = rollout.real[i]
    per_token = {name: getattr(rollout, name)[i][real] for name in PER_TOKEN if getattr(rollout, name) is not None}
    return {
        "prompt_ids": rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist(),
        "completion_ids": rollout.completion_ids[i][real].tolist(),
        "sampled": rollout.mask[i][real].int().tolist(),
        "counted": rollout.loss_mask[i][real].int().tolist(),
        "truncated": bool(rollout.truncated[i]),
        "score": float(rollout.scores[i]),
        **{name: rounded(values) for name, values in per_token.items()},
    }


def rounded(values: Tensor) -> list[float]:
    return [float(f"{x:.6g}") for x in values.tolist()]


def none_if_nan(x: float) -> float | None:
    return x if x == x else None


def share_of_digits(completions, **kwargs) -> list[float | None]:
    """None for completions without text."""
    return [count_digits([text])[0] if text else None for text in completions]


def first_token(completion_ids, **kwargs) -> list[list[float]]:
    """A reward for the first token, by its id."""
    return [[ids[0] / 100, *[0.0] * (len(ids) - 1)] for ids in completion_ids]


def trained(folder: Path, config: Record, **kwargs: Any) -> list[Record]:
    """Return the rollouts of a run with completions of one turn."""
    keep = Keep()
    small_trainer(folder, {"lam": 0.95, **config}, model=ragged_model(), callbacks=[keep], **kwargs).train()
    return list(map(record_of, keep.rollouts, keep.transcripts))


def episodes(folder: Path, config: Record) -> list[Record]:
    """Return the rollouts of a run with a text environment."""
    keep = Keep()
    talking_trainer(folder, {"max_steps": 8, "lam": 0.95, **config}, callbacks=[keep]).train()
    return list(map(record_of, keep.rollouts, keep.transcripts))


def tools(folder: Path) -> list[Record]:
    """Return two rollouts of scripted calls: right and wrong ones, of unknown tools, cut by the limit."""
    scripts = (
        [[call("open", key=0), call("open", key=1), "ok"], [call("look"), "seen"], [call("fly"), "no"], ["at once"]],
        [["ok"], [call("open", key="x"), "bad key"], [call("open", key=2), "won"], ["a long end" * 12 + "…"]],
    )
    config = {"lam": 0.95, "missing_eos_penalty": 0.5}
    records = []
    for turns in scripts:
        trainer = agent_trainer(folder, *turns, environment_factory=Doors, config=config)
        rollout, transcript, _ = collect(trainer, training=True)
        records.append(record_of(rollout, transcript))
    return records


def evaluation(folder: Path) -> list[Record]:
    """Return a greedy and a sampled evaluation."""
    trainer = small_trainer(folder, {"per_device_eval_batch_size": 3}, model=ragged_model())
    records = []
    for do_sample in (False, True):
        with trainer.eval_sampling(do_sample):
            predicted = trainer.predict(SUMS)
        metrics = {name: float(f"{x:.6g}") for name, x in predicted.metrics.items() if "_per_second" not in name}
        metrics = {name: x for name, x in metrics.items() if "runtime" not in name and "time" not in name}
        records.append({"completions": list(predicted.predictions), "metrics": metrics})
    return records


GROUPS = {"num_generations": 2, "advantage_estimator": "grpo", "kl_loss_coef": 0.1, "missing_eos_penalty": 0.25}
SCORED = [share_of_digits, first_token]
CASES: dict[str, Callable[[Path], list[Record]]] = {
    "one_turn": lambda folder: trained(folder, {"missing_eos_penalty": 0.5}),
    "rewards": lambda folder: trained(folder, {"reward_weights": [1.0, 0.5]}, reward_funcs=SCORED),
    "groups": lambda folder: trained(folder, GROUPS, reward_funcs=[share_of_digits]),
    "shared_critic": lambda folder: trained(folder, {"policy_mode": "token_mask", "lam_alpha": 0.5}, critic="shared"),
    "candidates": lambda folder: trained(folder, {"prompt_candidates": 2, "max_steps": 12}),
    "candidate_groups": lambda folder: trained(folder, {**GROUPS, "prompt_candidates": 2, "kl_loss_coef": 0.0}),
    "ahead": lambda folder: trained(folder, {"rollouts_ahead": 1}),
    "episodes": lambda folder: episodes(folder, {}),
    "episodes_ahead": lambda folder: episodes(folder, {"rollouts_ahead": 1, "mask_truncated_completions": True}),
    "tools": tools,
    "evaluation": evaluation,
}


def close(found: object, wanted: object) -> bool:
    """Return whether two JSON values are equal, floats to rounding."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(close(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    if isinstance(wanted, float) and isinstance(found, float):
        return found == pytest.approx(wanted, rel=1e-4, abs=2e-6)
    return found == wanted


@pytest.mark.parametrize("name", CASES)
def test_rollouts_are_those_of_the_record(name, tmp_path):
    wanted = json.loads((FOLDER / f"{name}.json").read_text())
    found = json.loads(json.dumps(CASES[name](tmp_path)))
    assert len(found) >= 2
    for number, (now, before) in enumerate(zip(found, wanted, strict=True)):
        different = [key for key in before if not close(now.get(key), before[key])]
        assert not different, f"rollout {number} differs in {different}"
        rows = zip(now.get("rows", []), before.get("rows", []), strict=True)
        assert all(row["score"] == pytest.approx(old["score"], abs=1e-7) for row, old in rows)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        records = CASES[name](Path(tempfile.mkdtemp()))
        text = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(text + "\n")
        print(name, len(records), "rollouts,", sum(len(r.get("rows", [])) for r in records), "rows")
