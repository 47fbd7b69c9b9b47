"""Clipping rules in l_p norms, entry-wise clipping, importance sampling, and bounds for counts."""

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
    why="no noise gives privacy unless each record's influence is bounded, and beyond these limits "
    "the norm is not exact in single precision",
    example=1.0,
)
_STABILITY = number(
    at_least=1e-6,
    at_most=1e6,
    why="a smaller value amplifies gradients that are rounding error, and a larger value shrinks all "
    "gradients to almost zero",
    example=0.01,
)
_FRACTION = number(
    at_least=0.01, at_most=0.99, why="estimates of extreme quantiles are dominated by noise", example=0.5
)
_SPEED = number(
    at_least=1e-3,
    at_most=2.0,
    why="otherwise the clipping norm hardly adapts or oscillates",
    example=0.2,
)
_SHARE = number(
    at_least=1e-3,
    at_most=0.25,
    why="a smaller count is dominated by noise, and rounding errors are bounded for shares up to 1/4",
    example=0.05,
)
_LOWEST = 1e-6
"""Smallest clipping norm of `Quantile`, relative to the initial one."""
_RAMP = 0.25
"""Relative distance from the clipping norm within which `Quantile` counts a record fractionally."""
_NEGLIGIBLE = 1e-6
"""Relative norm below which `Importance` always drops a gradient."""


