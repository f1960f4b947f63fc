"""Instances of environments, made once and reset for each episode."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hfppo.environments.environment import Environment
from hfppo.support.calls import finish_within

EnvironmentFactory = Callable[[], Environment]


@dataclass
class EnvironmentPool:
    """The environments of a run.

    Args:
        factories: keyed by the value of the dataset's column `environment`; None is the key of a single one.

    Raises:
        TypeError: a factory cannot be called, or makes an object without `reset`.
    """

    factories: dict[str | None, EnvironmentFactory]
    instances: dict[str | None, list[Environment]] = field(init=False)

    def __post_init__(self) -> None:
        self.instances = {name: [self.make(name)] for name in self.factories}

    def make(self, name: str | None) -> Environment:
        """Return a new instance."""
        factory = self.factories[name]
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
        return environment

    @property
    def examples(self) -> dict[str | None, Environment]:
        """An instance of each environment."""
        return {name: some[0] for name, some in self.instances.items()}

    def take(self, names: Sequence[str | None]) -> list[Environment]:
        """Return an instance for each name, all different. The next call may return them again."""
        used: Counter[str | None] = Counter()
        taken = []
        for name in names:
            some = self.instances[name]
            if used[name] == len(some):
                some.append(self.make(name))
            taken.append(some[used[name]])
            used[name] += 1
        return taken

    def discard(self, environment: Environment) -> None:
        """Replace an instance whose state is unknown."""
        for name, some in self.instances.items():
            for i, instance in enumerate(some):
                if instance is environment:
                    some[i] = self.make(name)


def factory_name(name: str | None) -> str:
    """Return the name of a factory in errors."""
    return "environment_factory" if name is None else f"environment_factory[{name!r}]"


def pool_of(factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None) -> EnvironmentPool | None:
    """Return the environments of the argument `environment_factory`."""
    if factory is None:
        return None
    return EnvironmentPool(dict(factory) if isinstance(factory, Mapping) else {None: factory})
