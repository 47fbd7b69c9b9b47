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
    why="without a bound on a record's influence no noise gives privacy, and beyond these limits "
    "the norm is not exact in single precision",
    example=1.0,
)
_STABILITY = number(
    at_least=1e-6,
    at_most=1e6,
    why="a gradient much shorter than it keeps its direction and loses its length, and near zero the "
    "direction is rounding error",
    example=0.01,
)
_FRACTION = number(at_least=0.01, at_most=0.99, why="beyond it the estimate is noise alone", example=0.5)
_SPEED = number(at_least=1e-3, at_most=2.0, why="the clipping norm would not move, or jump", example=0.2)
_SHARE = number(
    at_least=1e-3,
    at_most=0.25,
    why="a smaller count is noise alone, and rounding is bounded for shares up to 1/4",
    example=0.05,
)
_LOWEST = 1e-6
"""Smallest clipping norm of `Quantile`, in units of the first."""
_RAMP = 0.25
"""Relative distance from the clipping norm within which `Quantile` counts a record in proportion."""
_NEGLIGIBLE = 1e-6
"""Relative norm below which `Importance` drops a gradient, instead of drawing it with this chance."""


def clip_whole(tape: Tape, order: float, norm: float, stability: float | None = None) -> ClippedSum:
    """Sum of the per-sample gradients, each scaled to an l_order norm of at most `norm`.

    With `stability` also short gradients are scaled, to norm * length / (length + stability).
    """
    import torch

    norms = tape.norms(order)
    usual = norms.is_cpu and norms.numel() > 0 and float(norms.max()) <= _far(norm)  # false for NaN
    total = tape.weighted_sum(clipping_weights(norm, norms, stability, tapered=not usual))
    skipped = torch.zeros((), dtype=torch.int64) if usual else (norms < math.inf).logical_not().sum()
    return ClippedSum(total=total, skipped=skipped)


def clipping_weights(
    norm: float, norms: "torch.Tensor", stability: float | None = None, *, tapered: bool = True
) -> "torch.Tensor":
    """Clipping weights min(1, norm / norms), or norm / (norms + stability); 0 if not finite."""
    if stability is None:
        weights = (norms.reciprocal() * norm).clamp(max=1.0)
    else:
        weights = (norms + stability).reciprocal() * norm
    # norms < inf is also false for NaN
    return (weights * taper(norm, norms)).where(norms < math.inf, 0.0) if tapered else weights


def taper(norm: float, norms: "torch.Tensor") -> "torch.Tensor":
    """Factor on the weights norm / norms, from 1 to 0 for weights too small for single precision.

    The relative rounding error of such a weight can be 1/2, and the gradient would exceed the bound. The
    factor is continuous: the last bit of a norm may depend on the other records of the batch and must
    not decide whether a record is dropped.
    """
    return (2 - norms / _far(norm)).clamp(min=0.0, max=1.0)


def _far(norm: float) -> float:
    """Smallest norm with a tapered weight."""
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
class Normalized(Ball, Clipping):
    """Automatic clipping: each per-sample gradient g is scaled to norm * g / (|g| + stability).

    The norm has no scale of its own: `norm` and the learning rate only matter as a product, so the
    clipping norm needs no tuning. Charged like `L2`. Reference: Bu, Wang, Zha and Karypis, Automatic
    Clipping: Differentially Private Deep Learning Made Easier and Stronger, NeurIPS 2023 (AUTO-S).

    Args:
        norm: Upper bound on the norm of a scaled gradient; also positional.
        stability: Length that a gradient needs to be scaled to half of `norm`.
    """

    order: ClassVar[float] = 2.0
    norm: float = field(default=1.0, kw_only=False, metadata=NORM)
    stability: float = field(default=0.01, metadata=_STABILITY)
    draws: ClassVar[bool] = False

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Normalized scales whole records, and sampling of their coordinates is not proved. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        return clip_whole(tape, 2.0, self.norm, self.stability)


