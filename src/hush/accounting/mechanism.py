"""What a plan is to the accountant: the proved mechanism behind its parts, or an error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from hush.accounting.pld.laws import NormalLaw, PowerLaw
from hush.accounting.rdp.dominated_step import dominated_step
from hush.accounting.selective.trial import TrainAndTest, Trial
from hush.clipping import L2, Box, Entries, Importance, L2Linf, Linf, Lp, Subspaces
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Always, Noise, Part
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.sensitivity import SensitivitySet
from hush.noise import (
    BlockGaussian,
    Gaussian,
    GeneralizedGaussian,
    Laplace,
    Quantized,
    Rectified,
    StochasticSign,
    Truncated,
)
from hush.sampling import Coordinate, FullBatch, Poisson, Twice

# With less noise than this losses exceed LARGEST_LOSS, and fit no grid.
LEAST_MULTIPLIER, LARGEST_LOSS = 1e-3, 5e5
# Up to this power the rounding of a loss is within what `compose` pays for: 32 units, measured.
MOST_BETA = 12.0


@dataclass(frozen=True, order=True)
class SampledGaussian:
    """One step that adds normal noise to a sum in which each record takes part with some chance.

    `multiplier` is in units of the clipping norm, so the norm itself does not appear.
    """

    rate: float
    multiplier: float

    @property
    def law(self) -> NormalLaw:
        return NormalLaw(self.multiplier)

    def noisier(self) -> "SampledGaussian":
        return replace(self, multiplier=max(self.multiplier, LEAST_MULTIPLIER))


@dataclass(frozen=True, order=True)
class SampledNoise:
    """One step that adds noise to one number, in which each record takes part with some chance.

    The noise has density proportional to exp(-|x / scale|^beta): `beta` 1 is Laplace. `scale` is in
    units of what one record may change the number by.

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
    def law(self) -> PowerLaw:
        return PowerLaw(self.beta, self.scale)

    def noisier(self) -> "SampledNoise":
        return replace(self, scale=max(self.scale, LARGEST_LOSS ** (-1 / self.beta)))


@dataclass(frozen=True)
class Block:
    """Coordinates with noise of density exp(-(|x| / scale)^beta), which a record moves within a ball."""

    beta: float
    scale: float
    ball: SensitivitySet


@dataclass(frozen=True)
class CoordinateWise:
    """One step that adds noise to each coordinate of a sum in which a record takes part with `rate`.

    If it does, it takes part in each coordinate with `coordinate_rate`, independently.
    """

    rate: float
    blocks: tuple[Block, ...]
    coordinate_rate: float = 1.0

    @property
    def dominated_step(self) -> "SampledGaussian | SampledNoise | None":
        """A step that shows no more than this one does of one of the changes that a record can make.

        Its cost bounds that of this step from below. None where no such step is known.
        """
        block = max(self.blocks, key=lambda block: block.ball.max_entry / block.scale)
        if not block.ball.max_entry or block.beta > MOST_BETA:
            return None
        if block.beta != 2:
            return SampledNoise(self.rate, block.beta, block.scale / block.ball.max_entry)
        found = (
            dominated_step(block.ball, block.scale / math.sqrt(2), self.rate, self.coordinate_rate)
            for block in self.blocks
        )
        return SampledGaussian(*max(found, key=lambda step: step[0] / step[1]))

    @property
    def without_coordinate_sampling(self) -> SampledGaussian | None:
        """The same step with every coordinate, where that is a plain step with normal noise."""
        if any(block.beta != 2 for block in self.blocks):
            return None
        deviations = [block.scale / math.sqrt(2) for block in self.blocks]
        return ellipsoid(self.rate, [block.ball.l2_radius for block in self.blocks], deviations)


@dataclass(frozen=True, order=True)
class Entrywise:
    """One step that adds noise to each entry of a vector, of which a record changes `changed` at most.

    It costs `changed` times what one noisy number costs: docs/guarantees/argmax.md, step 1.
    """

    one: SampledNoise
    changed: int


