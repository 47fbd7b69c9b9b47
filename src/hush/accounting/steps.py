"""The steps of a composition, with their RDP and the steps that bound them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Self

import numpy as np

from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.pld.jump_diffusion import JumpDiffusionLaw, dominating_jump_diffusion
from hush.accounting.pld.laws import GaussianLaw, GeneralizedGaussianLaw
from hush.accounting.pld.privacy_loss import SampledPair
from hush.accounting.rdp.coordinatewise import coordinatewise_rdp
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.rdp.profile import CoordinateRDP
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet

# Up to this power the rounding of a loss is at most 32 units (measured), which `compose` covers.
MAX_BETA = 12.0
_MAX_RDP_LOSS = 1e100

Basis = Literal["proved", "published"]


class ComposableStep(ABC):
    """One step of a composition; without a dominating pair it is charged by RDP."""

    @property
    def charged_for_groups(self) -> bool:
        """Whether k records move the noisy quantity by at most k times one record's change."""
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
        """The step with everyone sampled, if its RDP is known at more orders; else itself."""
        return self

    @property
    def needs_whole_orders(self) -> bool:
        """Whether `rdp` may be known at whole orders only."""
        return False

    @property
    def dominated_step(self) -> "PairedStep | None":
        """A step with a dominating pair that this one dominates, if known."""
        return None

    @property
    def dominating_step(self) -> "PairedStep | None":
        """A step with a dominating pair that dominates this one, if known."""
        return None

    @property
    def dominating_step_of_one(self) -> "PairedStep | JumpDiffusionLaw | None":
        """A step that dominates this one if a single slot changes; closer than `dominating_step`."""
        return self.dominating_step

    def divided(self, shift: float) -> "ComposableStep | None":
        """The step with 1 / `shift` of its noise, if it has one noise to divide."""
        return None

    def delta_upper(self, epsilon: float) -> float:
        """Upper bound on the delta of this step alone, if one not by RDP is known; else 1."""
        return 1.0

    @property
    def nontermination(self) -> float:
        """Upper bound on the probability that the step ends without the output that `rdp` is of."""
        return 0.0

    @property
    def basis(self) -> Basis:
        """Whether `rdp` is proved, or published in a paper without a valid proof."""
        return "proved"


@dataclass(frozen=True)
class Composition:
    """Several steps with independent randomness; all results are released."""

    components: tuple[tuple[ComposableStep, int], ...]
    charged_for_groups: bool = True


Mechanism = ComposableStep | Composition
"""Mechanism of one step of a plan."""
NormalBlocks = tuple[tuple[SensitivitySet, float], ...]
"""Sensitivity set and noise deviation of each block of coordinates."""


