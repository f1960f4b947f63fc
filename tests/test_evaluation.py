"""Evaluations: what they report, and what training makes of it."""

import math

import pytest
from datasets import Dataset

from helpers.agents import Doors
from helpers.runs import count_digits
from helpers.scripted import answering
from hfppo import TolerantReward
from hfppo.collect.collector import Collector
from hfppo.collect.evaluation import SCORE_METRICS, check_best_metric

EVERY_STEP = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1}, None),
        ({"save_strategy": "best"}, None),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"mode": "max"}}, None),
        ({"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"mode": "max"}}, 1.0),
    ],
)
def test_models_are_compared_by_the_reward_also_where_there_is_none(make_trainer, dataset, config, reward):
    trainer = make_trainer(
        EVERY_STEP | config, eval_dataset=dataset, reward_funcs=lambda completions, **_: [reward] * len(completions)
    )
    trainer.train()
    assert trainer.args.metric_for_best_model == "eval_reward"
    assert trainer.args.greater_is_better
    found = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(found) == 2
    assert all(math.isnan(x) if reward is None else x == reward for x in found)


def counts(completions, log_metric, **kwargs):
    log_metric("seen", 1.0)
    return count_digits(completions)


def test_a_metric_that_is_there_is_let_through(make_trainer, dataset):
    """But for the time that an evaluation takes, which says nothing about a model."""
    trainer = make_trainer(reward_funcs=[TolerantReward(counts), count_digits], eval_dataset=dataset.select(range(3)))
    of_time = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}
    names = {name for name in trainer.evaluate() if name.startswith("eval_")} - of_time
    assert {"eval_rewards/counts/failed", "eval_custom/seen", *(f"eval_{name}" for name in SCORE_METRICS)} <= names
    for name in sorted(names):
        trainer.args.metric_for_best_model = name
        check_best_metric(trainer.args, trainer.eval_dataset, trainer.collector.rewards, None)


def test_the_failures_of_a_function_that_may_not_fail_are_no_metric(make_trainer, dataset):
    trainer = make_trainer(reward_funcs=[TolerantReward(counts), count_digits], eval_dataset=dataset.select(range(3)))
    trainer.args.metric_for_best_model = "eval_rewards/count_digits/failed"
    with pytest.raises(ValueError, match=r"is not an evaluation metric; .*rewards/counts/failed"):
        check_best_metric(trainer.args, trainer.eval_dataset, trainer.collector.rewards, None)


def test_completions_are_in_the_order_of_equal_prompts(make_trainer, dataset):
    rows = dataset.select([0, 1, 0, 2, 1])
    predicted = make_trainer({"per_device_eval_batch_size": 2}).predict(rows)
    assert predicted.predictions[0] == predicted.predictions[2]
    assert predicted.predictions[1] == predicted.predictions[4]
    assert predicted.label_ids["prompt"] == rows["prompt"]


def test_what_functions_log_counts_once_for_each_completion(make_trainer, dataset):
    """Batches of 3 and 1."""

    def half_full(completions, log_metric, **kwargs):
        log_metric("full", len(completions) / 3)
        return count_digits(completions)

    trainer = make_trainer({"per_device_eval_batch_size": 3}, reward_funcs=half_full)
    assert trainer.evaluate(dataset.select(range(4)))["eval_custom/full"] == pytest.approx((3 * 1 + 1 / 3) / 4)


def test_the_sampler_gets_all_prompts_at_once_and_the_rewards_get_batches(make_trainer, dataset, monkeypatch):
    """So `generate` samples in its own batches, and vLLM fills its own; metrics and order are those of any batches."""
    scored, asked, ask = [], [], Collector.ask_sampler

    def counting(self, prompts, *args):
        asked.append(len(prompts))
        return ask(self, prompts, *args)

    def counts(completions, **kwargs):
        scored.append(len(completions))
        return count_digits(completions)

    monkeypatch.setattr(Collector, "ask_sampler", counting)
    given, batches = {}, {1: [1] * 16, 3: [3] * 5 + [1], 16: [16]}
    for size, expected in batches.items():
        trainer = make_trainer({"per_device_eval_batch_size": size}, reward_funcs=counts)
        asked.clear()
        scored.clear()
        given[size] = trainer.predict(dataset)
        assert (asked, scored) == ([16], expected)
    for other in (given[1], given[3]):
        assert other.predictions == given[16].predictions
        assert other.metrics["test_reward"] == pytest.approx(given[16].metrics["test_reward"])


