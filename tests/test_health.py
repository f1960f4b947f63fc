"""Each warning in a run that has its problem, and none in the recipe."""

import ast
import inspect
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerState

from helpers.tiny import tiny_model
from hfppo import AdaptiveKLCallback, HealthCallback, HealthWarning, TextEnvironment
from hfppo.metrics import METRICS
from hfppo.reporting.health import CHECKS

PAGE = Path(__file__).parents[1] / "docs/troubleshooting.md"
CHINESE = PAGE.parent / "zh/troubleshooting.md"  # headings name the English section in brackets
ANCHORS = {check.__name__.replace("_", "-") for check in CHECKS}
ONE_STEP = {"num_mini_batches": 1, "num_ppo_epochs": 1, "per_device_train_batch_size": 8}  # per rollout


def warned(trainer, **kwargs) -> dict[str, str]:
    """What a run warns of, by section of the docs; each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(**kwargs)
    messages = [str(w.message) for w in caught if issubclass(w.category, HealthWarning)]
    by_anchor = {message.rsplit("#", 1)[1]: message for message in messages}
    assert len(by_anchor) == len(messages), messages
    return by_anchor


def constant(completions, **kwargs) -> list[float]:
    return [0.1] * len(completions)


def relative(completions, **kwargs) -> list[float]:
    """The share of one character, against the others of the batch: its mean is 0, whatever the policy does."""
    shares = [text.count("1") / max(len(text), 1) for text in completions]
    return [share - sum(shares) / len(shares) for share in shares]


def unreadable(completions, **kwargs) -> list[None]:
    return [None] * len(completions)


def by_prompt(prompts, **kwargs) -> list[float]:
    """Some prompts are right whatever is said, and some wrong."""
    return [float(random.Random(prompt).random() > 0.5) for prompt in prompts]


def noisy(trainer) -> None:
    """A layer that drops out in every mode, as a base with dropout in code of its own would."""
    layer = trainer.model.causal_lm.model.layers[0].mlp
    layer.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.3, training=True))


def stale(trainer) -> None:
    """A sampler that never gets the adapter."""
    sampler = trainer.collector.sampler
    sample = sampler._sample

    def from_the_base(*args):
        with trainer.model.disable_adapter():
            return sample(*args)

    sampler._sample = from_the_base


def large(trainer) -> None:
    """A base that says it has two billion parameters."""
    trainer.model.causal_lm.num_parameters = lambda *args, **kwargs: 2 * 10**9


class Talkative(TextEnvironment):
    """Answers at a length that no turn leaves room for."""

    def reset(self, **row) -> None:
        return None

    def step(self, text: str):
        return "1" * 20, 0.0, False, False, {}


TALKS = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]] * 8})


@dataclass(frozen=True)
class Case:
    """A run with a problem: how it is made, and words of the warnings that it must give, by section of the docs."""

    words: dict[str, str]
    config: dict = field(default_factory=dict)
    kwargs: dict = field(default_factory=dict)
    spoil: Callable = lambda trainer: None


RUNS = {
    "learning rate × 100": Case(
        {"clip-fraction": "lower learning_rate (now 1.0)"}, {"learning_rate": 1.0, "max_steps": 16}
    ),
    "the rate of a small base": Case(
        {"learning-rate": "lower learning_rate (now 0.01)"}, ONE_STEP | {"max_steps": 1}, spoil=large
    ),
    "dropout": Case(
        {"first-ratio": "noise in the model, such as dropout", "sampler-mismatch": "mismatch/mean is 1."}, spoil=noisy
    ),
    "a sampler that keeps the first adapter": Case(
        {"sampler-mismatch": "an old adapter"}, ONE_STEP | {"max_steps": 6}, spoil=stale
    ),
    "hardly any KL penalty": Case(
        {"kl-to-the-reference": "raise kl_coef (now 1e-06)"},
        ONE_STEP | {"max_steps": 8, "kl_coef": 1e-6, "learning_rate": 3e-2},
    ),
    "a reward without a scale": Case(
        {"entropy-collapse": "entropy_coef (now 0.0)"},
        ONE_STEP
        | {"per_device_train_batch_size": 16, "max_steps": 20, "learning_rate": 0.03}
        | {"kl_coef": 0.0, "lr_scheduler_type": "constant", "advantage_estimator": "reinforce_plus_plus"},
        {"reward_funcs": relative},
    ),
    "a limit below the length of answers": Case(
        {"truncation": "raise max_completion_length (now 2)"}, ONE_STEP | {"max_completion_length": 2, "max_steps": 3}
    ),
    "answers that do not fit": Case(
        {"dropped-answers": "raise max_completion_length (now 6)"},
        ONE_STEP | {"max_steps": 1, "max_turn_length": 2},
        {"environment_factory": Talkative, "reward_funcs": None, "train_dataset": TALKS, "eval_dataset": TALKS},
    ),
    "a constant reward": Case(
        {"no-signal": "reward_std is 0, at"}, ONE_STEP | {"max_steps": 3}, {"reward_funcs": constant}
    ),
    "a reward that the prompt decides": Case(
        {"no-signal-within-prompts": "raise num_generations (now 2)"},
        ONE_STEP | {"max_steps": 3, "advantage_estimator": "grpo", "num_generations": 2},
        {"reward_funcs": by_prompt},
    ),
    "a reward that reads nothing": Case(
        {"unscorable": "since step 1, unscorable_frac is 1, "},
        ONE_STEP | {"max_steps": 1},
        {"reward_funcs": unreadable},
    ),
    "scores outside the critic's range": Case(
        {"outside-range": "widen value_range (now [0.0, 0.5])"},
        ONE_STEP | {"max_steps": 1, "value_range": [0.0, 0.5], "kl_coef": 0.0},
    ),
    "a critic that jumps": Case(
        {"explained-variance": "since step 2, value/explained_variance is "},
        ONE_STEP
        | {"per_device_train_batch_size": 16, "max_steps": 12, "learning_rate": 1e-4}
        | {"critic_learning_rate": 1.0, "lr_scheduler_type": "constant"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_each_problem_is_warned_of(make_trainer, dataset, name, monkeypatch):
    # At the start it refuses some of these models.
    monkeypatch.setattr("hfppo.trainer.check_outputs", lambda *_, **__: None)
    case = RUNS[name]
    trainer = make_trainer(case.config, **{"eval_dataset": dataset, **case.kwargs})
    case.spoil(trainer)
    told = warned(trainer)
    assert [anchor for anchor, words in case.words.items() if words not in told.get(anchor, "")] == [], told


def test_every_check_has_a_run_that_fails_it():
    assert {anchor for case in RUNS.values() for anchor in case.words} == ANCHORS


class Log:
    """A HealthCallback that is told a metric step by step."""

    def __init__(self, trainer, callback: HealthCallback, main: bool = True):
        self.trainer, self.callback = trainer, callback
        self.state = TrainerState(is_world_process_zero=main)
        callback.on_train_begin(trainer.args, self.state, trainer.control)

    def __call__(self, step: int, **metrics: float) -> list[str]:
        """The warnings of a log."""
        self.state.log_history.append({name.replace("__", "/"): value for name, value in metrics.items()})
        self.state.log_history[-1]["step"] = step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.callback.on_log(self.trainer.args, self.state, self.trainer.control, model=self.trainer.model)
        return [str(w.message) for w in caught]


def test_a_problem_is_warned_of_once_in_a_training(make_trainer):
    log = Log(make_trainer(ONE_STEP), HealthCallback())
    failing = [1, 2, 4, 12]
    assert [step for step in range(1, 14) if log(step, policy__clip_frac=0.9 if step in failing else 0.1)] == [1]
    for resumed, warns in ((True, 0), (False, 1)):
        log.state.log_history = log.state.log_history if resumed else []
        log.callback.on_train_begin(log.trainer.args, log.state, log.trainer.control)
        assert len(log.callback.found) == resumed
        assert len(log(14, policy__clip_frac=0.9)) == warns


@pytest.mark.parametrize(
    ("config", "dtype", "noise"),
    [
        ({}, torch.float32, 0.004),  # TF32
        ({}, torch.float16, 0.004),
        ({}, torch.bfloat16, 0.033),
        ({"bf16": True}, torch.float32, 0.033),
    ],
)
def test_a_first_ratio_is_judged_by_its_mean_and_dtype(make_trainer, config, dtype, noise):
    """Rounding that moves log-probs by this in the mean, and one by 0.2, is no fault; three times as much is."""
    trainer = make_trainer(ONE_STEP | config, model=tiny_model().to(dtype))
    log = Log(trainer, HealthCallback())
    largest = {"policy__first_ratio_deviation": 0.2}
    assert not log(1, policy__first_ratio_deviation_mean=noise, **largest)
    (message,) = log(2, policy__first_ratio_deviation_mean=3 * noise, **largest)
    assert "policy/first_ratio_deviation_mean is 0." in message


def test_a_problem_must_last_and_begins_after_the_last_good_log(make_trainer):
    log = Log(make_trainer(), HealthCallback())  # 4 steps per rollout
    for step in (4, 8, 12):
        assert not log(step, completions__truncated_frac=0.9 if step == 8 else 0.0)
    assert not log(16, completions__truncated_frac=0.9)
    assert not log(20, completions__truncated_frac=0.9)
    assert not log(21, loss=0.0)  # three rollouts, but a log without the metric shows nothing
    (message,) = log(24, completions__truncated_frac=0.7)
    assert "since step 16, completions/truncated_frac is 0.7, above 0.5. " in message
    assert "\n" not in message


def test_a_limit_replaces_the_default_or_turns_a_check_off(make_trainer):
    log = Log(make_trainer(ONE_STEP), HealthCallback(clip_fraction=0.5, sampler_mismatch=None))
    assert not log(1, policy__clip_frac=0.45, mismatch__mean=9.0)
    assert "above 0.5" in log(2, policy__clip_frac=0.55)[0]
    with pytest.raises(TypeError, match=r"no check max_kl; choose from .*kl_to_the_reference"):
        HealthCallback(max_kl=0.5)


def test_steps_of_a_rollout_are_judged_together(make_trainer):
    """A rollout's first step is never clipped; it does not end a problem."""
    log = Log(make_trainer(), HealthCallback(clip_fraction=0.5))
    assert not any(log(step, policy__clip_frac=0.0) for step in (1, 2))
    assert not log(3, policy__clip_frac=0.9)
    assert "is 0.6" in log(4, policy__clip_frac=1.5)[0]
    assert not log(5, policy__clip_frac=0.0)
    assert not log(6, policy__clip_frac=0.9)
    log = Log(log.trainer, HealthCallback(clip_fraction=0.5))
    told = [step for step in range(1, 9) if log(step, policy__clip_frac=0.7 * (step > 4))]
    assert told == [7]  # the mean over steps 4 to 7 is 0.525


