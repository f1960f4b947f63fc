"""Tools and environments: what answers the model between its turns."""

from hfppo.environments.environment import Result, TextEnvironment
from hfppo.environments.gymnasium_adapter import GymnasiumEnvironment

__all__ = ["GymnasiumEnvironment", "Result", "TextEnvironment"]
