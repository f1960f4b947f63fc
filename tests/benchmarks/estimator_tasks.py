"""The tasks of `estimators.py`: forms of the lake game, the arithmetic recipe's sums, questions to a real model."""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, load_dataset
from peft import LoraConfig

from hfppo import PPOConfig

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path[:0] = [str(RECIPES / name) for name in ("arithmetic", "lake", "reasoning")]
from arithmetic import FOLDER as ARITHMETIC  # noqa: E402
from arithmetic import right_answer  # noqa: E402
from lake_game import PROMPT, STATES, Lake, expected_return, state_of, uniform_policy  # noqa: E402
from value_maps import MoveCounter  # noqa: E402


def recipe_settings(name: str) -> tuple[dict[str, Any], LoraConfig]:
    """Return the `PPOConfig` fields of a recipe's YAML file, for a run that saves nothing, and its LoRA."""
    recipe = yaml.safe_load(next(RECIPES.rglob(f"{name}.yaml")).read_text())
    settings = {f.name: recipe[f.name] for f in fields(PPOConfig) if f.name in recipe}
    settings |= {"max_steps": -1, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return settings, LoraConfig(r=recipe["lora_r"], lora_alpha=recipe["lora_alpha"], target_modules="all-linear")


class ReplayedLake(Lake):
    """The game with the same luck in each turn for all games of a group, whatever they play."""

    def reset(self, seed: int, **row: Any) -> str:
        """Begin; see `Lake`."""
        self.seed = seed
        return super().reset(seed=seed)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn with luck from the seed and the number of the turn."""
        self.luck.seed(f"{self.seed} {self.turn}")
        return super().step(text)


class FinalRewardLake(Lake):
    """The game with all rewards at its end."""

    def reset(self, seed: int, episode_seed: int, **row: Any) -> str:
        """Begin; see `Lake`."""
        self.total = 0.0
        return super().reset(seed, episode_seed)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn, and keep its reward until the last."""
        observation, reward, terminated, truncated, info = super().step(text)
        self.total += reward
        return observation, self.total if terminated else 0.0, terminated, truncated, info


@functools.cache
def share_of_way(total: float) -> float:
    """Return a game's mean return as the share of the way from uniform play to the optimum."""
    start = expected_return(uniform_policy())
    return (total - start) / (expected_return() - start)


def play(game: type[Lake], num_eval: int) -> dict[str, Any]:
    """Return the trainer's arguments for a form of the lake game."""
    return {
        "model": str(RECIPES / "lake/base"),
        "environment_factory": game,
        "train_dataset": Dataset.from_dict({"prompt": [PROMPT]}),
        "eval_dataset": Dataset.from_dict({"prompt": [PROMPT] * num_eval}),
        "compute_metrics": MoveCounter(state_of, len(STATES)),
    }


def judge_sums(num_eval: int) -> dict[str, Any]:
    """Return the trainer's arguments for the sums of `recipes/arithmetic/arithmetic.py`."""
    files = {name: str(ARITHMETIC / f"{name}.jsonl") for name in ("train", "test")}
    rows = load_dataset("json", data_files=files)
    return {
        "model": str(ARITHMETIC / "base"),
        "reward_funcs": right_answer,
        "train_dataset": rows["train"],
        "eval_dataset": rows["test"].select(range(num_eval)),
    }


def ask(num_eval: int, shown: Sequence[dict[str, str]] = (), **changes: Any) -> dict[str, Any]:
    """Return the trainer's arguments for questions to `out/smollm2`.

    Args:
        num_eval: questions of the evaluation.
        shown: messages before each question.
        changes: of the recipe's own arguments in `recipes/reasoning/reasoning.yaml`.
    """
    from reasoning_tasks import ReasoningArguments, draw_questions, make_reward, make_rows  # needs reasoning-gym

    recipe = yaml.safe_load((RECIPES / "reasoning/reasoning.yaml").read_text())
    own = {f.name: recipe[f.name] for f in fields(ReasoningArguments) if f.name in recipe}
    args = ReasoningArguments(num_test_questions=num_eval, **own | changes)
    train, test = draw_questions(args)
    rows = (make_rows(train, 0, args), make_rows(test, len(train), args))
    if shown:
        rows = tuple(of_one.map(lambda row: {"prompt": [*shown, *row["prompt"]]}) for of_one in rows)
    return {
        "model": str(RECIPES.parent / "out/smollm2"),
        "reward_funcs": make_reward(train + test, args),
        "train_dataset": rows[0],
        "eval_dataset": rows[1],
    }


@dataclass(frozen=True)
class Task:
    """A task for the methods to learn."""

    recipe: str  # whose YAML file has the settings
    arguments: Callable[[int], dict[str, Any]]  # of the trainer, given the number of completions at the end
    completions: int  # of a run
    pretraining: int  # completions of the critic's pretraining, where a method has it; some of those above
    share: Callable[[float], float] = float  # of a mean reward, for the report
    unit: str = "mean reward"  # of that
    num_eval: int = 512  # completions at the end
    num_critic_eval: int = 512  # of these, for the critic's explained variance
    settings: dict[str, Any] = field(default_factory=dict)  # for all methods, whatever recipe and method say


Game = functools.partial(
    Task,
    "lake",
    completions=3072,
    pretraining=512,
    share=share_of_way,
    unit="share of the way",
    num_critic_eval=256,  # one batch of the recipe: several would not keep their key-values, and take longer
)
Sums = functools.partial(Task, "arithmetic", judge_sums, completions=5120, pretraining=1280)
Questions = functools.partial(Task, "reasoning", completions=512, pretraining=128, num_eval=96)
NO_KL = {"kl_coef": 0.0}  # TRL's default
# Groups of 4, since the prompts cost most of the time; rollouts of 32, half of the recipe's.
FOURS = {"per_device_train_batch_size": 16, "num_generations": 4, **NO_KL}
SHORT = FOURS | {"max_completion_length": 28}
SumInSteps = functools.partial(
    Questions,
    functools.partial(
        ask,
        shown=[
            {"role": "user", "content": "Calculate 4 + 7 - 2."},
            {"role": "assistant", "content": "4 + 7 = 11\n11 - 2 = 9"},
        ],
        task="basic_arithmetic",
        task_config={
            **{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1, "operators": ["+", "-"]},
            **{"allow_negation": False, "allow_parentheses": False},
        },
        instruction="",
    ),
)
TASKS = {
    "lake": Game(functools.partial(play, Lake)),
    "lake_replayed": Game(functools.partial(play, ReplayedLake)),
    "lake_final_reward": Game(functools.partial(play, FinalRewardLake)),
    "arithmetic": Sums(),
    "arithmetic_groups": Sums(settings={"num_generations": 8, **NO_KL}),
    "chain_sum": Questions(ask, settings=FOURS),
    "sum_in_steps": SumInSteps(completions=384, settings=SHORT),
    "sum_in_steps_64": SumInSteps(completions=768, settings=SHORT | {"per_device_train_batch_size": 32}),
}
