"""Clipping in the Euclidean norm."""

from dataclasses import dataclass, field

from hush.clipping.lp import NORM, scaled_down
from hush.core.part import Clipping
from hush.core.tape import ClippedSum, Tape


@dataclass(frozen=True, kw_only=True)
class L2(Clipping):
    """Each record's gradient is scaled down to Euclidean norm `norm` at most."""

    norm: float = field(metadata=NORM)

    @property
    def unit(self) -> float:
        return self.norm

    def clip(self, tape: Tape) -> ClippedSum:
        return scaled_down(tape, 2.0, self.norm)
