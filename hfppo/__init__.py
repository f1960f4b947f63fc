"""PPO for language models on the Hugging Face Trainer.

`hfppo.public` lists the public names. They are imported when the first of them is used, because importing torch and
transformers takes seconds.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # otherwise a type checker accepts any name
    from hfppo.public import *
else:

    def __getattr__(name: str) -> object:
        """Import a module of the package, or the public names."""
        if name == "__all__":
            return [public for public in dir(import_module(f"{__name__}.public")) if not public.startswith("_")]
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        return getattr(import_module(f"{__name__}.public"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