def ellipsoid(rate: float, norms: Sequence[float], deviations: Sequence[float]) -> SampledGaussian:
    """The step that adds normal noise of its own deviation to each of several blocks of coordinates.

    A record changes block j by a vector of Euclidean norm `norms[j]` at most. Divided by its
    deviation, the whole change has norm sqrt(sum (norm / deviation)^2), and the noise is isotropic:
    one number decides, docs/guarantees/poisson-gaussian.md, step 1.

    >>> ellipsoid(0.01, norms=[3.0, 4.0], deviations=[1.0, 1.0])
    SampledGaussian(rate=0.01, multiplier=0.2)
    """
    ratios = (norm / deviation for norm, deviation in zip(norms, deviations, strict=True))
    return SampledGaussian(rate, 1 / math.hypot(*ratios))


Simple = SampledGaussian | SampledNoise | CoordinateWise | Trial
Mechanism = Simple | Entrywise | TrainAndTest


def mechanism(plan: Plan, dimension: int | None = None) -> Mechanism:
    """The mechanism `plan` runs at each step; raises `Unproved` where nobody has proved one.

    `dimension` is the number of parameters, where it is known.

    **Guarantee.** For neighbours that differ by adding or removing one record the step costs no
    more than its mechanism: docs/guarantees/poisson-gaussian.md, scalar-noise.md, coordinate-wise.md,
    argmax.md, bounded.md, selective.md.
    """
    _check_proved(plan)
    plan = unbounded(plan)
    parts = (plan.sampling, plan.clipping, plan.noise, plan.release)
    if isinstance(plan.release, Selective):
        always = mechanism(replace(plan, release=Always()))
        assert isinstance(always, SampledGaussian)
        return _tested(always, plan.release)
    if isinstance(plan.clipping, Entries):
        return _entrywise(plan.clipping.changed, plan.noise)
    if tuple(type(part) for part in parts) in _NORMAL:
        return _normal(plan, dimension)
    rate = plan.sampling.participation
    p = plan.clipping.p if isinstance(plan.clipping, Lp) else 2.0
    match plan.noise:
        case Gaussian(multiplier=multiplier):
            beta, scale = 2.0, multiplier * math.sqrt(2)
            if p == 2:
                return SampledGaussian(rate, multiplier)
        case Laplace(multiplier=scale):
            beta = 1.0
        case GeneralizedGaussian(beta=beta, multiplier=scale):
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
        f"{_names(parts)} clips in l_{p:g} and adds noise of exponent {beta:g}: a change spread over "
        f"many coordinates is charged for p = beta, and for p = 2 with beta > 2. Clip with "
        f"{'L2' if beta >= 2 else f'Lp(p={beta:g})'}."
    )


BOUNDED = (Rectified, Truncated, StochasticSign, Quantized)


def unbounded(plan: Plan) -> Plan:
    """The plan with the whole normal law in place of noise on a fixed support, which shows no more.

    **Guarantee.** In any world of other records, sampling and coordinates: docs/guarantees/bounded.md.
    Under l_p clipping with p not 2, and for entries, a bounded law is charged by nothing here.
    """
    noise = plan.noise
    if type(noise) not in BOUNDED or type(plan.clipping) not in (L2, Linf, L2Linf):
        return plan
    assert isinstance(noise, BOUNDED)
    return replace(plan, noise=Gaussian(multiplier=noise.scale / plan.clipping.reference_norm))


def _normal(plan: Plan, dimension: int | None) -> Mechanism:
    """Normal noise over balls: one number decides, unless coordinates are sampled."""
    balls = plan.clipping.sensitivity(dimension)
    if any(math.isinf(ball.l2_radius) for ball in balls):
        raise InvalidValue(
            "Linf clipping needs the dimension: a change spread over many coordinates is longer without "
            "end. Pass dimension=, the number of parameters, or clip with L2 or L2Linf.",
            key="dimension",
        )
    noise = plan.noise.per_block(balls, plan.clipping.reference_norm)
    deviations = [_multiplier(each) * norm for each, norm in noise]
    if plan.sampling.coordinate_participation == 1:
        return ellipsoid(plan.sampling.participation, [ball.l2_radius for ball in balls], deviations)
    blocks = tuple(
        Block(2.0, deviation * math.sqrt(2), ball)
        for ball, deviation in zip(balls, deviations, strict=True)
    )
    return CoordinateWise(plan.sampling.participation, blocks, plan.sampling.coordinate_participation)


