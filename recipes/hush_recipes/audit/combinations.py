"""Every combination of parts: the attack that audits its charge, or that it is refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from hush.accounting.mechanism import mechanism
from hush.accounting.per_instance import unit_law
from hush.clipping import L2, Box, Entries, Importance, L2Linf, Linf, Lp, Principal, Subspaces
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import Neighbours
from hush.core.parts import Always, Clipping, Noise, Release
from hush.core.plan import Plan
from hush.core.release import Selective
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
from hush.pate.argmax import Confident, NoisyMax
from hush.sampling import Coordinate, FullBatch, Poisson, Twice
from hush_recipes.audit import answers, whole_steps
from hush_recipes.audit.copies import factored
from hush_recipes.audit.distinguisher import audit
from hush_recipes.audit.scores import Audit
from hush_recipes.statistics.moments import NoisyMoments
from hush_recipes.statistics.quantile import NoisyQuantile

DEVIATION = 0.8
"""Of normal noise on a sum of sensitivity 1: a thousand runs give a lower bound near the charge."""
ROWS, STEPS = 2000, 300
SAMPLINGS = (
    FullBatch(),
    Poisson(rate=0.3),
    Coordinate(rate=0.5),
    Twice(rate=0.5, coordinate_rate=0.5),
)
CLIPPINGS: tuple[tuple[Clipping, int], ...] = (
    (L2(1.0), 1),
    (Importance(1.0), 1),
    (Lp(p=2.0, norm=1.0), 1),
    (Linf(0.5), 4),
    (L2Linf(l2=1.0, linf=0.5), 4),
    (Entries(changed=1), 1),
    (Box([0.8, 0.6]), 2),
    (Subspaces(ranks=(2, 2), l2=(0.8, 0.6)), 4),
)
"""Clippings of l2 sensitivity 1, and the number of entries that a record changes to reach it."""
RELEASES: tuple[Release, ...] = (
    Always(),
    Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=0.0, test="mean"),
    Selective(
        rate=0.5, clip=1e-3, multiplier=1.0, threshold=0.0, test="mean", accounting="per-acceptance"
    ),
    Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=0.0, test="summed"),
)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A named attack: `attack(runs=..., confidence=...)` gives a lower bound beside the charge."""

    name: str
    attack: Callable[..., Audit]
    runs: int = ROWS
    """Runs of some tenths of a second in all, or of seconds where each is a whole step."""
    whole_steps: bool = False
    """Whether each run is a step of its own, which takes milliseconds instead of microseconds."""


def plans() -> Iterator[tuple[Plan, int]]:
    """Every combination of parts as a plan, with the number of entries that its record changes."""
    for sampling, (clipping, touched), release in product(SAMPLINGS, CLIPPINGS, RELEASES):
        for noise in _noises(clipping, touched):
            fitting = _fitting(clipping, noise)
            yield Plan(sampling=sampling, clipping=fitting, noise=noise, release=release), touched


def refused() -> list[Plan]:
    """Plans without a proof: the accountant must refuse them."""
    return [plan for plan, touched in plans() if attack_on(plan, touched) is None]


def attacks() -> list[Attack]:
    """An attack on everything that is charged."""
    listed = []
    for plan, touched in plans():
        attack = attack_on(plan, touched)
        if attack is not None:
            whole = isinstance(plan.release, Selective)
            runs = STEPS if whole else 5 * ROWS if factored(plan) else ROWS
            listed.append(Attack(name=_name(plan), attack=attack, runs=runs, whole_steps=whole))
    return [*listed, *_other_attacks()]


def attack_on(plan: Plan, touched: int) -> Callable[..., Audit] | None:
    """The attack on a plan, None where it is refused."""
    try:
        mechanism(plan, touched)
    except Unproved:
        return None
    if isinstance(plan.release, Selective):
        return partial(whole_steps.attack_steps, plan, touched=touched, dimension=touched)
    if isinstance(plan.clipping, Entries):
        votes = NoisyMax.of_votes(noise=plan.noise, neighbours=Neighbours.ADD_REMOVE)
        return partial(answers.attack_votes, votes)
    try:
        mechanism(plan)
    except Unproved:
        return partial(answers.attack_number, plan)
    except InvalidValue:
        pass  # it needs the dimension, which the attack passes
    return partial(audit, plan, touched=touched, dimension=touched)


def _noises(clipping: Clipping, touched: int) -> tuple[Noise, ...]:
    """Examples of every noise, of standard deviation about `DEVIATION` on a sum of sensitivity 1."""
    blocks = len(clipping.sensitivity(touched))
    return (
        Gaussian(DEVIATION / clipping.reference_norm),
        BlockGaussian((DEVIATION * blocks**0.5,) * blocks),
        GeneralizedGaussian(beta=1.5, multiplier=1.0),
        GeneralizedGaussian(beta=3.0, multiplier=2.5),
        Laplace(1.0),
        Rectified(scale=DEVIATION, bound=2.0),
        Quantized(scale=DEVIATION, bound=2.0, levels=5),
        StochasticSign(DEVIATION),
        Truncated(scale=DEVIATION, bound=2.0),
    )


