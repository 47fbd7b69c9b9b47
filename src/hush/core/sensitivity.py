"""Sensitivity sets: the changes that one record can make to a block of coordinates."""

import math
from dataclasses import dataclass, field

from hush.core.errors import InvalidValue
from hush.core.ranges import Range, check_count, number
from hush.core.value import Value

_WHY_P = "below 1 it is not a norm; at infinity every coordinate is bounded on its own"
_P = Range(at_least=1, why=_WHY_P, example=2.0)
_CAP = Range(at_least=0, why="it bounds what one coordinate can move by", example=0.1)


@dataclass(frozen=True, kw_only=True)
class SensitivitySet(Value):
    """Changes of `dimension` coordinates with ||s||_p <= norm and, where capped, ||s||_inf <= cap.

    `p` may be `math.inf`. Without a dimension, any number of coordinates.
    """

    p: float
    norm: float = field(
        metadata=number(at_least=0, why="it bounds how far a record can push", example=1.0)
    )
    cap: float | None = None
    dimension: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p != math.inf:
            object.__setattr__(self, "p", _P.check("p", self.p))
        if self.cap is not None:
            object.__setattr__(self, "cap", _CAP.check("cap", self.cap))
        if self.dimension is not None:
            why = "a change needs a coordinate to happen in"
            object.__setattr__(
                self, "dimension", check_count("dimension", self.dimension, why, at_least=1)
            )

    @property
    def max_entry(self) -> float:
        """l-infinity sensitivity: the largest change of one coordinate."""
        return self.norm if self.cap is None else min(self.norm, self.cap)

    @property
    def size(self) -> int:
        """Number of coordinates; raises where it is not known."""
        if self.dimension is None:
            raise InvalidValue(
                f"dimension=None: a bound of {self.norm:g} on the l{self.p:g} norm does not say how "
                "many numbers there are, and noise is drawn for each. Pass dimension=, the number of "
                "parameters.",
                key="dimension",
            )
        return self.dimension

    @property
    def max_entries_moved(self) -> float:
        """Number of coordinates that can change by `max_entry` at once; not always whole."""
        many = math.inf if self.dimension is None else float(self.dimension)
        return many if self.p == math.inf else min(many, (self.norm / self.max_entry) ** self.p)

    @property
    def l2_radius(self) -> float:
        """l2 sensitivity: the largest Euclidean norm; infinite where that needs a dimension."""
        many = math.inf if self.dimension is None else float(self.dimension)
        spread = self.norm if self.p <= 2 else self.norm * many ** (0.5 - 1 / self.p)
        return min(spread, self.max_entry * math.sqrt(many)) if self.max_entry else 0.0