def test_not_a_number_fails_and_other_processes_are_silent(make_trainer):
    trainer = make_trainer(ONE_STEP)
    assert "clip_frac is nan" in Log(trainer, HealthCallback())(1, policy__clip_frac=float("nan"))[0]
    assert not Log(trainer, HealthCallback(), main=False)(1, policy__clip_frac=float("nan"))


def lasting(log: Log, **metrics: float) -> list[str]:
    """The warnings of a log that stays the same for ten rollouts, as long as any problem must last."""
    start = len(log.state.log_history)
    return [message for step in range(start + 1, start + 11) for message in log(step, **metrics)]


@pytest.mark.parametrize("given", [[AdaptiveKLCallback(target=0.01)], []])
def test_twice_the_target_of_adaptive_kl_is_the_limit(make_trainer, given):
    trainer = make_trainer(ONE_STEP, callbacks=given)
    (health,) = [callback for callback in trainer.callback_handler.callbacks if type(callback) is HealthCallback]
    assert not lasting(Log(trainer, health), kl=0.02)
    told = lasting(Log(trainer, health), kl=0.021)
    assert ["above 0.02. " in message for message in told] == [True] * len(given)


def test_a_solved_task_is_no_problem(make_trainer):
    """Entropy and spread of the scores vanish there as well; without a better reward it is a collapse."""
    first = {"reward": 0.9, "reward_std": 0.3, "policy__entropy": 1.0}
    last = {"reward_std": 0.0, "policy__entropy": 0.01}
    for reward, sections in ((1.0, []), (0.92, ["entropy-collapse", "no-signal"])):
        log = Log(make_trainer(ONE_STEP), HealthCallback())
        assert not log(1, **first)
        assert [message.rsplit("#", 1)[1] for message in lasting(log, reward=reward, **last)] == sections


