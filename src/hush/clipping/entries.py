"""Vectors of which one record changes a few entries: histograms of votes, and scores."""

import math
from dataclasses import dataclass, field

from hush.clipping.lp import NORM
from hush.core.ball import Ball
from hush.core.errors import Unsupported
from hush.core.number import check_count
from hush.core.part import Clipping
from hush.core.tape import ClippedSum, Tape, Thinning


@dataclass(frozen=True, kw_only=True)
class Entries(Clipping):
    """One record changes `changed` entries at most, each by `norm` at most.

    A vote that is added changes one count by 1; a vote that is replaced changes two. Whoever makes the
    vector keeps the bound: there is nothing to clip.
    """

    changed: int
    norm: float = field(default=1.0, metadata=NORM)

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "it is how many entries one record can change, and noise hides each on its own"
        object.__setattr__(self, "changed", check_count("changed", self.changed, why, at_least=1))

    @property
    def unit(self) -> float:
        return self.norm

    def balls(self, dimension: int | None) -> tuple[Ball, ...]:
        return (Ball(p=math.inf, norm=self.norm, dimension=self.changed),)

    def clip(self, tape: Tape, thin: Thinning | None = None) -> ClippedSum:
        raise Unsupported(
            "Entries bounds counts and scores; a record's gradient may change every entry, and cutting "
            "off all but a few would not bound its influence on the choice. Train with L2 or Lp."
        )
