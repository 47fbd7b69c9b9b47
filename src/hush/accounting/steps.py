"""Steps that the accountants compose, with their RDP and dominating pairs."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Self

import numpy as np

from hush.accounting.numerics import OUTWARD, Array, log_expm1
from hush.accounting.pld.allocation import MAX_MULTIPLIER, MIN_MULTIPLIER, AllocationLaw
from hush.accounting.pld.coordinate_allocation import (
    CoordinateAllocationLaw,
    dominated_allocation,
    dominating_allocation,
)
from hush.accounting.pld.jump_diffusion import JumpDiffusionLaw, dominating_jump_diffusion
from hush.accounting.pld.laws import GaussianLaw, GeneralizedGaussianLaw
from hush.accounting.pld.limited_batches import (
    MIN_COMPETING_MULTIPLIER,
    CompetingPair,
    MixedLaw,
    TwoSidedLaw,
)
from hush.accounting.pld.privacy_loss import GroupLaw, SampledPair, Step
from hush.accounting.rdp import allocation
from hush.accounting.rdp.coordinatewise import coordinatewise_rdp
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.rdp.profile import CoordinateRDP
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet

# Up to this exponent, the measured rounding error of a loss is at most 32 units, which `compose` covers.
MAX_BETA = 12.0
_MAX_RDP_LOSS = 1e100

# Noise relative to the largest of an `AllocationLaw`, above which RDP is tighter than that law.
_FAR = 5.0

Basis = Literal["proved", "published"]


class ComposableStep(ABC):
    """One step of a composition. A step without a dominating pair is composed by RDP."""

    @property
    def charged_for_groups(self) -> bool:
        """Whether k records change the query by at most k times the sensitivity to one record."""
        return True

    @property
    def participation(self) -> float:
        """Upper bound on the probability that a record takes part in the step."""
        return 1.0

    @abstractmethod
    def rdp(self, orders: Array) -> Array:
        """Upper bounds on the Rényi divergence at each order, in both directions."""

    @property
    def unsampled(self) -> "ComposableStep":
        """The step at sampling rate 1 if its RDP is known at more orders, otherwise the step itself."""
        return self

    @property
    def needs_whole_orders(self) -> bool:
        """Whether `rdp` may require integer orders."""
        return False

    @property
    def dominated_step(self) -> "PairedStep | CompetingPair | AllocationLaw | None":
        """A step with a dominating pair that this step dominates, if known."""
        return None

    @property
    def dominated_step_of_one(self) -> Step | None:
        """A step that this step dominates for a change of one slot; tighter than `dominated_step`."""
        return self.dominated_step

    @property
    def dominated_step_of_replaced(self) -> Step | None:
        """A step that this step dominates for a replaced record, if the records compete for places."""
        return None

    @property
    def dominated_composition(self) -> tuple[tuple["PairedStep", int], ...]:
        """Steps whose composition this step dominates, if `dominated_step` is None."""
        return ()

    @property
    def dominating_step(self) -> "PairedStep | None":
        """A step with a dominating pair that dominates this step, if known."""
        return None

    @property
    def dominating_step_of_one(
        self,
    ) -> "PairedStep | JumpDiffusionLaw | CoordinateAllocationLaw | MixedLaw | AllocationLaw | None":
        """A step that dominates this step for a change of one slot; tighter than `dominating_step`."""
        return self.dominating_step

    @property
    def dominating_step_of_replaced(self) -> Step | None:
        """A step that dominates this step for a replaced record, if the records compete for places."""
        return None

    def divided(self, shift: float) -> "ComposableStep | None":
        """The step with its noise divided by `shift`, if defined."""
        return None

    def delta_upper(self, epsilon: float) -> float:
        """Upper bound on delta of this step alone, from a method other than RDP; 1 if unknown."""
        return 1.0

    @property
    def nontermination(self) -> float:
        """Upper bound on the probability that the step ends without an output."""
        return 0.0

    @property
    def basis(self) -> Basis:
        """Whether `rdp` is proved, or published in a paper without a valid proof."""
        return "proved"


@dataclass(frozen=True)
class Composition:
    """Several steps with independent randomness, which are all released."""

    components: tuple[tuple[ComposableStep, int], ...]
    charged_for_groups: bool = True


Mechanism = ComposableStep | Composition
"""Mechanism of one step of a plan."""
NormalBlocks = tuple[tuple[SensitivitySet, float], ...]
"""Sensitivity set and standard deviation of the noise of each block of coordinates."""


class PairedStep(SampledPair, ComposableStep):
    """Poisson-subsampled noise on one number, which has an exact dominating pair."""

    @property
    def participation(self) -> float:
        return self.rate

    @property
    def unsampled(self) -> Self:
        return replace(self, rate=1.0)

    @property
    def dominated_step(self) -> Self:
        return self

    dominating_step = dominated_step

    def divided(self, shift: float) -> Self:
        return self.with_scale(self.noise.scale / shift)

    def with_representable_loss(self) -> Self:
        return self.with_scale(max(self.noise.scale, self.noise.min_scale))


@dataclass(frozen=True, order=True)
class SampledGaussian(PairedStep):
    """Poisson-subsampled Gaussian mechanism; `multiplier` is in units of the l2 sensitivity."""

    multiplier: float

    @property
    def noise(self) -> GaussianLaw:
        return GaussianLaw(self.multiplier)

    def with_scale(self, scale: float) -> Self:
        return replace(self, multiplier=scale)

    def rdp(self, orders: Array) -> Array:
        return renyi_divergence(self, orders)


@dataclass(frozen=True, order=True)
class SampledNoise(PairedStep):
    """Poisson-subsampled noise on one number, of density proportional to exp(-|x / scale|^beta).

    `scale` is in units of the number's sensitivity; `beta` 1 is Laplace noise.

    **Guarantee.** Valid for one number, and for a vector if a record changes one entry. Laplace noise is
    also valid for other vectors, with `scale` in units of the l1 norm. Proof:
    docs/guarantees/scalar-noise.md.
    """

    beta: float
    scale: float

    def __post_init__(self) -> None:
        if not 1 <= self.beta <= MAX_BETA:
            raise InvalidValue(
                f"beta={self.beta!r} must be between 1 and {MAX_BETA:g}: below 1 the largest change is "
                "not the worst case, and above the limit rounding errors of losses are not bounded. "
                "Pass e.g. beta=1.5.",
                key="beta",
            )

    @property
    def noise(self) -> GeneralizedGaussianLaw:
        return GeneralizedGaussianLaw(self.beta, self.scale)

    @property
    def needs_whole_orders(self) -> bool:
        return self.rate < 1

    def with_scale(self, scale: float) -> Self:
        return replace(self, scale=scale)

    def rdp(self, orders: Array) -> Array:
        ball = SensitivitySet(p=1.0, norm=1.0, dimension=1)
        return CoordinateWise(self.rate, ((CoordinateRDP(self.beta, self.scale), ball),)).rdp(orders)


@dataclass(frozen=True)
class CompetingGaussian(ComposableStep):
    """Gaussian mechanism on a batch of limited size, in which a record may displace another record.

    With probability `competing` the batch is full, and an additional record displaces another record.
    Otherwise the step is `sampled`.

    **Guarantee.** For neighbours with the same number of slots: docs/guarantees/limited-batches.md.
    """

    sampled: SampledGaussian
    """Poisson-sampled step, for a batch that is not full."""
    competing: float
    """Upper bound on the probability that the batch is full without the record."""
    full_rate: float
    """Upper bound on the probability that the record is in a full batch."""
    lowest_rate: float
    """Lower bound on the probability that the record is in a batch."""
    always_full: bool = False
    """Whether all batches are full, and have the record with probability `full_rate`."""

    @property
    def participation(self) -> float:
        return max(self.sampled.rate, self.full_rate)

    @property
    def _full(self) -> SampledGaussian:
        """Step of a record in a full batch, without the record that it displaces."""
        return replace(self.sampled, rate=self.full_rate)

    @property
    def _two_changes(self) -> SampledGaussian:
        """Step with two changes at once. One of its directions bounds a full batch."""
        return SampledGaussian(self.full_rate, self.sampled.multiplier / 2)

    @property
    def dominated_step(self) -> SampledGaussian | CompetingPair:
        """Step for data in which the other gradients are opposite (if all batches are full) or zero."""
        if self.always_full and self.sampled.multiplier >= MIN_COMPETING_MULTIPLIER:
            return CompetingPair(self._full)
        return replace(self.sampled, rate=self.lowest_rate)

    @property
    def dominated_step_of_replaced(self) -> SampledGaussian | GroupLaw:
        if self.always_full:
            return self._two_changes
        return GroupLaw(self.sampled.noise, self.lowest_rate, 1, True)

    @property
    def dominating_step_of_one(self) -> MixedLaw:
        return MixedLaw(self.sampled, TwoSidedLaw(CompetingPair(self._full), self._full), self.competing)

    @property
    def dominating_step_of_replaced(self) -> MixedLaw:
        free = GroupLaw(self.sampled.noise, self.sampled.rate, 1, True)
        return MixedLaw(free, TwoSidedLaw(self._two_changes, self._two_changes), self.competing)

    def rdp(self, orders: Array) -> Array:
        # moments minus 1; for a full batch, one direction bounds the moment of each sign of the loss
        full = math.log(2) + log_expm1((orders - 1) * self._two_changes.rdp(orders))
        free = log_expm1((orders - 1) * self.sampled.rdp(orders))
        parts = (free, 1 - self.competing), (full, self.competing)
        excess = [math.log(share) + moment for moment, share in parts if share > 0]
        return np.asarray(OUTWARD * np.logaddexp(0.0, np.logaddexp.reduce(excess)) / (orders - 1))


@dataclass(frozen=True)
class AllocatedGaussian(ComposableStep):
    """An epoch of Gaussian mechanisms; each record takes part in one of its steps, drawn uniformly.

    **Guarantee.** docs/guarantees/random-allocation.md.
    """

    steps: int
    """Number of steps of the epoch."""
    multiplier: float

    @property
    def dominated_step(self) -> AllocationLaw | None:
        if self.multiplier > MAX_MULTIPLIER:
            return None
        # more noise is sound for a lower bound
        return AllocationLaw(self.steps, max(self.multiplier, MIN_MULTIPLIER), pessimistic=False)

    @property
    def dominating_step_of_one(self) -> SampledGaussian | AllocationLaw | None:
        if self.multiplier > _FAR * MAX_MULTIPLIER:
            return None
        if self.multiplier < MIN_MULTIPLIER:
            # one step with the record dominates the epoch
            return SampledGaussian(1.0, self.multiplier)
        # less noise is sound for an upper bound
        return AllocationLaw(self.steps, min(self.multiplier, MAX_MULTIPLIER), pessimistic=True)

    def rdp(self, orders: Array) -> Array:
        return allocation.renyi_divergence(self.steps, self.multiplier, orders)


@dataclass(frozen=True)
class TruncatedGaussian(ComposableStep):
    """Gaussian noise conditioned on a fixed interval; `multiplier` is in units of the l2 sensitivity.

    `variance` is the largest variance of the noise, relative to the unconditioned Gaussian.

    **Guarantee.** docs/guarantees/bounded.md, section 6 for `rdp` and section 4 for the dominating step.
    """

    multiplier: float
    variance: float

    def rdp(self, orders: Array) -> Array:
        return orders * (self.variance / self.multiplier / self.multiplier / 2 * OUTWARD)

    @property
    def dominating_step(self) -> SampledGaussian:
        return SampledGaussian(1.0, self.multiplier)

    def divided(self, shift: float) -> "TruncatedGaussian":
        return replace(self, multiplier=self.multiplier / shift)


@dataclass(frozen=True)
class CoordinateWise(ComposableStep):
    """Poisson-subsampled noise on each coordinate of a sum, with coordinate sampling at one rate."""

    rate: float
    blocks: tuple[tuple[CoordinateRDP, SensitivitySet], ...]

    needs_whole_orders = True

    @classmethod
    def normal(cls, rate: float, blocks: NormalBlocks, coordinate_rate: float = 1.0) -> Self:
        """Step with normal noise on each block."""
        scales = ((math.sqrt(2) * float(deviation), ball) for ball, deviation in blocks)
        return cls(rate, tuple((CoordinateRDP(2.0, s, coordinate_rate), ball) for s, ball in scales))

    @property
    def coordinate_rate(self) -> float:
        """Probability that a coordinate of a sampled record takes part."""
        return self.blocks[0][0].rate

    @property
    def participation(self) -> float:
        return self.rate

    def divided(self, shift: float) -> "CoordinateWise":
        divided = ((replace(noise, scale=noise.scale / shift), ball) for noise, ball in self.blocks)
        return replace(self, blocks=tuple(divided))

    @property
    def unsampled(self) -> "CoordinateWise":
        whole = ((replace(noise, rate=1.0), ball) for noise, ball in self.blocks)
        return CoordinateWise(1.0, tuple(whole))

    @property
    def dominated_step(self) -> "PairedStep | None":
        """Step for one particular change of a record, if its dominating pair is known."""
        noise, ball = max(self.blocks, key=lambda block: block[1].max_entry / block[0].scale)
        if not ball.max_entry or noise.beta > MAX_BETA:
            return None
        if noise.beta != 2:
            return SampledNoise(self.rate, noise.beta, noise.scale / ball.max_entry)
        return SampledGaussian(*dominated_gaussian(self._normal, self.rate, self.coordinate_rate))

    @property
    def dominated_step_of_one(self) -> Step | None:
        """The step for one possible change of a record, of one coordinate or two."""
        step = self.dominated_step
        if isinstance(step, SampledGaussian) and self.coordinate_rate < 1 and len(self.blocks) == 1:
            ((ball, scale),) = self._normal
            two = ball.p in (2.0, math.inf) and dominated_allocation(
                self.rate, self.coordinate_rate, ball.max_entry / scale, ball.l2_radius / scale
            )
            one = _chi_square((step.rate, step.multiplier))
            if two and two.sampled_log_chi_square > one:
                return two
        return step

    @property
    def dominating_step(self) -> SampledGaussian | None:
        """Step without coordinate sampling, if it is a subsampled Gaussian.

        Proof: docs/guarantees/twice-sampling.md, step 3.
        """
        if any(noise.beta != 2 for noise, _ in self.blocks):
            return None
        return ellipsoid(self.rate, self._normal)

    @property
    def dominating_step_of_one(
        self,
    ) -> SampledGaussian | JumpDiffusionLaw | CoordinateAllocationLaw | None:
        """Step with the smallest chi-square: without coordinate sampling, or one of two bounds with it.

        Proof: docs/guarantees/twice-sampling-pld.md.
        """
        whole = self.dominating_step
        if whole is None or self.coordinate_rate == 1:
            return whole
        blocks = [(ball.max_entry / scale, ball.l2_radius / scale) for ball, scale in self._normal]
        best: SampledGaussian | JumpDiffusionLaw | CoordinateAllocationLaw = whole
        least = whole.multiplier**-2
        diffusion = dominating_jump_diffusion(self.rate, self.coordinate_rate, blocks)
        if diffusion is not None and diffusion.log_chi_square < least:
            best, least = diffusion, diffusion.log_chi_square
        if len(blocks) == 1:
            allocation = dominating_allocation(self.rate, self.coordinate_rate, *blocks[0])
            if allocation is not None and allocation.log_chi_square < least:
                best = allocation
        return best

    @property
    def _normal(self) -> NormalBlocks:
        return tuple((ball, noise.scale / math.sqrt(2)) for noise, ball in self.blocks)

    def rdp(self, orders: Array) -> Array:
        for noise, ball in self.blocks:
            if ball.dimension is None and ball.p > 2:
                raise InvalidValue(
                    f"noise of exponent beta={noise.beta:g} under l_{ball.p:g} clipping needs the "
                    "dimension: the privacy cost is unbounded in the number of coordinates. "
                    "Pass dimension= (--dimension), the number of parameters, or clip with L2."
                )
        # squares of the losses would overflow
        if any(ball.max_entry > n.scale * _MAX_RDP_LOSS ** (1 / n.beta) for n, ball in self.blocks):
            return np.full(len(orders), np.inf)
        return coordinatewise_rdp(self.blocks, self.rate, orders)


def ellipsoid(rate: float, blocks: NormalBlocks) -> SampledGaussian:
    """Subsampled Gaussian step that is equivalent to Gaussian noise with a scale per block.

    After division by the standard deviations, the noise is isotropic and the change has norm
    sqrt(sum (l2 sensitivity / deviation)^2): docs/guarantees/poisson-gaussian.md, step 1.
    """
    return SampledGaussian(rate, 1 / math.hypot(*(ball.l2_radius / scale for ball, scale in blocks)))


# Quantiles of the number of sampled coordinates; each gives a candidate.
_QUANTILES = (1e-6, 1e-3, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999, 1 - 1e-6)
_INWARD = 1 - 1e-9
# Candidate numbers of changed coordinates, relative to the number at the cap.
_SPREADS = (1.0, 1e2, 1e4, 1e8)
# Limit of SciPy's binomial. Using fewer coordinates is valid for a lower bound.
_MAX_COORDINATES = 1e15


@lru_cache(maxsize=1024)  # called for every point of a curve
def dominated_gaussian(blocks: NormalBlocks, rate: float, coordinate_rate: float) -> tuple[float, float]:
    """Rate and multiplier of a sampled Gaussian step that is dominated by the step, for lower bounds.

    **Guarantee.** A change of m coordinates by c dominates a step with shift c k, sampled with the
    probability that at least k coordinates are sampled: docs/guarantees/twice-sampling.md, step 4. The
    result is the best of several m and k, by chi-square divergence.
    """
    movable = tuple((ball, deviation) for ball, deviation in blocks if ball.max_entry > 0)
    candidates = [(rate * coordinate_rate, deviation / ball.max_entry) for ball, deviation in movable]
    for moved in [*((block,) for block in movable), movable]:
        for spread in _SPREADS:
            candidates += _of_even_change(moved, spread, rate, coordinate_rate)
    return max(candidates, key=_chi_square)


def _of_even_change(
    blocks: NormalBlocks, spread: float, rate: float, coordinate_rate: float
) -> list[tuple[float, float]]:
    """Dominated steps for equal changes of the coordinates in each block, one step per quantile."""
    units, counts = [], []  # squared change of a coordinate in units of the noise, number of coordinates
    for ball, deviation in blocks:
        movable = (ball.norm / ball.max_entry) ** ball.p if ball.p < math.inf else math.inf
        limit = min(movable * spread, ball.dimension or math.inf, _MAX_COORDINATES)
        count, change = max(1, math.floor(limit * OUTWARD)), ball.max_entry
        if count > movable * OUTWARD:
            change = min(ball.max_entry, ball.norm * count ** (-1 / ball.p))
        units.append((change / deviation) ** 2 if deviation > change * 1e-150 else math.inf)
        counts.append(count)
    whole = math.sqrt(sum(unit * count for unit, count in zip(units, counts, strict=True)))
    from scipy.stats import binom  # slow import

    steps = []
    for quantile in _QUANTILES:
        probability, shift = 1.0, 0.0
        for unit, count in zip(units, counts, strict=True):
            k = max(1.0, float(binom.ppf(quantile, count, coordinate_rate)))
            probability *= float(binom.sf(k - 1, count, coordinate_rate)) * _INWARD
            shift += unit * k
        if math.isfinite(shift) and shift > 0:
            steps.append((rate * probability, whole / shift / _INWARD))
    return steps


def _chi_square(step: tuple[float, float]) -> float:
    """Logarithm of the chi-square divergence of a sampled Gaussian step."""
    rate, multiplier = step
    if rate == 0:
        return -math.inf
    power = max(multiplier, 700**-0.5) ** -2  # avoids overflow of the exponential
    return 2 * math.log(rate) + math.log(math.expm1(power)) if power > 0 else -math.inf
