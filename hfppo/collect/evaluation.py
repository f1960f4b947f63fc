"""Complete a dataset's prompts and score the completions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import EvalPrediction, TrainerState
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from hfppo.collect.collector import Collector
from hfppo.config import PPOConfig
from hfppo.data.prompt_stream import AnyDataset, EvalDataset
from hfppo.data.prompts import EMPTY_PROMPT, Prompts
from hfppo.metrics import Measures, Meter, parts
from hfppo.models.modes import eval_mode
from hfppo.rewards.functions import RewardFunctions
from hfppo.rewards.reward_func import RewardWrapper
from hfppo.sample import Sample, Text
from hfppo.support.out_of_memory import explain_out_of_memory

ComputeMetrics = Callable[[EvalPrediction], dict[str, float]] | None  # the argument of PPOTrainer

# Every evaluation has these metrics; each reward function adds its own.
SCORE_METRICS = ("reward", "reward_std", "unscorable_frac", "completions/mean_length", "completions/truncated_frac")


def eval_output(
    completions: Any, metrics: dict[str, float], prompts: Prompts, compute_metrics: ComputeMetrics, prefix: str
) -> EvalLoopOutput:
    """Return the output of Trainer's evaluation loop, with the user's own metrics and all names prefixed.

    Args:
        completions, metrics: see `evaluate_prompts`.
    """
    columns: Any = prompts.rows[:]  # the dataset's transform applies, as for prompts and reward functions
    if compute_metrics is not None:
        inputs = columns.get("prompt", [EMPTY_PROMPT] * len(prompts))
        given = compute_metrics(EvalPrediction(completions, columns, inputs=inputs))
        metrics = metrics | denumpify_detensorize(dict(given))
    prefixed = {key if str(key).startswith(f"{prefix}_") else f"{prefix}_{key}": x for key, x in metrics.items()}
    return EvalLoopOutput(completions, columns, prefixed, len(prompts))


@torch.no_grad()
def evaluate_prompts(
    collector: Collector, prompts: Prompts, state: TrainerState, do_sample: bool, on_batch: Callable[[], None]
) -> tuple[list[Text], dict[str, float]]:
    """Complete every prompt once and score the completions; training is not affected.

    Return the completions of all processes, in the order of the prompts, and their metrics.

    Args:
        do_sample: sample, with the same random numbers at every call; False completes greedily.
        on_batch: called after each batch of `per_device_eval_batch_size` completions is scored.
    """
    accelerator, args = collector.accelerator, collector.args
    everything = collector.eval_rows(prompts)
    rows = everything[accelerator.process_index :: accelerator.num_processes]
    most = -(-len(everything) // accelerator.num_processes)
    filled = rows + everything[: most - len(rows)]  # a sharded model needs equally many forwards on every process
    together = max(most, 1)  # the sampler makes its own batches
    if collector.player is not None:  # an environment for each episode, and no more than a rollout needs
        together = max(args.rollout_size_per_process, args.per_device_eval_batch_size)
    meter = Meter()
    done = []
    with explain_out_of_memory("evaluation"), eval_mode(collector.model), collector.sampler.ready():
        for start in range(0, most, together):
            samples = collector.complete(filled[start : start + together], not do_sample)
            own, size = samples[: len(rows) - start], args.per_device_eval_batch_size
            for first in range(0, len(own), size):
                batch = own[first : first + size]
                meter.update(measure_batch(collector, batch, state))
                done += [(sample.row.group, sample.text) for sample in batch]
                on_batch()
    everywhere = sorted(gather_object(done), key=lambda numbered: numbered[0])
    # The best model is chosen by the reward. Without any score it is NaN: a missing metric ends the run.
    return [text for _, text in everywhere], {"reward": math.nan, **meter.read()}


def measure_batch(collector: Collector, samples: Sequence[Sample], state: TrainerState) -> Measures:
    """Score a batch of completions and return its measures."""
    numbers = collector.rewards(collector.reward_batch(samples, state))
    return {
        **collector.measure_samples(samples, numbers),
        "completions/mean_length": parts(torch.tensor([sum(sample.sampled) for sample in samples])),
        "completions/truncated_frac": parts(torch.tensor([sample.truncated for sample in samples])),
    }


def check_best_metric(
    args: PPOConfig, eval_dataset: EvalDataset, rewards: RewardFunctions, compute_metrics: ComputeMetrics
) -> None:
    """Raise if no evaluation has `metric_for_best_model`. Without this, the first evaluation ends the run.

    Raises:
        ValueError: the metric is not among an evaluation's metrics.
    """
    wanted = args.metric_for_best_model
    if wanted is None or compute_metrics is not None:
        return
    prefixes = [f"eval_{name}_" for name in eval_dataset] if isinstance(eval_dataset, dict) else ["eval_"]
    metrics = [*SCORE_METRICS]
    for name, func in zip(rewards.names, rewards.funcs, strict=True):
        whats = ("mean", "std", "failed") if isinstance(func, RewardWrapper) else ("mean", "std")
        metrics += [f"rewards/{name}/{what}" for what in whats]
    full = wanted if wanted.startswith("eval_") else f"eval_{wanted}"  # as Trainer reads it
    is_custom = full.startswith(tuple(f"{prefix}custom/" for prefix in prefixes))
    if not is_custom and full not in {prefix + metric for prefix in prefixes for metric in metrics}:
        raise ValueError(
            f"metric_for_best_model={wanted!r} is not an evaluation metric; write {' or '.join(prefixes)} followed by "
            f"one of {', '.join(metrics)}, or custom/<name> of log_metric; compute_metrics adds others"
        )


def choose_dataset(requested: str | AnyDataset | None, current: EvalDataset) -> AnyDataset:
    """Return the dataset to evaluate on.

    Args:
        requested: a dataset or its name; None: the trainer's.
        current: the trainer's `eval_dataset`.
    Raises:
        ValueError: there is none, or none of that name.
    """
    named: dict[Any, Any] = current if isinstance(current, dict) else {None: current}
    found = named.get(requested) if requested is None or isinstance(requested, str) else requested
    if found is None:
        names = ", ".join(filter(None, named)) or "none"
        raise ValueError(
            f"eval_dataset={requested!r} is missing; pass a dataset to PPOTrainer or to evaluate(), or a name of the "
            f"trainer's: {names}"
        )
    return found
