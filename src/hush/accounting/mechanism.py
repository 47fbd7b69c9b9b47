"""Mechanism of a plan, for composition by the accountants."""

import math
from dataclasses import replace

from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.selection import Selection, trial_count
from hush.accounting.selective import Trial
from hush.accounting.steps import (
    MAX_BETA,
    AllocatedGaussian,
    CompetingGaussian,
    Composition,
    CoordinateWise,
    Mechanism,
    SampledGaussian,
    SampledNoise,
    TruncatedGaussian,
    ellipsoid,
)
from hush.clipping import L2, Entries, Importance, Lp
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Always, SensitivitySet
from hush.core.plan import Plan, names, proof_note
from hush.core.release import BestOf, Selective
from hush.noise import Gaussian, Truncated
from hush.noise.bounded import largest_variance
from hush.sampling import FixedSize, RandomAllocation, TruncatedPoisson, binomial_tail

_OUTWARD = 1 + 1e-9
"""Relative slack for rounding errors of SciPy's binomial tails."""


def mechanism(plan: Plan, dimension: int | None = None) -> Mechanism:
    """Mechanism that bounds the privacy loss of one step of `plan`.

    **Guarantee.** For adjacent data sets, the privacy cost of the step is at most that of the mechanism:
    docs/guarantees, page `proof_note(plan)`.

    Raises:
        Unproved: If there is no proof.
    """
    proof_note(plan)
    bands, period = len(plan.noise.correlation), plan.sampling.period
    if bands > period:
        raise InvalidValue(
            f"{names(plan)} correlates the noise of {bands} steps, and a record may take part again "
            f"after {period}: its two contributions would share noise, which costs more. Use at most as "
            "many coefficients as the cycle of the sampling.",
            key="noise.strategy",
        )
    dominating = plan.noise.dominating_noise(plan.clipping.reference_norm)
    release = plan.release
    if dominating is not None:
        step, noise = mechanism(replace(plan, noise=dominating), dimension), plan.noise
        # truncation reduces the cost of full batches: bounded.md, section 6
        if isinstance(noise, Truncated) and isinstance(step, SampledGaussian) and step.rate == 1:
            return TruncatedGaussian(step.multiplier, largest_variance(noise.bound / noise.scale))
        return step
    if isinstance(release, Selective | BestOf):
        size = dimension if isinstance(release, Selective) else None
        train = mechanism(replace(plan, release=Always()), size)
        assert isinstance(train, SampledGaussian)  # proved for Gaussian noise only
        if isinstance(release, BestOf):
            # a record is either trained on or held out: tuning.md, "What a trial is"
            trials = [((train, release.steps),)]
            if release.score is not None:
                trials.append(((SampledGaussian(1.0, release.score), 1),))
            return Selection(tuple(trials), trial_count(release))
        test = SampledGaussian(release.rate, release.multiplier)
        if release.test == "summed":  # selective.md, "What is tested"
            return Composition(((train, 1), (test, 1)))
        return Trial(train, test, release.threshold / 2, release.accounting)
    rate = plan.sampling.participation
    law = plan.noise.exponential_power(1.0)
    match plan.clipping:
        case Entries(changed=changed) if law is not None:
            # the privacy loss is `changed` times the loss of one noisy count: argmax.md, step 1
            beta, scale = law
            if isinstance(plan.noise, Gaussian):
                return SampledGaussian(1.0, plan.noise.multiplier / math.sqrt(changed))
            if beta == 2:
                return SampledGaussian(1.0, scale / math.sqrt(2 * changed))
            return Composition(((SampledNoise(1.0, beta, scale), changed),), charged_for_groups=False)
        case Importance() | Lp(p=2) if isinstance(plan.noise, Gaussian):
            return SampledGaussian(rate, plan.noise.multiplier)
    if law is None or (isinstance(plan.noise, Gaussian) and not isinstance(plan.clipping, Lp)):
        return _normal(plan, dimension)
    if not isinstance(plan.clipping, L2 | Lp) or plan.sampling.coordinate_participation != 1:
        raise _uncharged(plan)
    return _exponential_power(plan, *law, dimension)


