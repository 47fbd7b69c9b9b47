"""Clipping in the Euclidean norm."""

from dataclasses import dataclass, field

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
        norms = tape.norms(2.0)
        finite = norms.isfinite()
        weights = (self.norm / norms).clamp(max=1.0).where(finite, 0.0)
        return ClippedSum(total=tape.weighted_sum(weights), skipped=(~finite).sum())