def _multiplier(noise: Noise) -> float:
    assert isinstance(noise, Gaussian)
    return noise.multiplier


def grows_with_dimension(plan: Plan) -> bool:
    """Whether a step of `plan` costs more the more parameters there are, without end."""
    return any(math.isinf(ball.l2_radius) for ball in plan.clipping.sensitivity(None))


_ANY = (Poisson, FullBatch, Coordinate, Twice)
_NORMAL = {
    *product(_ANY, (L2, Linf, L2Linf, Box, Subspaces), (Gaussian,), (Always,)),
    # Not Linf, L2Linf: the longest change in their block depends on how many numbers are trained, and so
    # would the noise that runs, while a charge is for any number of them or for the largest.
    *product(_ANY, (L2, Box, Subspaces), (BlockGaussian,), (Always,)),
}
_PROVED = {
    *_NORMAL,
    *product((Poisson, FullBatch), (L2, Lp), (Gaussian, Laplace, GeneralizedGaussian), (Always,)),
    # Not Poisson: whether a record takes part is one draw for all the entries it changes.
    *product((FullBatch,), (Entries,), (Gaussian, Laplace, GeneralizedGaussian), (Always,)),
    *product((Poisson, FullBatch), (L2,), (Gaussian,), (Selective,)),
    *product((Poisson, FullBatch), (Importance,), (Gaussian,), (Always,)),
    *product(_ANY, (L2, Linf, L2Linf), BOUNDED, (Always,)),
}


def _check_proved(plan: Plan) -> None:
    """Raise for parts that were not proved together; say which one to change, where one is enough."""
    parts = (plan.sampling, plan.clipping, plan.noise, plan.release)
    # exact types, so that a subclass which changes what a part does is not charged as its parent
    kinds = tuple(type(part) for part in parts)
    if kinds in _PROVED:
        return
    ways = []
    for k, name in enumerate(("sampling", "clipping", "noise", "release")):
        near = {p[k].__name__ for p in _PROVED if p[:k] + p[k + 1 :] == kinds[:k] + kinds[k + 1 :]}
        ways += [f"the {name} to {' or '.join(sorted(near))}"] if near else []
    way = f"Change {', or '.join(ways)}." if ways else "The README's table of parts leads to the proofs."
    raise Unproved(
        f"{_names(parts)} has no proved guarantee.\n"
        f"A charge for parts that were not proved together would be a guess.\n{way}"
    )


def _tested(train: SampledGaussian, release: Selective) -> Mechanism:
    """docs/guarantees/selective.md, "What is tested"."""
    test = SampledGaussian(release.rate, release.multiplier)
    if release.test == "summed":
        return TrainAndTest(train, test)
    return Trial(train, test, release.threshold / 2, release.accounting)


def _entrywise(changed: int, noise: Noise) -> Mechanism:
    match noise:
        case Gaussian(multiplier=deviation):
            return SampledGaussian(1.0, deviation / math.sqrt(changed))
        case GeneralizedGaussian(beta=2.0, multiplier=scale):
            return SampledGaussian(1.0, scale / math.sqrt(2 * changed))
        case GeneralizedGaussian(beta=beta, multiplier=scale):
            return Entrywise(SampledNoise(1.0, beta, scale), changed)
        case Laplace(multiplier=scale):
            return Entrywise(SampledNoise(1.0, 1.0, scale), changed)
    raise AssertionError("every noise that is proved is listed above")


def _names(parts: tuple[Part, ...]) -> str:
    return " x ".join(type(part).__name__ for part in parts)
