"""Clipping of every number on its own, alone or after clipping in the Euclidean norm."""

import math
from dataclasses import dataclass, field

from hush.clipping.lp import NORM
from hush.core.ball import Ball
from hush.core.part import Clipping
from hush.core.tape import ClippedSum, Tape, Thinning


@dataclass(frozen=True, kw_only=True)
class Linf(Clipping):
    """Each number of a record's gradient is cut off at `norm`."""

    norm: float = field(metadata=NORM)

    @property
    def unit(self) -> float:
        return self.norm

    def balls(self, dimension: int | None) -> tuple[Ball, ...]:
        return (Ball(p=math.inf, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, thin: Thinning | None = None) -> ClippedSum:
        return tape.within(self.balls(None), thin)


@dataclass(frozen=True, kw_only=True)
class L2Linf(Clipping):
    """Each gradient is scaled down to Euclidean norm `l2`, then each number of it cut off at `linf`."""

    l2: float = field(metadata=NORM)
    linf: float = field(metadata=NORM)

    @property
    def unit(self) -> float:
        return self.l2

    def balls(self, dimension: int | None) -> tuple[Ball, ...]:
        return (Ball(p=2.0, norm=self.l2, cap=self.linf, dimension=dimension),)

    def clip(self, tape: Tape, thin: Thinning | None = None) -> ClippedSum:
        return tape.within(self.balls(None), thin)
