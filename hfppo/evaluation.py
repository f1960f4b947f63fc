"""Completions of a dataset and what the reward functions say about them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import EvalPrediction, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from hfppo.data import Prompts
from hfppo.experience import Collector, eval_mode, measure_scores
from hfppo.memory import explained_memory
from hfppo.metrics import Meter


@dataclass(frozen=True)
class Evaluated:
    """The completions of a whole dataset, in its order, and their metrics."""

    completions: list[Any]
    metrics: dict[str, float]

    def output(
        self,
        prompts: Prompts,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """What Trainer's evaluation loop returns, with a user's own metrics and all names prefixed."""
        columns: Any = prompts.rows.to_dict()
        completions: Any = self.completions
        metrics = dict(self.metrics)
        if compute_metrics is not None:
            metrics.update(compute_metrics(EvalPrediction(completions, columns, inputs=columns["prompt"])))
        named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
        return EvalLoopOutput(completions, columns, named, len(prompts))


def evaluate_prompts(
    collector: Collector, prompts: Prompts, state: TrainerState, do_sample: bool, on_batch: Callable[[], None]
) -> Evaluated:
    """Complete every prompt once and score the completions; nothing of the training changes.

    Args:
        do_sample: sample, with the same random numbers at every call; otherwise greedy.
        on_batch: called after each batch.
    """
    accelerator, size = collector.accelerator, collector.args.per_device_eval_batch_size
    rows = collector.eval_rows(prompts)[accelerator.process_index :: accelerator.num_processes]
    meter, done = Meter(), []
    with (
        explained_memory("an evaluation", collector.args),
        eval_mode(collector.model),
        torch.no_grad(),
        accelerator.autocast(),
        collector.sampler.ready(),
    ):
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            seeds = [row.seed for row in batch] if do_sample else None
            completions = collector.sampler(*collector.prompt_tensors(batch), seeds)
            texts = collector.texts(batch, completions)
            with collector.scoring(batch, completions, texts, state) as result:
                scored = result()
            scores, _ = collector.final_scores(scored, completions)
            measure_scores(meter, scores[scored.scorable.to(scores.device)], scored, collector.rewards.names)
            meter.add("completions/mean_length", completions.mask.sum(dim=1))
            meter.add("completions/truncated_frac", completions.truncated)
            done += [(row.group, text) for row, text in zip(batch, texts, strict=True)]
            on_batch()
    everywhere = sorted(gather_object(done), key=lambda numbered: numbered[0])
    return Evaluated([text for _, text in everywhere], meter.read())
