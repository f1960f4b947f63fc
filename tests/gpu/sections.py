"""The sections of the GPU kit: each yields its figures case by case, as {case: {column: value}}.

`kit.py` runs each in a process of its own. This module imports nothing heavy, because the process that starts them
and `rows.py` read the table at its end.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
Figures = Iterator[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Job:
    """What a section is run with."""

    small: bool  # sizes for a CPU, which only show that the kit runs
    folder: Path  # for models and checkpoints; removed afterwards


@dataclass(frozen=True)
class Section:
    """A part of the kit.

    Args:
        minutes: after which it is stopped.
        needs: packages without which it does not run; CUDA as well, unless the run is small.
        columns: of its table, after that of the case; figures under other names are in the JSON only.
    """

    run: Callable[[Job], Figures]
    title: str
    minutes: float
    columns: tuple[str, ...]
    needs: tuple[str, ...] = ()


def cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def find_missing(section: Section, small: bool) -> list[str]:
    """Return what a section needs and does not find here."""
    missing = [name for name in section.needs if importlib.util.find_spec(name) is None]
    return missing + ([] if small or cuda_is_there() else ["CUDA"])


def workload_of(job: Job, name: str, **sizes: int) -> Any:
    """Return a workload of `ppo_workload`, with other sizes; the tiny one in a small run."""
    from ppo_workload import WORKLOADS

    return WORKLOADS["tiny"] if job.small else replace(WORKLOADS[name], **sizes)


def run_tests(job: Job, marked: str = "gpu and not vllm") -> Figures:
    """Run the tests marked `gpu` that do without vLLM."""
    import pytest

    report = job.folder / "report.xml"
    # Without the repository's options: they want pytest-xdist, and warnings of other versions are no failures here.
    options = ["-o", "addopts=", "-m", marked, "-W", "ignore", "-p", "no:cacheprovider", f"--junitxml={report}"]
    pytest.main([*options, "-q", "--rootdir", str(HERE.parents[1]), str(HERE)])
    failed = 0
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if found is None else {"failure": "failed", "error": "failed"}.get(found.tag, found.tag)
        reason = {} if found is None else {"reason": found.get("message", "").split("\n")[0]}
        failed += outcome == "failed"
        yield {case.get("name", ""): {"outcome": outcome, **reason}}
    if failed:
        raise AssertionError(f"{failed} tests failed")


def tests_with_vllm(job: Job) -> Figures:
    """Run the tests marked `gpu` and `vllm`: each placement of vLLM."""
    return run_tests(job, "gpu and vllm")


def first_rollout(job: Job) -> Figures:
    """Train on one rollout: by the defaults, and by settings, dtype and attention.

    The defaults come first, in bfloat16 for two rollouts and an evaluation, with the memory and work of each phase.
    """
    from cases import CASES
    from first_rollouts import run_case
    from ppo_workload import write_models

    sizes = {"prompts": 32, "shortest_prompt": 32, "longest_prompt": 256, "new_tokens": 128}
    workload = workload_of(job, "qwen2.5-0.5b", **sizes)
    write_models(workload, job.folder, ("policy",))
    for name, case in CASES.items():
        forget_peak()
        missing = case.missing()
        yield {name: {"reason": f"needs {missing}"} if missing else run_case(case, workload, job.folder)}


def samplers(job: Job) -> Figures:
    """Compare the colocated vLLM, where it is installed, with `generate`."""
    from ppo_workload import tokenizer_for, write_models
    from samplers import EOS, compare, load_actor, random_prompts

    from hfppo.generation.sampler import Sampling

    workload = workload_of(job, "qwen2.5-0.5b")
    write_models(workload, job.folder, ("policy",))
    folder = job.folder / "policy"
    tokenizer_for(workload).save_pretrained(folder)
    model = load_actor(str(folder))
    prompts = random_prompts(workload.prompts, workload.shortest_prompt, workload.longest_prompt, workload.vocab_size)
    engine = {"enforce_eager": job.small, "max_model_len": workload.longest_prompt + workload.new_tokens}
    placements = {"generate": {"local_rollout_forward_batch_size": workload.prompts}}
    if importlib.util.find_spec("vllm") is None:
        yield {"vLLM, colocated": {"reason": "needs vllm"}}
    else:
        placements["vLLM, colocated"] = {"use_vllm": True, "vllm_engine_kwargs": engine}
    settings = Sampling(1.0, workload.new_tokens, [EOS], 0)
    found = compare(model, prompts, settings, placements, rounds=1 if job.small else 2)
    speeds = {name: median(own["tokens"]) / median(own["seconds"]) for name, own in found.items()}
    for name, own in found.items():
        yield {
            name: {
                "tokens per second, sync included": speeds[name],
                "times generate": speeds[name] / speeds["generate"],
                "sync, s": median(own["sync"]),
                "start, s": own["start"],
                "log-probs − training model's, mean, nats": own["distance"][0],
                "largest, nats": own["distance"][1],
            }
        }


ROLLOUT = ("s per rollout", "completion tokens per second", "sampling, s", "passes, scores, rest, s", "update, s")
OF_UPDATE = ("loss", "actor forward", "critic forward", "critic backward", "actor backward", "update", "optimizer")


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of `ROLLOUT` from what a clock measured, and all phases; medians over rollouts."""
    names = {name for phases in measured["seconds"] for name in phases}
    phases = {name: median(own.get(name, 0.0) for own in measured["seconds"]) for name in sorted(names)}
    total = median(sum(own.values()) for own in measured["seconds"])
    update = sum(phases.get(name, 0.0) for name in OF_UPDATE)
    sampling = phases["sampling"]
    numbers = (total, median(measured["tokens"]) / total, sampling, total - sampling - update, update)
    return {**dict(zip(ROLLOUT, numbers, strict=True)), "peak, GB": measured["peak"] / 1e9, "phases": phases}


