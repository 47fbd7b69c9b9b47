"""Clipping in the Euclidean norm."""

from dataclasses import dataclass, field

from hush.clipping.lp import scaled_down
from hush.core.number import number
from hush.core.part import Clipping
from hush.core.tape import ClippedSum, Tape


@dataclass(frozen=True, kw_only=True)
class L2(Clipping):
    """Each record's gradient is scaled down to Euclidean norm `norm` at most."""

    norm: float = field(
        metadata=number(
            above=0,
            why="with no bound on a record's influence no noise level gives privacy",
            example=1.0,
        )
    )

    @property
    def unit(self) -> float:
        return self.norm

    def clip(self, tape: Tape) -> ClippedSum:
        return scaled_down(tape, 2.0, self.norm)