def test_an_evaluation_plays_in_no_more_environments_than_a_rollout(make_agent):
    """Here 4, of which each may hold a game, a browser or a sandbox."""
    made = []

    class Counted(Doors):
        def __init__(self):
            made.append(self)

    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{n}"}] for n in range(7)]})
    config = {"per_device_eval_batch_size": 1, "max_completion_length": 8}
    trainer = make_agent(environment_factory=Counted, dataset=rows, config=config)
    assert trainer.args.rollout_size_per_process == 4
    trainer.evaluate(rows)
    assert len(made) == 4


def test_prompts_that_come_later_are_checked_as_well(make_trainer):
    trainer = make_trainer()
    positions = trainer.model.config.max_position_embeddings
    asks = trainer.rollout, lambda prompts: trainer.evaluate(Dataset.from_dict({"prompt": prompts}))
    for ask in asks:
        with pytest.raises(ValueError, match=f"max_completion_length=6 together exceed .* {positions} positions"):
            ask(["1" * positions])
    trainer.processing_class.add_tokens(list("@#$%&~"))  # of which the model was not told
    for ask in asks:
        with pytest.raises(ValueError, match=r"^(prompts|eval_dataset) has token id \d+, but the model's 26 "):
            ask(["~"])


def test_lengths_and_cuts_of_an_evaluation(make_trainer, dataset):
    trainer = answering(make_trainer(), "1.", "123456", "12.", ".")
    metrics = trainer.evaluate(dataset.select(range(4)), metric_key_prefix="test")
    assert (metrics["test_completions/mean_length"], metrics["test_completions/truncated_frac"]) == (3.0, 0.25)


def test_a_dataset_that_is_assigned_later_is_evaluated(make_trainer, dataset):
    trainer = make_trainer(eval_dataset=dataset, compute_metrics=lambda given: {"rows": len(given.inputs)})
    assert trainer.evaluate()["eval_rows"] == len(dataset)
    trainer.eval_dataset = dataset.select(range(3))
    assert trainer.evaluate()["eval_rows"] == 3
    trainer.eval_dataset = {"two": dataset.select(range(2)), "one": dataset.select([0])}
    found = trainer.evaluate()
    assert (found["eval_two_rows"], found["eval_one_rows"]) == (2, 1)


def test_another_training_dataset_wants_another_trainer(make_trainer, dataset):
    trainer = make_trainer()
    trainer.train_dataset = dataset.select(range(3))
    with pytest.raises(ValueError, match=r"^trainer\.train_dataset was replaced .* make a new trainer"):
        trainer.train()


def test_metrics_and_reward_functions_see_what_a_transform_makes(make_trainer, dataset):
    def made(rows: dict) -> dict:
        return rows | {"prompt": [f"{text}0=" for text in rows["prompt"]], "extra": [1.0] * len(rows["prompt"])}

    def extra_of(completions, extra, **kwargs):
        return extra

    seen = []
    trainer = make_trainer(
        reward_funcs=extra_of,
        train_dataset=dataset.with_transform(made),
        eval_dataset=dataset.with_transform(made),
        compute_metrics=lambda given: seen.append(given) or {},
    )
    assert trainer.evaluate()["eval_reward"] == 1.0
    assert seen[0].inputs == [f"{text}0=" for text in dataset["prompt"]]
    assert seen[0].label_ids["extra"] == [1.0] * len(dataset)
