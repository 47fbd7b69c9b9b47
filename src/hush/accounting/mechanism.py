"""From a plan to the mechanism that the accountants compose, or an error where none is proved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hush.accounting.pld.laws import GaussianLaw, GeneralizedGaussianLaw
from hush.accounting.rdp.dominated_step import dominated_step
from hush.accounting.selective.trial import TrainAndTest, Trial
from hush.clipping import L2, Entries, Importance, Lp
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Always
from hush.core.plan import Plan, names, proof_note
from hush.core.release import Selective
from hush.core.sensitivity import SensitivitySet
from hush.noise import Gaussian

# With less noise than this losses exceed LARGEST_LOSS, and fit no grid.
LEAST_MULTIPLIER, LARGEST_LOSS = 1e-3, 5e5
# Up to this power the rounding of a loss is within what `compose` pays for: 32 units, measured.
MOST_BETA = 12.0


@dataclass(frozen=True, order=True)
class SampledGaussian:
    """Poisson-subsampled Gaussian mechanism.

    `multiplier` is in units of the l2 sensitivity, so the clipping norm does not appear.
    """

    rate: float
    multiplier: float

    @property
    def law(self) -> GaussianLaw:
        return GaussianLaw(self.multiplier)

    def with_representable_loss(self) -> "SampledGaussian":
        return replace(self, multiplier=max(self.multiplier, LEAST_MULTIPLIER))


@dataclass(frozen=True, order=True)
class SampledNoise:
    """Poisson-subsampled additive noise on one number.

    The noise has density proportional to exp(-|x / scale|^beta): `beta` 1 is Laplace. `scale` is in
    units of the number's sensitivity.

    **Guarantee.** docs/guarantees/scalar-noise.md. For one number, or a vector of which a record
    changes one entry; for other vectors only Laplace, `scale` then being in units of the l1 norm.
    """

    rate: float
    beta: float
    scale: float

    def __post_init__(self) -> None:
        if not 1 <= self.beta <= MOST_BETA:
            raise InvalidValue(
                f"beta={self.beta!r} must be between 1 and {MOST_BETA:g}: below 1 the noise is not "
                "log-concave, and the largest change of a number is not the worst one; above, the "
                "rounding of losses is not paid for. Pass e.g. beta=1.5.",
                key="beta",
            )
        if not 0 < self.scale < math.inf or not 0 < self.rate <= 1:
            raise InvalidValue(
                f"scale={self.scale!r}, rate={self.rate!r} must satisfy 0 < scale and 0 < rate <= 1: "
                "without noise nothing is private. Pass e.g. scale=1.0, rate=0.01.",
                key="scale",
            )

    @property
    def law(self) -> GeneralizedGaussianLaw:
        return GeneralizedGaussianLaw(self.beta, self.scale)

    def with_representable_loss(self) -> "SampledNoise":
        return replace(self, scale=max(self.scale, LARGEST_LOSS ** (-1 / self.beta)))


@dataclass(frozen=True)
class Block:
    """Coordinates with noise of density ~ exp(-(|x| / scale)^beta), and their sensitivity set."""

    beta: float
    scale: float
    sensitivity: SensitivitySet


@dataclass(frozen=True)
class CoordinateWise:
    """Poisson-subsampled noise on each coordinate of a sum, with coordinate sampling.

    A record takes part with probability `rate`; given that, in each coordinate with `coordinate_rate`,
    independently.
    """

    rate: float
    blocks: tuple[Block, ...]
    coordinate_rate: float = 1.0

    @property
    def dominated_step(self) -> "SampledGaussian | SampledNoise | None":
        """A dominated step: its epsilon is a lower bound for this one's. None where none is known."""
        block = max(self.blocks, key=lambda block: block.sensitivity.max_entry / block.scale)
        if not block.sensitivity.max_entry or block.beta > MOST_BETA:
            return None
        if block.beta != 2:
            return SampledNoise(self.rate, block.beta, block.scale / block.sensitivity.max_entry)
        candidates = (
            dominated_step(
                block.sensitivity, block.scale / math.sqrt(2), self.rate, self.coordinate_rate
            )
            for block in self.blocks
        )
        return SampledGaussian(*max(candidates, key=lambda step: step[0] / step[1]))

    @property
    def without_coordinate_sampling(self) -> SampledGaussian | None:
        """The dominating step with every coordinate, where that is a subsampled Gaussian."""
        if any(block.beta != 2 for block in self.blocks):
            return None
        deviations = [block.scale / math.sqrt(2) for block in self.blocks]
        return ellipsoid(self.rate, [block.sensitivity.l2_radius for block in self.blocks], deviations)


@dataclass(frozen=True, order=True)
class Entrywise:
    """Noise on each entry of a vector, of which a record changes `changed` at most.

    Its privacy loss is `changed` times that of one noisy number: docs/guarantees/argmax.md, step 1.
    """

    one: SampledNoise
    changed: int


def ellipsoid(rate: float, norms: Sequence[float], deviations: Sequence[float]) -> SampledGaussian:
    """The subsampled Gaussian equivalent to normal noise with a deviation per block of coordinates.

    Block j has l2 sensitivity `norms[j]`. Divided by its deviation, the whole change has norm
    sqrt(sum (norm / deviation)^2), and the noise is isotropic: docs/guarantees/poisson-gaussian.md,
    step 1.

    >>> ellipsoid(0.01, norms=[3.0, 4.0], deviations=[1.0, 1.0])
    SampledGaussian(rate=0.01, multiplier=0.2)
    """
    ratios = (norm / deviation for norm, deviation in zip(norms, deviations, strict=True))
    return SampledGaussian(rate, 1 / math.hypot(*ratios))


