"""Clipping in the Euclidean norm."""

from dataclasses import dataclass, field

from hush.clipping.lp import NORM, scaled_down
from hush.core.ball import Ball
from hush.core.part import Clipping
from hush.core.tape import ClippedSum, Tape, Thinning


@dataclass(frozen=True, kw_only=True)
class L2(Clipping):
    """Each record's gradient is scaled down to Euclidean norm `norm` at most."""

    norm: float = field(metadata=NORM)

    @property
    def unit(self) -> float:
        return self.norm

    def balls(self, dimension: int | None) -> tuple[Ball, ...]:
        return (Ball(p=2.0, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, thin: Thinning | None = None) -> ClippedSum:
        return scaled_down(tape, 2.0, self.norm) if thin is None else tape.within(self.balls(None), thin)
