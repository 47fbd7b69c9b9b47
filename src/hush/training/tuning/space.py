"""Search spaces of hyper-parameters: public ranges, from which settings are drawn at random."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from hush.core.errors import InvalidValue, short_repr
from hush.core.value import as_float

Settings = dict[str, Any]


class Dimension(ABC):
    """The values that one setting may take, with a law to draw them from."""

    @abstractmethod
    def draw(self, pick: Random) -> Any:
        """A value at random.

        Args:
            pick: Source of randomness.
        """

    @property
    @abstractmethod
    def first(self) -> Any:
        """One of the values, the same every time."""


@dataclass(frozen=True)
class Uniform(Dimension):
    """Numbers between two ends, each as likely as the other.

    Args:
        low: Smallest number.
        high: Largest number.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self, self.low, self.high, least=-math.inf)

    def draw(self, pick: Random) -> float:
        return pick.uniform(self.low, self.high)

    @property
    def first(self) -> float:
        return self.low


@dataclass(frozen=True)
class LogUniform(Dimension):
    """Positive numbers between two ends, uniform in their logarithm: for learning rates and norms.

    Args:
        low: Smallest number, above 0.
        high: Largest number.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self, self.low, self.high, least=0.0)

    def draw(self, pick: Random) -> float:
        value = math.exp(pick.uniform(math.log(self.low), math.log(self.high)))
        return min(max(value, self.low), self.high)

    @property
    def first(self) -> float:
        return self.low


@dataclass(frozen=True)
class Choice(Dimension):
    """One of several values, each as likely as the other.

    Args:
        values: The values, as numbers or strings.
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)
        if not values:
            raise InvalidValue(
                "Choice() names no value: there is nothing to choose. Pass e.g. hush.Choice(0.5, 1.0)."
            )

    def draw(self, pick: Random) -> Any:
        return pick.choice(self.values)

    @property
    def first(self) -> Any:
        return self.values[0]


def check_space(space: object) -> Mapping[str, Dimension]:
    """The space, checked to be declared ranges; raises for searches that follow earlier scores."""
    if not isinstance(space, Mapping):
        raise InvalidValue(
            f"space={short_repr(space)} is no declared space: the charge is that of independent trials "
            "whose settings are drawn at random. A search that picks the next settings by earlier "
            "scores (Bayesian optimisation, successive halving, a study of Optuna) is another "
            "mechanism, and each of its scores would be a release. Pass a dictionary, e.g. "
            'space={"learning_rate": hush.LogUniform(0.1, 10.0)}.',
            key="space",
        )
    for name, dimension in space.items():
        if not isinstance(name, str) or not isinstance(dimension, Dimension):
            raise InvalidValue(
                f"space[{short_repr(name)}]={short_repr(dimension)} must be a range under a name: what "
                "is searched is public and fixed before the records are looked at. Pass hush.Uniform, "
                "hush.LogUniform or hush.Choice.",
                key="space",
            )
    if not space:
        raise InvalidValue(
            "space={} has no setting: trials that differ in nothing but their noise are not worth their "
            "cost. Pass at least one range, or train once with hush.train.",
            key="space",
        )
    return space


def draw_settings(space: Mapping[str, Dimension], pick: Random) -> Settings:
    """Settings of one trial, each drawn independently."""
    return {name: dimension.draw(pick) for name, dimension in space.items()}


def _check_ends(dimension: Dimension, low: object, high: object, least: float) -> None:
    ends = as_float(low), as_float(high)
    if not (least < ends[0] <= ends[1] < math.inf):
        above = "finite" if math.isinf(least) else "> 0"
        raise InvalidValue(
            f"{type(dimension).__name__}({short_repr(low)}, {short_repr(high)}) must be from a number "
            f"{above} to one no smaller: settings are drawn between the two. Pass e.g. "
            f"{type(dimension).__name__}(0.1, 10.0)."
        )
    object.__setattr__(dimension, "low", ends[0])
    object.__setattr__(dimension, "high", ends[1])