class PairedStep(SampledPair, ComposableStep):
    """Poisson-subsampled noise on one number: a step with an exact dominating pair."""

    @abstractmethod
    def with_scale(self, scale: float) -> Self:
        """The step with noise of this scale."""

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

    **Guarantee.** docs/guarantees/scalar-noise.md. For one number, or a vector if a record
    changes one entry of it; for other vectors only Laplace, with `scale` in units of the l1 norm.
    """

    beta: float
    scale: float

    def __post_init__(self) -> None:
        if not 1 <= self.beta <= MAX_BETA:
            raise InvalidValue(
                f"beta={self.beta!r} must be between 1 and {MAX_BETA:g}: below 1 the largest change of "
                "a number is not the worst one, and above, the rounding of losses is not bounded. Pass "
                "e.g. beta=1.5.",
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
class CoordinateWise(ComposableStep):
    """Poisson-subsampled noise on each coordinate of a sum, with coordinate sampling at one rate."""

    rate: float
    blocks: tuple[tuple[CoordinateRDP, SensitivitySet], ...]

    needs_whole_orders = True

    @classmethod
    def normal(cls, rate: float, blocks: NormalBlocks, coordinate_rate: float = 1.0) -> Self:
        """The step with normal noise."""
        scales = ((math.sqrt(2) * float(deviation), ball) for ball, deviation in blocks)
        return cls(rate, tuple((CoordinateRDP(2.0, s, coordinate_rate), ball) for s, ball in scales))

    @property
    def coordinate_rate(self) -> float:
        """Probability that a coordinate of a drawn record takes part."""
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
        """The step for one of the record's possible changes, if its dominating pair is known."""
        noise, ball = max(self.blocks, key=lambda block: block[1].max_entry / block[0].scale)
        if not ball.max_entry or noise.beta > MAX_BETA:
            return None
        if noise.beta != 2:
            return SampledNoise(self.rate, noise.beta, noise.scale / ball.max_entry)
        return SampledGaussian(*dominated_gaussian(self._normal, self.rate, self.coordinate_rate))

    @property
    def dominating_step(self) -> SampledGaussian | None:
        """The step with every coordinate, if that is a subsampled Gaussian.

        docs/guarantees/twice-sampling.md, step 3.
        """
        if any(noise.beta != 2 for noise, _ in self.blocks):
            return None
        return ellipsoid(self.rate, self._normal)

    @property
    def dominating_step_of_one(self) -> SampledGaussian | JumpDiffusionLaw | None:
        """The jump diffusion if it costs less, by chi-square, than the step with every coordinate.

        docs/guarantees/twice-sampling-pld.md.
        """
        whole = self.dominating_step
        if whole is None or self.coordinate_rate == 1:
            return whole
        blocks = [(ball.max_entry / scale, ball.l2_radius / scale) for ball, scale in self._normal]
        diffusion = dominating_jump_diffusion(self.rate, self.coordinate_rate, blocks)
        if diffusion is None or diffusion.log_chi_square >= whole.multiplier**-2:
            return whole
        return diffusion

    @property
    def _normal(self) -> NormalBlocks:
        return tuple((ball, noise.scale / math.sqrt(2)) for noise, ball in self.blocks)

    def rdp(self, orders: Array) -> Array:
        for noise, ball in self.blocks:
            if ball.dimension is None and ball.p > 2:
                raise InvalidValue(
                    f"noise of exponent beta={noise.beta:g} under l_{ball.p:g} clipping needs the "
                    "dimension: the cost of a change spread over many coordinates has no "
                    "limit. Pass dimension= (--dimension), the number of parameters, or clip with L2."
                )
        # the squares of losses would overflow
        if any(ball.max_entry > n.scale * _MAX_RDP_LOSS ** (1 / n.beta) for n, ball in self.blocks):
            return np.full(len(orders), np.inf)
        return coordinatewise_rdp(self.blocks, self.rate, orders)


def ellipsoid(rate: float, blocks: NormalBlocks) -> SampledGaussian:
    """The subsampled Gaussian equivalent to normal noise with a deviation per block of coordinates.

    Divided by the deviations, the change has norm sqrt(sum (l2 sensitivity / deviation)^2) and the noise
    is isotropic: docs/guarantees/poisson-gaussian.md, step 1.
    """
    return SampledGaussian(rate, 1 / math.hypot(*(ball.l2_radius / scale for ball, scale in blocks)))


# Quantiles of the number of coordinates that take part, one candidate each.
_QUANTILES = (1e-6, 1e-3, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999, 1 - 1e-6)
_INWARD = 1 - 1e-9
# Numbers of coordinates of a spread change, relative to the number at the cap.
_SPREADS = (1.0, 1e2, 1e4, 1e8)
# A record may always move fewer than it could, and SciPy counts up to here.
_MAX_COORDINATES = 1e15


@lru_cache(maxsize=1024)  # called at every point of a curve
def dominated_gaussian(blocks: NormalBlocks, rate: float, coordinate_rate: float) -> tuple[float, float]:
    """Rate and multiplier of a plain sampled Gaussian step: its epsilon is a lower bound for this one's.

    **Guarantee.** docs/guarantees/twice-sampling.md, step 4: a sum of m coordinates that move by c each
    dominates a step with the shift c k, at the probability that k or more take part. The result is the
    best of some m and k by chi-square.
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
    """Steps that a change of equal coordinates in each block dominates, one for each quantile."""
    units, counts = [], []  # squared change of a coordinate over the deviation, number of coordinates
    for ball, deviation in blocks:
        movable = (ball.norm / ball.max_entry) ** ball.p if ball.p < math.inf else math.inf
        limit = min(movable * spread, ball.dimension or math.inf, _MAX_COORDINATES)
        count, change = max(1, math.floor(limit * OUTWARD)), ball.max_entry
        if count > movable * OUTWARD:
            change = min(ball.max_entry, ball.norm * count ** (-1 / ball.p))
        units.append((change / deviation) ** 2 if deviation > change * 1e-150 else math.inf)
        counts.append(count)
    whole = math.sqrt(sum(unit * count for unit, count in zip(units, counts, strict=True)))
    from scipy.stats import binom  # importing it takes long

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
    """The logarithm of the chi-square divergence of a sampled Gaussian step."""
    rate, multiplier = step
    if rate == 0:
        return -math.inf
    power = max(multiplier, 700**-0.5) ** -2  # avoids overflow of the exponential
    return 2 * math.log(rate) + math.log(math.expm1(power)) if power > 0 else -math.inf