def forget_peak() -> None:
    """Begin the measurement of a peak, with what earlier cases left freed."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def ppo(job: Job) -> Figures:
    """Train with PPO, with a reward model of the policy's shape; TFLOP/s is the metric `time/update_tflops`."""
    from ppo_hfppo import measure
    from ppo_workload import load, write_models

    workload = workload_of(job, "qwen2.5-0.5b")
    write_models(workload, job.folder, ("policy", "reward"))
    for critic in ("adapter", "shared"):
        forget_peak()
        model, reward = (load(workload, job.folder, name, False) for name in ("policy", "reward"))
        fields = {"local_rollout_forward_batch_size": workload.prompts}
        measured = measure(workload, job.folder, fields, model, reward, critic, rollouts=3)
        yield {f"critic='{critic}'": {**summarize(measured), "TFLOP/s": median(measured["TFLOP/s"])}}
        del model, reward


def seven_billion(job: Job) -> Figures:
    """Train a 7B shape in NF4 on one rollout with a reward function, and read the peak."""
    import torch
    from ppo_hfppo import measure
    from ppo_workload import distinct_characters, load

    workload = replace(workload_of(job, "qwen2.5-7b"), dtype="bfloat16", epochs=1, checkpointing=True)
    for critic in ("adapter", "shared"):
        forget_peak()
        model = load(workload, job.folder, "policy", True)
        size = model.get_memory_footprint()
        forget_peak()
        measured = summarize(measure(workload, job.folder, {}, model, distinct_characters, critic, rollouts=2))
        reserved = {"reserved, GB": torch.cuda.max_memory_reserved() / 1e9} if torch.cuda.is_available() else {}
        yield {f"critic='{critic}'": {**measured, "base, GB": size / 1e9, **reserved}}
        del model


SECTIONS = {
    "tests": Section(run_tests, "tests marked gpu", 3, ("outcome",)),
    "first_rollout": Section(
        first_rollout,
        "first update, Qwen2.5-0.5B shape",
        6,
        (
            *("first ratio − 1, largest", "KL to the reference, nats", "old log-probs − sampler's, mean, nats"),
            *("largest, nats", "packed", "base"),
        ),
    ),
    "vllm_tests": Section(tests_with_vllm, "tests of vLLM's placements", 3, ("outcome",), ("vllm",)),
    "vllm": Section(
        samplers,
        "sampler, 256 × (≤ 1024 + 512) tokens",
        4,
        (
            *("tokens per second, sync included", "times generate", "sync, s", "start, s"),
            *("log-probs − training model's, mean, nats", "largest, nats"),
        ),
    ),
    "ppo": Section(ppo, "PPO, 256 × (≤ 1024 + 512) tokens", 6, (*ROLLOUT, "TFLOP/s", "peak, GB")),
    "memory": Section(
        seven_billion,
        "7B shape in NF4, 8 × (≤ 1024 + 512) tokens",
        5,
        (*ROLLOUT, "base, GB", "peak, GB", "reserved, GB"),
        ("bitsandbytes",),
    ),
}
