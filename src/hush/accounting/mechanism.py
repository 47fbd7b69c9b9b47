"""From a plan to the mechanism that the accountants compose, or an error where none is proved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hush.accounting.selection import Selection, trial_count
from hush.accounting.selective import TrainAndTest, Trial
from hush.accounting.steps import (
    MAX_BETA,
    Block,
    ComposableStep,
    CoordinateWise,
    Mechanism,
    SampledGaussian,
    SampledNoise,
    ellipsoid,
)
from hush.clipping import L2, Entries, Importance, Lp
from hush.core.best_of import BestOf
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Always, SensitivitySet
from hush.core.plan import Plan, names, proof_note
from hush.core.release import Selective
from hush.noise import Gaussian


@dataclass(frozen=True, order=True)
class Entrywise(Mechanism):
    """Noise on each entry of a vector, of which a record changes `changed` at most.

    Its privacy loss is `changed` times that of one noisy number: docs/guarantees/argmax.md, step 1.
    """

    entry: SampledNoise
    changed: int

    @property
    def components(self) -> Sequence[tuple[ComposableStep, int]]:
        return ((self.entry, self.changed),)

    @property
    def charged_for_groups(self) -> bool:
        return False


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
        always = mechanism(replace(plan, release=Always()), dimension)
        assert isinstance(always, SampledGaussian)
        return _tested(always, plan.release)
    if isinstance(plan.release, BestOf):
        return _selection(replace(plan, release=Always()), plan.release)
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
    if p == beta == 1 or (dimension == 1 and beta <= MAX_BETA):
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
    """Normal noise on blocks: one subsampled Gaussian, unless several coordinates are sampled."""
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
    rate, coordinate_rate = plan.sampling.participation, plan.sampling.coordinate_participation
    if sum(block.dimension or math.inf for block in blocks) == 1:
        # the only coordinate takes part where its record and its own coin say so: rates multiply
        rate, coordinate_rate = rate * coordinate_rate, 1.0
    if coordinate_rate == 1:
        return ellipsoid(rate, [block.l2_radius for block in blocks], deviations)
    noisy = tuple(
        Block(2.0, deviation * math.sqrt(2), block)
        for block, deviation in zip(blocks, deviations, strict=True)
    )
    return CoordinateWise(rate, noisy, coordinate_rate)


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


def _selection(trial: Plan, release: BestOf) -> Mechanism:
    """docs/guarantees/tuning.md, "What a trial is": held-out records are no training records."""
    step = mechanism(trial)
    assert isinstance(step, SampledGaussian)
    trials = [((step, release.steps),)]
    if release.score is not None:
        trials.append(((SampledGaussian(1.0, release.score), 1),))
    return Selection(tuple(trials), trial_count(release))


def _entrywise(changed: int, beta: float, scale: float) -> Mechanism:
    if beta == 2:
        return SampledGaussian(1.0, scale / math.sqrt(2 * changed))
    return Entrywise(SampledNoise(1.0, beta, scale), changed)
