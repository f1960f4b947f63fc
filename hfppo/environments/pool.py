"""Instances of environments, made once and reset for each episode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hfppo.environments.environment import Environment, TextEnvironment, tools_of
from hfppo.support.calls import finish_within

EnvironmentFactory = Callable[[], Environment]


@dataclass
class EnvironmentPool:
    """The environments of a run.

    Args:
        factories: keyed by the value of the dataset's column `environment`; None is the key of a single one. A factory
            that is None makes no environment, for runs with tools only.

    Raises:
        TypeError: a factory cannot be called, or makes an object without `reset` or with other tools than its first.
    """

    factories: dict[str | None, EnvironmentFactory | None]
    examples: dict[str | None, Environment] = field(init=False)  # the first instance of each environment
    idle: dict[str | None, list[Environment]] = field(init=False)  # instances that no episode uses

    def __post_init__(self) -> None:
        self.examples = {}
        for name in self.factories:
            self.examples[name] = self.make(name)
        self.idle = {name: [example] for name, example in self.examples.items()}

    def make(self, name: str | None) -> Environment:
        """Return a new instance."""
        factory = self.factories[name]
        if factory is None:
            return None
        if not callable(factory):
            raise TypeError(
                f"{factory_name(name)} is a {type(factory).__name__}, which cannot be called; pass the class, or a "
                "function that makes an environment"
            )
        environment = finish_within(None, "", factory)
        if not callable(getattr(environment, "reset", None)):
            raise TypeError(
                f"{factory_name(name)} made a {type(environment).__name__}, which has no method reset(**row)"
            )
        first = self.examples.get(name, environment)
        if offered_by(environment) != offered_by(first):
            raise TypeError(
                f"{factory_name(name)} made a {type(environment).__name__} with {offered_by(environment)} after a "
                f"{type(first).__name__} with {offered_by(first)}; pass a mapping with a factory for each"
            )
        return environment

    def take(self, names: Sequence[str | None]) -> list[Environment]:
        """Return an instance for each name; no other episode gets them until they are given back."""
        return [self.idle[name].pop(0) if self.idle[name] else self.make(name) for name in names]

    def give_back(self, name: str | None, environment: Environment) -> None:
        """Return an instance to the pool. Its state must be known, and no thread may still use it."""
        self.idle[name].append(environment)


def offered_by(environment: Environment) -> str:
    """Return what an environment offers to the model, in words."""
    return "whole turns" if isinstance(environment, TextEnvironment) else f"tools {[*tools_of(environment)]}"


def factory_name(name: str | None) -> str:
    """Return the name of a factory in errors."""
    return "environment_factory" if name is None else f"environment_factory[{name!r}]"