def test_checks_read_metrics_and_fields_that_exist(make_trainer):
    args, source = make_trainer().args, "".join(map(inspect.getsource, CHECKS))
    metrics = re.findall(r'(?:above\(|below\(|now\[|first\[)"([^"]+)"', source)
    assert len(metrics) > len(CHECKS)
    assert set(metrics) <= METRICS.keys()
    assert [name for name in re.findall(r"{(\w+)}", source) if not hasattr(args, name)] == []


@pytest.mark.parametrize(("page", "name"), [(PAGE, "(.*)"), (CHINESE, ".*（(.*)）")], ids=["English", "Chinese"])
def test_every_check_has_its_section_and_its_row_with_the_limit(page, name):
    text = page.read_text()
    headings = re.findall(rf"^### {name}$", text, flags=re.MULTILINE)  # those of the other problems have two marks
    assert {heading.lower().replace(" ", "-") for heading in headings} == ANCHORS
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert {name: ast.literal_eval(limit) for name, limit in rows.items()} == HealthCallback().limits


@pytest.mark.parametrize(("estimator", "fails"), [("gae", False), ("grpo", True)])
def test_prompts_without_a_signal_matter_to_estimators_that_compare_within_them(make_trainer, estimator, fails):
    trainer = make_trainer(ONE_STEP | {"advantage_estimator": estimator, "num_generations": 2})
    log = Log(trainer, HealthCallback())
    assert bool(lasting(log, frac_reward_zero_std=1.0, reward=0.0, reward_std=1.0)) is fails
