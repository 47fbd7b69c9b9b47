"""Clipping of whole gradients in an l_p norm, and of their entries."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hush.core.errors import Unsupported
from hush.core.parts import Clipping, SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask, Tape
from hush.core.value import number

if TYPE_CHECKING:
    import torch

NORM = number(
    at_least=1e-12,
    at_most=1e12,
    why="with no bound on a record's influence no noise level gives privacy, and beyond these limits "
    "single precision loses the norm",
    example=1.0,
)


def clip_whole(tape: Tape, order: float, norm: float) -> ClippedSum:
    """Sum of the per-sample gradients, each scaled to an l_order norm of `norm` at most."""
    norms = tape.norms(order)
    weights = clipping_weights(norm, norms)
    return ClippedSum(total=tape.weighted_sum(weights), skipped=(~norms.isfinite()).sum())


def clipping_weights(norm: float, norms: "torch.Tensor") -> "torch.Tensor":
    """Clipping weights min(1, norm / norms) of per-sample gradients, tapered; 0 if not finite."""
    weights = (norm / norms).clamp(max=1.0) * taper(norm, norms)
    return weights.where(norms.isfinite(), 0.0)


def taper(norm: float, norms: "torch.Tensor") -> "torch.Tensor":
    """Factor from 1 to 0 of weights norm / norms: 0 where they are too small for single precision.

    Such a number is off by up to half of itself, and the gradient would end outside. It falls to 0
    without a jump: a norm's last bit may depend on who else is in the batch, and one record more must
    not make others vanish.
    """
    far = min(2.0**100, norm * 2.0**101)
    return (2 - norms / far).clamp(min=0.0, max=1.0)


@dataclass(frozen=True, kw_only=True)
class L2Ball:
    """One Euclidean ball of radius `norm` as the sensitivity set.

    Mixed in rather than derived from `Clipping`, where every class is one that a plan may name.
    """

    norm: float = field(metadata=NORM)

    @classmethod
    def examples(cls) -> tuple[tuple[Any, int], ...]:
        return ((cls(norm=1.0), 1),)

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=2.0, norm=self.norm, dimension=dimension),)


@dataclass(frozen=True, kw_only=True)
class Lp(Clipping):
    """l_p clipping: each per-sample gradient is scaled down to l_p norm `norm` at most.

    Args:
        p: Order of the norm.
        norm: Clipping norm.
    """

    p: float = field(
        metadata=number(
            at_least=1, why="below 1 it is not a norm, and for infinity there is Linf", example=1.5
        )
    )
    norm: float = field(metadata=NORM)

    @classmethod
    def examples(cls) -> tuple[tuple[Clipping, int], ...]:
        return ((cls(p=2.0, norm=1.0), 1),)

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=self.p, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Lp clipping scales whole records, and nothing is proved of its coordinates one by one. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        return clip_whole(tape, self.p, self.norm)


@dataclass(frozen=True, kw_only=True)
class L2(L2Ball, Clipping):
    """l2 clipping: each per-sample gradient is scaled down to Euclidean norm `norm` at most.

    Args:
        norm: Clipping norm.
    """

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            return tape.clip_entrywise(self.sensitivity(None), mask)
        return clip_whole(tape, 2.0, self.norm)


@dataclass(frozen=True, kw_only=True)
class Linf(Clipping):
    """l-infinity clipping: each entry of a per-sample gradient is clamped to [-norm, norm].

    Args:
        norm: Clipping norm.
    """

    norm: float = field(metadata=NORM)

    @classmethod
    def examples(cls) -> tuple[tuple[Clipping, int], ...]:
        return ((cls(norm=0.5), 4),)

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=math.inf, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        return tape.clip_entrywise(self.sensitivity(None), mask)


@dataclass(frozen=True, kw_only=True)
class L2Linf(Clipping):
    """Each per-sample gradient is scaled down to Euclidean norm `l2`, then clamped entry by entry.

    Args:
        l2: Euclidean norm, at most.
        linf: Bound on each entry.
    """

    l2: float = field(metadata=NORM)
    linf: float = field(metadata=NORM)

    @classmethod
    def examples(cls) -> tuple[tuple[Clipping, int], ...]:
        return ((cls(l2=1.0, linf=0.5), 4),)

    @property
    def reference_norm(self) -> float:
        return self.l2

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=2.0, norm=self.l2, cap=self.linf, dimension=dimension),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        return tape.clip_entrywise(self.sensitivity(None), mask)
