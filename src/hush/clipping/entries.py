"""Vectors of which one record changes a few entries: histograms of votes, and scores."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from hush.clipping.norms import NORM
from hush.core.errors import Unsupported
from hush.core.parts import Clipping, Proof, SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask, Tape
from hush.core.value import check_count


@dataclass(frozen=True, kw_only=True)
class Entries(Clipping):
    """One record changes `changed` entries at most, each by `norm` at most.

    A vote that is added changes one count by 1; a vote that is replaced changes two. Whoever makes the
    vector keeps the bound: there is nothing to clip.

    Args:
        changed: Number of entries that one record changes, at most.
        norm: Largest change of an entry.
    """

    # Not Poisson: whether a record takes part is one draw for all the entries it changes.
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("FullBatch",),
            noises=("Gaussian", "Laplace", "GeneralizedGaussian"),
            note="argmax.md",
        ),
    )

    changed: int
    norm: float = field(default=1.0, metadata=NORM)

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "it is how many entries one record can change, and noise hides each on its own"
        object.__setattr__(self, "changed", check_count("changed", self.changed, why, at_least=1))

    @classmethod
    def examples(cls) -> tuple[tuple[Clipping, int], ...]:
        return ((cls(changed=1), 1),)

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=math.inf, norm=self.norm, dimension=self.changed),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        raise Unsupported(
            "Entries bounds counts and scores; a record's gradient may change every entry, and cutting "
            "off all but a few would not bound its influence on the choice. Train with L2 or Lp."
        )
