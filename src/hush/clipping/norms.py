"""Clipping of whole gradients in an l_p norm, entry by entry, or by importance; bounded counts."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.errors import Unsupported
from hush.core.parts import ClippedSum, Clipping, CoordinateMask, Proof, SensitivitySet, Tape
from hush.core.value import count, number

if TYPE_CHECKING:
    import torch

NORM = number(
    at_least=1e-12,
    at_most=1e12,
    why="with no bound on a record's influence no noise level gives privacy, and beyond these limits "
    "single precision loses the norm",
    example=1.0,
)
_NEGLIGIBLE = 1e-6
"""Relative norm below which `Importance` drops a gradient, which it would draw as rarely as that."""


def clip_whole(tape: Tape, order: float, norm: float) -> ClippedSum:
    """Sum of the per-sample gradients, each scaled to an l_order norm of at most `norm`."""
    import torch

    norms = tape.norms(order)
    usual = norms.is_cpu and norms.numel() > 0 and float(norms.max()) <= _far(norm)  # false for NaN
    total = tape.weighted_sum(clipping_weights(norm, norms, tapered=not usual))
    skipped = torch.zeros((), dtype=torch.int64) if usual else (norms < math.inf).logical_not().sum()
    return ClippedSum(total=total, skipped=skipped)


def clipping_weights(norm: float, norms: "torch.Tensor", *, tapered: bool = True) -> "torch.Tensor":
    """Clipping weights min(1, norm / norms) of per-sample gradients, tapered; 0 if not finite."""
    weights = (norms.reciprocal() * norm).clamp(max=1.0)
    # a norm that is not below infinity may be NaN
    return (weights * taper(norm, norms)).where(norms < math.inf, 0.0) if tapered else weights


def taper(norm: float, norms: "torch.Tensor") -> "torch.Tensor":
    """Factor from 1 to 0 of weights norm / norms: 0 if they are too small for single precision.

    Rounding changes such a weight by up to half of itself, and the gradient would exceed the bound. The
    factor is continuous: the last bit of a norm may depend on the other records of the batch, and must
    not decide whether a record is dropped.
    """
    return (2 - norms / _far(norm)).clamp(min=0.0, max=1.0)


def _far(norm: float) -> float:
    """Norm from which a weight is tapered."""
    return min(2.0**100, norm * 2.0**101)


class Ball:
    """Mixin for a `Clipping`: one l_p ball of radius `norm` as the sensitivity set."""

    order: ClassVar[float]
    norm: float

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=self.order, norm=self.norm, dimension=dimension),)


@dataclass(frozen=True, kw_only=True)
class L2(Ball, Clipping):
    """l2 clipping: each per-sample gradient is scaled down to Euclidean norm `norm` at most.

    Args:
        norm: Clipping norm; also positional.
    """

    order: ClassVar[float] = 2.0
    norm: float = field(kw_only=False, metadata=NORM)
    draws: ClassVar[bool] = False

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            return super().clip(tape, mask)
        return clip_whole(tape, 2.0, self.norm)


@dataclass(frozen=True, kw_only=True)
class Importance(Ball, Clipping):
    """Importance sampling by gradient norm (DPIS, Wei et al. 2022), as a clipping rule.

    A record adds its gradient scaled *to* the norm `norm`, or zero. A gradient of Euclidean norm r is
    added with probability min(r / norm, 1), so the expected sum is that of `L2`, with more variance.
    Under a Poisson rate q a record takes part with probability q min(r / norm, 1) and is weighted by the
    inverse. It is charged as `L2` is: docs/guarantees/baselines.md.

    Args:
        norm: Clipping norm; also positional.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "FullBatch"), noises=("Gaussian",), note="baselines.md"),
    )

    order: ClassVar[float] = 2.0
    norm: float = field(kw_only=False, metadata=NORM)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Importance draws whole records, and sampling of their coordinates is not proved. "
                "Sample with Poisson or FullBatch."
            )
        import torch

        norms = tape.norms(2.0)
        finite = norms.isfinite()
        # from torch's own source, which the private step has seeded; the charge holds for any coin
        drawn = torch.rand_like(norms) * self.norm < norms
        # scaling up a negligible gradient would scale up the rounding of its norm
        drawn &= finite & (norms > _NEGLIGIBLE * self.norm)
        weights = (self.norm / norms * taper(self.norm, norms)).where(drawn, 0.0)
        return ClippedSum(total=tape.weighted_sum(weights), skipped=(~finite).sum())


@dataclass(frozen=True, kw_only=True)
class Lp(Ball, Clipping):
    """l_p clipping: each per-sample gradient is scaled down to l_p norm `norm` at most.

    Args:
        p: Order of the norm.
        norm: Clipping norm.
    """

    draws: ClassVar[bool] = False

    p: float = field(
        metadata=number(
            at_least=1, why="below 1 it is not a norm, and for infinity there is Linf", example=1.5
        )
    )
    norm: float = field(metadata=NORM)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=self.p, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Lp clipping scales whole records, and sampling of their coordinates is not proved. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        return clip_whole(tape, self.p, self.norm)


@dataclass(frozen=True, kw_only=True)
class Linf(Ball, Clipping):
    """l-infinity clipping: each entry of a per-sample gradient is clamped to [-norm, norm].

    Args:
        norm: Clipping norm; also positional.
    """

    order: ClassVar[float] = math.inf
    norm: float = field(kw_only=False, metadata=NORM)


@dataclass(frozen=True, kw_only=True)
class L2Linf(Clipping):
    """Each per-sample gradient is scaled down to Euclidean norm `l2`, then clamped entry by entry.

    Args:
        l2: Euclidean norm, at most.
        linf: Bound on each entry.
    """

    l2: float = field(metadata=NORM)
    linf: float = field(metadata=NORM)

    @property
    def reference_norm(self) -> float:
        return self.l2

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=2.0, norm=self.l2, cap=self.linf, dimension=dimension),)


@dataclass(frozen=True, kw_only=True)
class Entries(Clipping):
    """Sensitivity of counts and scores: one record changes `changed` entries, each by at most `norm`.

    Adding a vote changes one count by 1; replacing one changes two. The caller guarantees the bound:
    there is no gradient to clip.

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

    changed: int = field(metadata=count("each entry that one record changes is hidden on its own"))
    norm: float = field(default=1.0, metadata=NORM)

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=math.inf, norm=self.norm, dimension=self.changed),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        raise Unsupported(
            "Entries bounds counts and scores; a record's gradient may change every entry, and dropping "
            "all but a few would not bound its influence on the choice. Train with L2 or Lp."
        )