Paired = SampledGaussian | SampledNoise
"""Steps with a known dominating pair: composed by their privacy losses, all others by RDP."""
ComposableStep = Paired | CoordinateWise | Trial
Mechanism = ComposableStep | Entrywise | TrainAndTest


def mechanism(plan: Plan, dimension: int | None = None) -> Mechanism:
    """The mechanism whose privacy loss bounds that of one step of `plan`.

    **Guarantee.** For neighbours that differ by adding or removing one record the step costs no
    more than its mechanism: docs/guarantees, on the page that `proof_note` gives.

    Args:
        plan: The step.
        dimension: Number of parameters, where it is known.

    Raises:
        Unproved: where no proof covers the plan's parts together.
    """
    proof_note(plan)
    noise, clipping, rate = plan.noise, plan.clipping, plan.sampling.participation
    dominating = noise.dominating_noise(clipping.reference_norm)
    if dominating is not None:
        return mechanism(replace(plan, noise=dominating), dimension)
    if isinstance(plan.release, Selective):
        always = mechanism(replace(plan, release=Always()))
        assert isinstance(always, SampledGaussian)
        return _tested(always, plan.release)
    if isinstance(noise, Gaussian):
        if isinstance(clipping, Entries):
            return SampledGaussian(1.0, noise.multiplier / math.sqrt(clipping.changed))
        if isinstance(clipping, Importance) or (isinstance(clipping, Lp) and clipping.p == 2):
            return SampledGaussian(rate, noise.multiplier)
        if not isinstance(clipping, Lp):
            return _normal(plan, dimension)
    law = noise.exponential_power(1.0)
    if law is None:
        return _normal(plan, dimension)
    if isinstance(clipping, Entries):
        return _entrywise(clipping.changed, *law)
    if not isinstance(clipping, L2 | Lp) or plan.sampling.coordinate_participation != 1:
        raise _uncharged(plan)
    beta, scale = law
    p = clipping.p if isinstance(clipping, Lp) else 2.0
    if p == beta == 2:
        return SampledGaussian(rate, scale / math.sqrt(2))
    # In one dimension all norms are one.
    if p == beta == 1 or (dimension == 1 and beta <= MOST_BETA):
        return SampledNoise(rate, beta, scale)
    if p == beta or (p == 2 and beta > 2):
        return CoordinateWise(
            rate, (Block(beta, scale, SensitivitySet(p=p, norm=1.0, dimension=dimension)),)
        )
    raise Unproved(
        f"{names(plan)} clips in l_{p:g} and adds noise of exponent {beta:g}: a change spread over "
        f"many coordinates is charged for p = beta, and for p = 2 with beta > 2. Clip with "
        f"{'L2' if beta >= 2 else f'Lp(p={beta:g})'}."
    )


def _normal(plan: Plan, dimension: int | None) -> Mechanism:
    """Normal noise on blocks: one subsampled Gaussian, unless coordinates are sampled."""
    blocks = plan.clipping.sensitivity(dimension)
    if any(math.isinf(block.l2_radius) for block in blocks):
        raise InvalidValue(
            "Linf clipping needs the dimension: a change spread over many coordinates is longer without "
            "end. Pass dimension=, the number of parameters, or clip with L2 or L2Linf.",
            key="dimension",
        )
    deviations = []
    for noise, norm in plan.noise.per_block(blocks, plan.clipping.reference_norm):
        if not isinstance(noise, Gaussian):
            raise _uncharged(plan)
        deviations.append(noise.multiplier * norm)
    if plan.sampling.coordinate_participation == 1:
        return ellipsoid(plan.sampling.participation, [block.l2_radius for block in blocks], deviations)
    noisy = tuple(
        Block(2.0, deviation * math.sqrt(2), block)
        for block, deviation in zip(blocks, deviations, strict=True)
    )
    return CoordinateWise(plan.sampling.participation, noisy, plan.sampling.coordinate_participation)


def _uncharged(plan: Plan) -> Unproved:
    """The error for parts that declare a proof which no branch of `mechanism` carries out."""
    return Unproved(
        f"{names(plan)} is declared to be proved, but nothing here computes its charge, and that of "
        "another mechanism would be a guess. Define dominating_noise(), or exponential_power() of noise "
        "under L2 or Lp clipping."
    )


def grows_with_dimension(plan: Plan) -> bool:
    """Whether the l2 sensitivity of a step of `plan` grows with the number of parameters, unbounded."""
    return any(math.isinf(block.l2_radius) for block in plan.clipping.sensitivity(None))


def _tested(train: SampledGaussian, release: Selective) -> Mechanism:
    """docs/guarantees/selective.md, "What is tested"."""
    test = SampledGaussian(release.rate, release.multiplier)
    if release.test == "summed":
        return TrainAndTest(train, test)
    return Trial(train, test, release.threshold / 2, release.accounting)


def _entrywise(changed: int, beta: float, scale: float) -> Mechanism:
    if beta == 2:
        return SampledGaussian(1.0, scale / math.sqrt(2 * changed))
    return Entrywise(SampledNoise(1.0, beta, scale), changed)
