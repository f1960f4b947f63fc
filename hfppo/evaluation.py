"""Completions of a dataset and what the reward functions say about them."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from hfppo.collect.collector import Collector
from hfppo.collect.credit import final_scores
from hfppo.collect.rollout_metrics import measure_scores
from hfppo.config import PPOConfig
from hfppo.data.prompts import Prompts
from hfppo.metrics import Meter
from hfppo.models.layout import eval_mode
from hfppo.models.output_head import is_sharded
from hfppo.rewards.contract import RewardWrapper
from hfppo.rewards.functions import RewardFunctions
from hfppo.saving.resume import ResumableTrainer
from hfppo.setup import later_prompts
from hfppo.support.out_of_memory import explained_memory

# Of every evaluation; each reward function adds its own.
METRICS_OF_SCORES = (
    "reward",
    "reward_std",
    "unscorable_frac",
    "completions/mean_length",
    "completions/truncated_frac",
)


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
        rows = prompts.rows  # read by a transform, where they have one, as prompts and reward functions see them
        columns: Any = rows[:] if rows.format["type"] == "custom" else rows.to_dict()
        completions: Any = self.completions
        metrics = dict(self.metrics)
        if compute_metrics is not None:
            given = compute_metrics(EvalPrediction(completions, columns, inputs=columns["prompt"]))
            metrics.update(denumpify_detensorize(given))
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
    accelerator = collector.accelerator
    size = collector.args.per_device_eval_batch_size
    everything = collector.eval_rows(prompts)
    rows = everything[accelerator.process_index :: accelerator.num_processes]
    most = -(-len(everything) // accelerator.num_processes)
    filled = rows + everything[: most - len(rows)]  # a sharded model wants as many forwards from every process
    meter = Meter()
    done = []
    with (
        explained_memory("an evaluation", collector.args),
        eval_mode(collector.model),
        torch.no_grad(),
        collector.sampler.ready(),
    ):
        for start in range(0, most, size):
            batch = filled[start : start + size]
            seeds = [row.seed for row in batch] if do_sample else None
            completions = collector.ask_sampler(*collector.prompt_tensors(batch), seeds)
            batch = rows[start : start + size]
            if not batch:
                break
            completions = completions.rows(slice(len(batch)))
            texts = collector.texts(batch, completions)
            with collector.scoring(batch, completions, texts, state) as result:
                scored = result()
            scores = final_scores(scored, completions, collector.args)
            measure_scores(meter, scores[scored.scorable], scored, collector.rewards.names)
            meter.add("completions/mean_length", completions.mask.sum(dim=1))
            meter.add("completions/truncated_frac", completions.truncated)
            done += [(row.group, text) for row, text in zip(batch, texts, strict=True)]
            on_batch()
    everywhere = sorted(gather_object(done), key=lambda numbered: numbered[0])
    # Best models are chosen by the reward, and a metric that is missing would end the run.
    return Evaluated([text for _, text in everywhere], {"reward": math.nan, **meter.read()})


def check_best(
    args: PPOConfig,
    datasets: Iterable[str | None],
    rewards: RewardFunctions,
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None,
) -> None:
    """Refuse to compare models by a metric that no evaluation will have: the first one would end the run.

    Args:
        datasets: names of the evaluation datasets; None is that of the only one.
    Raises:
        ValueError: names the metrics that there are.
    """
    wanted = args.metric_for_best_model
    if wanted is None or compute_metrics is not None:
        return
    prefixes = [f"eval_{name}_" for name in datasets if name is not None] or ["eval_"]
    metrics = list(METRICS_OF_SCORES)
    for name, func in zip(rewards.names, rewards.funcs, strict=True):
        whats = ("mean", "std", "failed") if isinstance(func, RewardWrapper) else ("mean", "std")
        metrics += [f"rewards/{name}/{what}" for what in whats]
    full = wanted if wanted.startswith("eval_") else f"eval_{wanted}"  # as Trainer reads it
    rests = [full.removeprefix(prefix) for prefix in prefixes if full.startswith(prefix)]
    if not any(rest in metrics or rest.startswith("custom/") for rest in rests):
        raise ValueError(
            f"metric_for_best_model={wanted!r} is no metric of an evaluation; those are {' or '.join(prefixes)} and "
            f"then {', '.join(metrics)}, or custom/<name> of log_metric; compute_metrics adds others"
        )


class EvaluatingTrainer(ResumableTrainer):
    """A trainer whose evaluations and predictions complete prompts."""

    args: PPOConfig
    processing_class: PreTrainedTokenizerBase
    collector: Collector
    _eval_prompts: dict[str | None, Prompts]  # by name; None: the only ones
    _prepared_eval: Any  # the dataset, or datasets by name, of which they are
    _do_sample: bool | None = None

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """The prompts of an evaluation; `evaluation_loop` shares them out among the processes."""
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        if isinstance(eval_dataset, str) and self.eval_dataset is not self._prepared_eval:
            eval_dataset = self.eval_dataset[eval_dataset]  # of datasets that were assigned later
        if eval_dataset is self._prepared_eval:
            prompts = self._eval_prompts.get(None)
        elif isinstance(eval_dataset, str):
            if eval_dataset not in self._eval_prompts:
                known = ", ".join(str(name) for name in self._eval_prompts if name is not None) or "no names"
                raise ValueError(f"eval_dataset={eval_dataset!r} is not among those of the trainer, which has {known}")
            prompts = self._eval_prompts[eval_dataset]
        else:
            rewards = self.collector.rewards
            prompts = later_prompts(
                eval_dataset, "eval_dataset", self.model, rewards, self.processing_class, self.args
            )
        if prompts is None:
            raise ValueError("eval_dataset is missing; pass one to PPOTrainer or to evaluate()")
        size = self.args.eval_batch_size * self.args.world_size
        return DataLoader(cast(Any, prompts), batch_size=size, collate_fn=list)

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """The prompts of `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        do_sample: bool | None = None,
    ) -> dict[str, float]:
        """Trainer's `evaluate` on completions.

        Args:
            do_sample: True samples, False is greedy; None: `args.eval_do_sample`.
        """
        with self._sampling(do_sample):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    @contextmanager
    def _sampling(self, do_sample: bool | None) -> Iterator[None]:
        """Inside, evaluations sample or not; an inner None keeps what an outer call asked for."""
        before = self._do_sample
        self._do_sample = before if do_sample is None else do_sample
        try:
            yield
        finally:
            self._do_sample = before

    def place_model(self) -> None:
        """Move to the device what Trainer would move only when training begins."""
        device = self.args.device
        if is_sharded(self.model):
            return
        for module in self.model.modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(tensor.device != device for tensor in own):  # a quantised base is there, and must not be moved
                module.to(device)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Complete and score the prompts. Trainer's loop computes losses on labels, which prompts do not have."""
        self.place_model()
        prompts = cast(Prompts, dataloader.dataset)
        self.callback_handler.eval_dataloader = dataloader
        do_sample = self.args.eval_do_sample if self._do_sample is None else self._do_sample

        def on_batch() -> None:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        evaluated = evaluate_prompts(self.collector, prompts, self.state, do_sample, on_batch)
        return evaluated.output(prompts, self.compute_metrics, metric_key_prefix)