def _exponential_power(plan: Plan, beta: float, scale: float, dimension: int | None) -> Mechanism:
    """Noise of density ~ exp(-(|x| / scale)^beta) under `L2` or `Lp` clipping to norm 1."""
    rate = plan.sampling.participation
    p = plan.clipping.p if isinstance(plan.clipping, Lp) else 2.0
    if p == beta == 2:
        return SampledGaussian(rate, scale / math.sqrt(2))
    # In one dimension all norms are equal.
    if p == beta == 1 or (dimension == 1 and beta <= MAX_BETA):
        return SampledNoise(rate, beta, scale)
    if p == beta or (p == 2 and beta > 2):
        ball = SensitivitySet(p=p, norm=1.0, dimension=dimension)
        return CoordinateWise(rate, ((CoordinateRDP(beta, scale), ball),))
    raise Unproved(
        f"{names(plan)} clips in l_{p:g} and adds noise of exponent {beta:g}: the cost is proved "
        f"only for p = beta, and for p = 2 with beta > 2. Clip with "
        f"{'L2' if beta >= 2 else f'Lp(p={beta:g})'}."
    )


def _normal(plan: Plan, dimension: int | None) -> Mechanism:
    """Gaussian noise on blocks: one subsampled Gaussian, unless coordinates are sampled."""
    blocks = plan.clipping.sensitivity(dimension)
    if any(math.isinf(block.l2_radius) for block in blocks):
        raise InvalidValue(
            "Linf clipping needs the dimension: the l2 sensitivity grows with the number of "
            "coordinates. Pass dimension= (--dimension), the number of parameters, or clip with L2 or "
            "L2Linf.",
            key="dimension",
        )
    noisy = []
    noises = plan.noise.per_block(blocks, plan.clipping.reference_norm)
    for block, (noise, norm) in zip(blocks, noises, strict=True):
        if not isinstance(noise, Gaussian):
            raise _uncharged(plan)
        noisy.append((block, noise.multiplier * norm))
    rate, coordinate_rate = plan.sampling.participation, plan.sampling.coordinate_participation
    if sum(block.dimension or math.inf for block in blocks) == 1:
        # one coordinate: the sampling rates of records and coordinates multiply
        rate, coordinate_rate = rate * coordinate_rate, 1.0
    if coordinate_rate == 1:
        step = ellipsoid(rate, tuple(noisy))
        if isinstance(plan.sampling, FixedSize | TruncatedPoisson):
            return _limited(plan.sampling, step.multiplier)
        if isinstance(plan.sampling, RandomAllocation) and plan.sampling.period > 1:
            return AllocatedGaussian(plan.sampling.period, step.multiplier)
        return step
    return CoordinateWise.normal(rate, tuple(noisy), coordinate_rate)


def _limited(
    sampling: FixedSize | TruncatedPoisson, multiplier: float
) -> CompetingGaussian | SampledGaussian:
    """Gaussian step on batches of limited size, with probabilities rounded outward."""
    if isinstance(sampling, FixedSize):
        step = SampledGaussian(sampling.size / sampling.records, multiplier)
        # a batch of all records has no competition
        return step if step.rate == 1 else CompetingGaussian(step, 1.0, step.rate, step.rate, True)
    limit, rate = sampling.max_batch, sampling.rate
    competing = min(1.0, binomial_tail(limit - 1, sampling.records - 1, rate) * _OUTWARD)
    full_rate = min(1.0, rate * limit / (limit + 1) * _OUTWARD)
    lowest = sampling.participation * (2 - _OUTWARD)
    return CompetingGaussian(SampledGaussian(rate, multiplier), competing, full_rate, lowest)


def _uncharged(plan: Plan) -> Unproved:
    """Error for parts with a declared proof, but without an implementation in `mechanism`."""
    return Unproved(
        f"{names(plan)} declares a proof, but no accountant computes its cost. Define "
        "dominating_noise(), or exponential_power() for noise with L2 or Lp clipping."
    )


def grows_with_dimension(plan: Plan) -> bool:
    """Whether the l2 sensitivity of a step is unbounded in the number of parameters."""
    return any(math.isinf(block.l2_radius) for block in plan.clipping.sensitivity(None))