def clip_whole(tape: Tape, order: float, norm: float, stability: float | None = None) -> ClippedSum:
    """Sum of the per-sample gradients, each scaled to an l_order norm of at most `norm`.

    With `stability`, a gradient of norm r is scaled to norm * r / (r + stability) instead.
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
    """Factor from 1 to 0 on weights norm / norms that are too small for single precision.

    Such a weight can have a relative rounding error of 1/2, so the scaled gradient would exceed the
    bound. The factor is continuous, because the last bit of a norm may depend on the other records of
    the batch and must not decide whether a record is dropped.
    """
    return (2 - norms / _far(norm)).clamp(min=0.0, max=1.0)


def _far(norm: float) -> float:
    """Norm above which weights are tapered."""
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
    """l2 clipping: each per-sample gradient is scaled down to a Euclidean norm of at most `norm`.

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

    The update depends only on the product of `norm` and the learning rate, so the clipping norm needs no
    tuning. The privacy cost is the same as for `L2`. Reference: Bu, Wang, Zha and Karypis, Automatic
    Clipping: Differentially Private Deep Learning Made Easier and Stronger, NeurIPS 2023 (AUTO-S).

    Args:
        norm: Upper bound on the norm of a scaled gradient; also positional.
        stability: Norm of a gradient that is scaled to half of `norm`.
    """

    order: ClassVar[float] = 2.0
    norm: float = field(default=1.0, kw_only=False, metadata=NORM)
    stability: float = field(default=0.01, metadata=_STABILITY)
    draws: ClassVar[bool] = False

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Normalized scales whole gradients, and coordinate sampling is not proved for it. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        return clip_whole(tape, 2.0, self.norm, self.stability)


@dataclass(frozen=True, kw_only=True)
class Quantile(Ball, Clipping):
    """Adaptive l2 clipping: the clipping norm tracks a privately estimated quantile of gradient norms.

    A step also releases a noisy count of the gradients with a norm below its clipping norm C. The next
    norm is C exp(-learning_rate (fraction below C - quantile)). The count is an additional coordinate of
    each record's vector, whose Euclidean norm is at most `norm`. The privacy cost of a step is therefore
    that of `L2(norm)` with the same noise multiplier. Reference: Andrew, Thakkar, McMahan and Ramaswamy,
    Differentially Private Learning with Adaptive Clipping, NeurIPS 2021.

    Args:
        norm: Clipping norm of the first step; also positional. Later norms are between 1e-6 and 1e6
            times this one.
        quantile: Target fraction of the gradients that are not clipped.
        learning_rate: Step size of the logarithm of the clipping norm.
        share: Norm of the count in a record's vector, relative to `norm`. It increases the noise on the
            gradient by the factor 1 / sqrt(1 - share^2). The standard deviation of the count is
            multiplier / (2 share) records.
    """

    order: ClassVar[float] = 2.0
    norm: float = field(default=1.0, kw_only=False, metadata=NORM)
    quantile: float = field(default=0.5, metadata=_FRACTION)
    learning_rate: float = field(default=0.2, metadata=_SPEED)
    share: float = field(default=0.05, metadata=_SHARE)
    draws: ClassVar[bool] = False

    @property
    def gradient_norm(self) -> float:
        """Norm bound of the gradient in a record's vector, which also contains the count."""
        return self.norm * math.sqrt(1 - self.share**2)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        size = None if dimension is None else dimension + 1
        return (SensitivitySet(p=2.0, norm=self.norm, dimension=size),)

    def clip(
        self, tape: Tape, mask: CoordinateMask | None = None, current: "torch.Tensor | None" = None
    ) -> ClippedSum:
        """Sum of the records' vectors: the gradient, clipped to the current norm and divided by it, and
        the count.

        Args:
            tape: Per-sample gradients of a batch.
            mask: Must be None.
            current: Current clipping norm; by default the initial one.
        """
        if mask is not None:
            raise Unsupported(
                "Quantile scales whole gradients, and coordinate sampling is not proved for it. "
                "Sample coordinates with L2, Linf, L2Linf, Box or Subspaces."
            )
        import torch

        scale = 1.0 if current is None else self.norm / current
        norms = tape.norms(2.0) * scale
        finite = norms < math.inf  # false for NaN
        weights = clipping_weights(self.norm, norms) * (scale * (self.gradient_norm / self.norm))
        # continuous like `taper`, because the last bit of a norm may depend on other records
        below = ((1 - norms / self.norm) / _RAMP).clamp(-1.0, 1.0).where(finite, -1.0)
        if tape.present is not None:
            below = below * tape.present
        count = below.sum(dtype=torch.float64).reshape(1) * (self.share * self.norm)
        total = {**tape.weighted_sum(weights), "count": count}
        return ClippedSum(total=total, skipped=finite.logical_not().sum())

    def update_of(
        self, mean: "torch.Tensor", current: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Noisy mean gradient and next clipping norm (post-processing).

        Args:
            mean: Noisy mean of the records' vectors.
            current: Clipping norm of the current step.
        """
        below = (0.5 + mean[-1] / (2 * self.share * self.norm)).clamp(0.0, 1.0)
        moved = current * (-self.learning_rate * (below - self.quantile)).exp()
        bounded = moved.clamp(self.norm * _LOWEST, self.norm / _LOWEST)
        return mean[:-1] * (current / self.gradient_norm), bounded


@dataclass(frozen=True, kw_only=True)
class Importance(Ball, Clipping):
    """Importance sampling by gradient norm (DPIS, Wei et al. 2022), as a clipping rule.

    A gradient of Euclidean norm r is scaled to `norm` and kept with probability min(r / norm, 1). The
    expected sum is the same as for `L2`, and the variance is larger. Under Poisson sampling at rate q, a
    record contributes with probability q min(r / norm, 1). The privacy cost is the same as for `L2`:
    docs/guarantees/baselines.md.

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
                "Importance draws whole records, and coordinate sampling is not proved for it. "
                "Sample with Poisson or FullBatch."
            )
        import torch

        norms = tape.norms(2.0)
        finite = norms.isfinite()
        # the private step seeds torch's generator; the guarantee does not depend on these draws
        drawn = torch.rand_like(norms) * self.norm < norms
        # scaling up a negligible gradient would amplify the rounding error of its norm
        drawn &= finite & (norms > _NEGLIGIBLE * self.norm)
        weights = (self.norm / norms * taper(self.norm, norms)).where(drawn, 0.0)
        return ClippedSum(total=tape.weighted_sum(weights), skipped=(~finite).sum())


@dataclass(frozen=True, kw_only=True)
class Lp(Ball, Clipping):
    """l_p clipping: each per-sample gradient is scaled down to an l_p norm of at most `norm`.

    Args:
        p: Order of the norm.
        norm: Clipping norm.
    """

    draws: ClassVar[bool] = False

    p: float = field(
        metadata=number(
            at_least=1, why="it is not a norm for p below 1; use Linf for infinity", example=1.5
        )
    )
    norm: float = field(metadata=NORM)

    def sensitivity(self, dimension: int | None) -> tuple[SensitivitySet, ...]:
        return (SensitivitySet(p=self.p, norm=self.norm, dimension=dimension),)

    def clip(self, tape: Tape, mask: CoordinateMask | None = None) -> ClippedSum:
        if mask is not None:
            raise Unsupported(
                "Lp clipping scales whole gradients, and coordinate sampling is not proved for it. "
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
    """Scales each per-sample gradient down to a Euclidean norm of at most `l2`, then clamps each entry.

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

    Adding a vote changes one count by 1; replacing a vote changes two counts. There is no gradient to
    clip, so the caller guarantees the bound.

    Args:
        changed: Maximum number of entries that one record changes.
        norm: Largest change of an entry.
    """

    # Poisson is excluded: a single draw includes or excludes all entries of a record
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