def _fitting(clipping: Clipping, noise: Noise) -> Clipping:
    """Lp clipping in the norm that a noise is proved for."""
    law = noise.exponential_power(1.0)
    return Lp(p=law[0], norm=clipping.norm) if isinstance(clipping, Lp) and law else clipping


def _has_per_instance_charge(noise: Noise) -> bool:
    """Whether a law on a fixed support has a per-instance charge."""
    try:
        unit_law(noise, 1.0)
    except Unproved:
        return False
    return noise.dominating_noise(1.0) is not None


def _other_attacks() -> Iterator[Attack]:
    """Attacks beyond single steps: compositions, public bases, per-instance charges, answers."""
    plain = Plan(
        sampling=Poisson(rate=0.3), clipping=L2(norm=1.0), noise=Gaussian(multiplier=2 * DEVIATION)
    )
    full = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=DEVIATION))
    twice = Plan(
        sampling=Twice(rate=0.5, coordinate_rate=0.5),
        clipping=L2Linf(l2=1.0, linf=0.5),
        noise=Gaussian(multiplier=DEVIATION),
    )
    spread = Plan(
        sampling=FullBatch(),
        clipping=Lp(p=3.0, norm=1.0),
        noise=GeneralizedGaussian(beta=3.0, multiplier=2.0),
    )
    many = 5 * ROWS
    yield Attack(
        name="8 steps of Poisson x L2 x Gaussian", attack=partial(audit, plain, steps=8), runs=many
    )
    yield Attack(
        name="4 steps of Twice x L2Linf x Gaussian", attack=partial(audit, twice, touched=4, steps=4)
    )
    yield Attack(
        name="Lp(p=3) x GeneralizedGaussian(beta=3), spread over 4 numbers",
        attack=partial(audit, spread, touched=4, dimension=4),
    )
    for noise in _noises(L2(norm=1.0), 1):
        if _has_per_instance_charge(noise):
            bounded = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=noise)
            for others in (-1, 2):
                yield Attack(
                    name=f"{type(noise).__name__} for the records at hand, sum {others:+d}",
                    attack=partial(audit, bounded, others=others, at_hand=True),
                    runs=many,
                )
    yield from _answers(full)
    yield Attack(
        name="adaptive descent under a filter",
        attack=answers.attack_descent,
        runs=STEPS // 3,
        whole_steps=True,
    )
    public = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.ones(6, 2)
    for sampling, noise in product(
        SAMPLINGS, (Gaussian(multiplier=DEVIATION), BlockGaussian(multipliers=(1.1, 1.1)))
    ):
        bases = Plan(
            sampling=sampling,
            clipping=Subspaces(ranks=(1, 2), l2=(0.8, 0.6), bases=Principal(groups=1)),
            noise=noise,
        )
        yield Attack(
            name=f"{_name(bases)}, public bases",
            attack=partial(whole_steps.attack_steps, bases, touched=3, public=public),
            runs=STEPS,
            whole_steps=True,
        )


def _answers(full: Plan) -> Iterator[Attack]:
    votes = NoisyMax.of_votes(noise=Gaussian(multiplier=2.0))
    sure = Confident(vote=votes, threshold=5.0, noise=Gaussian(multiplier=2.0))
    teachers = NoisyMax.of_teachers(noise=GeneralizedGaussian(beta=1.5, multiplier=2.0))
    quantile = NoisyQuantile(multiplier=1.0, bins=4)
    yield Attack(name="argmax of votes, one replaced", attack=partial(answers.attack_votes, votes))
    yield Attack(name="argmax of teachers' votes", attack=partial(answers.attack_votes, teachers))
    yield Attack(name="argmax of clear votes", attack=partial(answers.attack_votes, sure, queries=2))
    yield Attack(name="hush.mean", attack=partial(answers.attack_mean, full))
    yield Attack(name="quantile of norms", attack=partial(answers.attack_quantile, quantile))
    moments = NoisyMoments(multiplier=1.2)
    yield Attack(name="moments of inputs", attack=partial(answers.attack_moments, moments))


def _name(plan: Plan) -> str:
    parts = [type(part).__name__ for part in (plan.sampling, plan.clipping, plan.noise)]
    if isinstance(plan.noise, GeneralizedGaussian):
        parts[2] += f"(beta={plan.noise.beta:g})"
    if isinstance(plan.release, Selective):
        parts.append(f"Selective({plan.release.test}, {plan.release.accounting})")
    return " x ".join(parts)
