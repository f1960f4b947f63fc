"""Instances of environments, made once and reset for each episode."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfppo.environments.environment import check_environment
from hfppo.support.calls import finish_within

EnvironmentFactory = Callable[[], Any]


@dataclass
class EnvironmentPool:
    """The environments of a run.

    Args:
        factories: by the value of the dataset's column `environment`; None is the only one, for all rows.

    Raises:
        TypeError: a factory cannot be called, or makes an object without `reset`.
    """

    factories: dict[str | None, EnvironmentFactory]
    instances: dict[str | None, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        for name, factory in self.factories.items():
            if not callable(factory):
                raise TypeError(
                    f"environment_factory{label(name)} is a {type(factory).__name__}, which cannot be called; give "
                    "the class, or a function that makes an environment"
                )
        self.instances = {name: [self.make(name)] for name in self.factories}
        for name, (instance,) in self.instances.items():
            check_environment(label(name), instance)

    def make(self, name: str | None) -> Any:
        """Return a new instance."""
        return finish_within(None, "", self.factories[name])

    @property
    def examples(self) -> dict[str | None, Any]:
        """An instance of each environment."""
        return {name: some[0] for name, some in self.instances.items()}

    def take(self, names: Sequence[str | None]) -> list[Any]:
        """Return an instance for each name, all different; they are valid until the next call."""
        used: Counter[str | None] = Counter()
        taken = []
        for name in names:
            some = self.instances[name]
            if used[name] == len(some):
                some.append(self.make(name))
            taken.append(some[used[name]])
            used[name] += 1
        return taken

    def discard(self, environment: Any) -> None:
        """Replace an instance whose state is unknown."""
        for name, some in self.instances.items():
            for i, instance in enumerate(some):
                if instance is environment:
                    some[i] = self.make(name)


def label(name: str | None) -> str:
    """Return what an error adds to `environment_factory` to name one of several."""
    return "" if name is None else f"[{name!r}]"


def pool_of(factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None) -> EnvironmentPool | None:
    """Return the environments of the argument `environment_factory`."""
    if factory is None:
        return None
    return EnvironmentPool(dict(factory) if isinstance(factory, Mapping) else {None: factory})
