"""Clipping in an l_p norm."""

from dataclasses import dataclass, field

from hush.core.ball import Ball
from hush.core.errors import Unsupported
from hush.core.number import number
from hush.core.part import Clipping
from hush.core.tape import ClippedSum, Tape, Thinning

NORM = number(
    at_least=1e-12,
    at_most=1e12,
    why="with no bound on a record's influence no noise level gives privacy, and beyond these limits "
    "single precision loses the norm",
    example=1.0,
)


def scaled_down(tape: Tape, order: float, norm: float) -> ClippedSum:
    """The sum in which each record's gradient is scaled to an l_order norm of `norm` at most."""
    norms = tape.norms(order)
    finite = norms.isfinite()
    weights = (norm / norms).clamp(max=1.0).where(finite, 0.0)
    return ClippedSum(total=tape.weighted_sum(weights), skipped=(~finite).sum())


@dataclass(frozen=True, kw_only=True)
class Lp(Clipping):
    """Each record's gradient is scaled down to l_p norm `norm` at most."""

    p: float = field(
        metadata=number(
            at_least=1, why="below 1 it is not a norm, and for infinity there is Linf", example=1.5
        )
    )
    norm: float = field(metadata=NORM)

    @property
    def unit(self) -> float:
        return self.norm

    def balls(self, dimension: int | None) -> tuple[Ball, ...]:
        return (Ball(p=self.p, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, thin: Thinning | None = None) -> ClippedSum:
        if thin is not None:
            raise Unsupported(
                "Lp clipping scales whole records, and nothing is proved of its coordinates one by one. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        return scaled_down(tape, self.p, self.norm)
