"""A stand-in for reasoning-gym with two small tasks; one of its own dependencies needs a compiler to install."""

import random
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


@dataclass
class TaskConfig:
    """The parameters of both tasks."""

    size: int = 500
    seed: int = 0
    largest: int = 9

    def validate(self) -> None:
        assert self.largest > 0, "largest must be positive"


@dataclass
class DatasetSpec:
    name: str
    weight: float
    config: dict


@dataclass
class CompositeConfig:
    size: int = 500
    seed: int = 0
    datasets: list[DatasetSpec] = field(default_factory=list)

    def validate(self) -> None:
        assert self.datasets, "Must specify at least one dataset"


class ProceduralDataset:
    """Entries drawn from their number, and scores for answers."""

    def __init__(self, config: Any):
        config.validate()
        self.config = config

    def __len__(self) -> int:
        return self.config.size

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.config.seed + index)
        a, b = (rng.randint(0, self.config.largest) for _ in range(2))
        return self.entry(a, b)

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """As reasoning-gym's own default: a longer answer that holds the right one gets a part."""
        return len(entry["answer"]) / len(answer) if answer and entry["answer"] in answer else 0.0


class Sums(ProceduralDataset):
    def entry(self, a: int, b: int) -> dict[str, Any]:
        return {
            "question": f"{a} + {b}?",
            "answer": str(a + b),
            "metadata": {"source_dataset": "sums", "pair": (a, b)},
        }


class Letters(ProceduralDataset):
    """Wants a number of letters, any of them."""

    def entry(self, a: int, b: int) -> dict[str, Any]:
        return {"question": f"Write {a} letters, {b}.", "answer": "x", "metadata": {"source_dataset": "letters"}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return sum(map(str.isalpha, answer)) / len(answer) if answer else 0.0


class Composite(ProceduralDataset):
    def __init__(self, config: CompositeConfig):
        super().__init__(config)
        self.tasks = {
            spec.name: create_dataset(spec.name, **{"size": config.size, "seed": config.seed + 1 + n, **spec.config})
            for n, spec in enumerate(config.datasets)
        }

    def __getitem__(self, index: int) -> dict[str, Any]:
        weights = [spec.weight for spec in self.config.datasets]
        (name,) = random.Random(self.config.seed + index).choices([*self.tasks], weights)
        return self.tasks[name][index]

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return self.tasks[entry["metadata"]["source_dataset"]].score_answer(answer, entry)


DATASETS = {"sums": (Sums, TaskConfig), "letters": (Letters, TaskConfig), "composite": (Composite, CompositeConfig)}


def create_dataset(name: str, **config: Any) -> ProceduralDataset:
    made, config_class = DATASETS[name]
    return made(config_class(**config))


def install(patch: pytest.MonkeyPatch) -> None:
    """Have `import reasoning_gym` find this."""
    names = {"": {"create_dataset": create_dataset}, ".factory": {"DATASETS": DATASETS}}
    names |= {".composite": {"DatasetSpec": DatasetSpec}, ".dataset": {"ProceduralDataset": ProceduralDataset}}
    modules = {}
    for name, contents in names.items():
        modules[name] = ModuleType(f"reasoning_gym{name}")
        vars(modules[name]).update(contents)
        patch.setitem(sys.modules, f"reasoning_gym{name}", modules[name])
    for name in (".factory", ".composite", ".dataset"):
        setattr(modules[""], name[1:], modules[name])