@dataclass(frozen=True, kw_only=True)
class Quantile(Ball, Clipping):
    """l2 clipping at a quantile of the gradient norms, which every step estimates privately.

    A step also releases a noisy count of the records below its clipping norm C. The next norm is
    C exp(-learning_rate (fraction below C - quantile)). The vector of a record has one more
    coordinate, for the count, and a Euclidean norm of at most `norm`, so a step is charged like
    `L2(norm)` with the same noise multiplier. Reference: Andrew, Thakkar, McMahan and Ramaswamy,
    Differentially Private Learning with Adaptive Clipping, NeurIPS 2021.

    Args:
        norm: Clipping norm of the first step; also positional. Later norms are between 1e-6 and 1e6
            times this one.
        quantile: Fraction of the records that are not clipped.
        learning_rate: Step size of the logarithm of the clipping norm.
        share: Share of the count in a record's vector. The noise on the gradient increases by the
            factor 1 / sqrt(1 - share^2), and the standard deviation of the count is multiplier / (2
            share) records.
    """

    order: ClassVar[float] = 2.0
    norm: float = field(default=1.0, kw_only=False, metadata=NORM)
    quantile: float = field(default=0.5, metadata=_FRACTION)
    learning_rate: float = field(default=0.2, metadata=_SPEED)
    share: float = field(default=0.05, metadata=_SHARE)
    draws: ClassVar[bool] = False

    @property
    def gradient_norm(self) -> float:
        """Norm bound of the gradient in a record's vector, without the count."""
        return self.norm * math.sqrt(1 - self.share**2)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        size = None if dimension is None else dimension + 1
        return (SensitivitySet(p=2.0, norm=self.norm, dimension=size),)

    def clip(
        self, tape: Tape, mask: CoordinateMask | None = None, current: "torch.Tensor | None" = None
    ) -> ClippedSum:
        """Sum of the records' vectors: gradients clipped to the current norm, in units of it, and signs.

        Args:
            tape: Per-sample gradients of a batch.
            mask: Must be None.
            current: Current clipping norm; by default the first one.
        """
        if mask is not None:
            raise Unsupported(
                "Quantile scales whole records, and sampling of their coordinates is not proved. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        import torch

        scale = 1.0 if current is None else self.norm / current
        norms = tape.norms(2.0) * scale
        finite = norms < math.inf  # false for NaN
        weights = clipping_weights(self.norm, norms) * (scale * (self.gradient_norm / self.norm))
        # continuous, like the taper: the last bit of a norm may depend on other records
        below = ((1 - norms / self.norm) / _RAMP).clamp(-1.0, 1.0).where(finite, -1.0)
        if tape.present is not None:
            below = below * tape.present
        count = below.sum(dtype=torch.float64).reshape(1) * (self.share * self.norm)
        total = {**tape.weighted_sum(weights), "count": count}
        return ClippedSum(total=total, skipped=finite.logical_not().sum())

    def update_of(
        self, mean: "torch.Tensor", current: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Noisy mean gradient and next clipping norm, by post-processing.

        Args:
            mean: Noisy mean of the records' vectors.
            current: Clipping norm of the step.
        """
        below = (0.5 + mean[-1] / (2 * self.share * self.norm)).clamp(0.0, 1.0)
        moved = current * (-self.learning_rate * (below - self.quantile)).exp()
        bounded = moved.clamp(self.norm * _LOWEST, self.norm / _LOWEST)
        return mean[:-1] * (current / self.gradient_norm), bounded


@dataclass(frozen=True, kw_only=True)
class Importance(Ball, Clipping):
    """Importance sampling by gradient norm (DPIS, Wei et al. 2022), as a clipping rule.

    A gradient of Euclidean norm r is scaled to `norm` and added with probability min(r / norm, 1),
    otherwise dropped. The expected sum is the same as for `L2`, with more variance. Under Poisson
    sampling at rate q, a record takes part with probability q min(r / norm, 1). The privacy cost is the
    same as for `L2`: docs/guarantees/baselines.md.

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
        # torch's generator is seeded by the private step; the guarantee holds for any coin
        drawn = torch.rand_like(norms) * self.norm < norms
        # scaling up a negligible gradient would scale up the rounding error of its norm
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
        l2: Euclidean clipping norm.
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

    # not Poisson: one draw decides the participation of a record for all of its entries
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("FullBatch",),
            noises=("Gaussian", "Laplace", "GeneralizedGaussian"),
            note="argmax.md",
        ),
    )

    changed: int = field(metadata=count("it is the number of entries that one record changes"))
    norm: float = field(default=1.0, metadata=NORM)

    @property
    def reference_norm(self) -> float:
        return self.norm

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=math.inf, norm=self.norm, dimension=self.changed),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        raise Unsupported(
            "Entries bounds counts and scores, not gradients: a gradient may change every entry. "
            "Train with L2 or Lp."
        )
