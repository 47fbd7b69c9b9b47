"""Plans whose numbers are recorded: random legal ones, and every combination of parts once."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from random import Random

import hush
from tests.fuzz.plans import Case, legal

_STEPS = (1, 3, 50, 1000, 20_000)
_LARGEST_BETA = 4.0
"""Beyond it one epsilon takes tens of seconds."""


@dataclass(frozen=True)
class Question:
    """A random legal plan, and what is asked of it."""

    case: Case
    steps: int
    dimension: int | None

    @property
    def seed(self) -> int:
        return self.case.seed

    @property
    def plan(self) -> hush.Plan:
        return self.case.plan


def questions(number: int) -> Iterator[Question]:
    """The first `number` questions, the same ones every time."""
    accepted = 0
    for seed in count():
        if accepted == number:
            return
        case = legal(seed, quick=False)
        if getattr(case.plan.noise, "beta", 1.0) <= _LARGEST_BETA:
            accepted += 1
            pick = Random(f"question {seed}")
            dimension = pick.choice([case.dimension, case.dimension, None])
            yield Question(case, pick.choice(_STEPS), dimension)


DIMENSION = 8
"""Of every plan in `combinations`."""
_SAMPLINGS = {
    "FullBatch": hush.FullBatch(),
    "Poisson": hush.Poisson(0.1),
    "Truncated": hush.TruncatedPoisson(rate=0.1, max_batch=20, records=100),
    "FixedSize": hush.FixedSize(size=10, records=100),
    "Allocation": hush.RandomAllocation(steps=10),
    "CyclicPoisson": hush.CyclicPoisson(rate=0.4, cycle=4),
    "Coordinate": hush.Coordinate(rate=0.5),
    "Twice": hush.Twice(rate=0.1, coordinate_rate=0.5),
}
_CLIPPINGS = {
    "L2": hush.L2(1.0),
    "L1": hush.Lp(p=1.0, norm=1.0),
    "Lp1.5": hush.Lp(p=1.5, norm=1.0),
    "Lp3": hush.Lp(p=3.0, norm=1.0),
    "Linf": hush.Linf(1.0),
    "L2Linf": hush.L2Linf(l2=1.0, linf=0.5),
    "Box": hush.Box(bounds=[(3, 1.0), (5, 0.5)]),
    "Subspaces": hush.Subspaces(ranks=[3, 5], l2=[1.0, 0.5]),
    "Principal": hush.Subspaces(
        ranks=[3, 5], l2=[1.0, 0.5], linf=[0.8, 0.3], bases=hush.Principal(groups=1, every=2)
    ),
    "Entries": hush.Entries(changed=2),
    "Importance": hush.Importance(1.0),
    "Normalized": hush.Normalized(1.0),
    "Quantile": hush.Quantile(1.0),
}
_NOISES = {
    "Gaussian": hush.Gaussian(2.0),
    "Banded": hush.Banded(multiplier=2.0, strategy=(1.0, 0.5, 0.25)),
    "BlockGaussian": hush.BlockGaussian(multipliers=[2.0, 3.0]),
    "Laplace": hush.Laplace(2.0),
    "GeneralizedGaussian1.5": hush.GeneralizedGaussian(beta=1.5, multiplier=2.0),
    "GeneralizedGaussian3": hush.GeneralizedGaussian(beta=3.0, multiplier=2.0),
    "Rectified": hush.Rectified(scale=2.0, bound=3.0),
    "Truncated": hush.Truncated(scale=2.0, bound=3.0),
    "StochasticSign": hush.StochasticSign(scale=2.0),
    "Quantized": hush.Quantized(scale=2.0, bound=3.0, levels=4),
}
_RELEASES = {
    "Always": hush.Always(),
    "Mean": hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, test="mean"),
    "Summed": hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, test="summed"),
    "PerAcceptance": hush.Selective(
        rate=0.1, clip=1.0, multiplier=1.0, accounting="per-acceptance", test="mean"
    ),
    "Published": hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, accounting="published", test="mean"),
}


def combinations() -> Iterator[tuple[str, hush.Plan]]:
    """Every combination of parts, proved or not, with its name."""
    for names in product(_SAMPLINGS, _CLIPPINGS, _NOISES, _RELEASES):
        sampling, clipping, noise, release = names
        plan = hush.Plan(
            sampling=_SAMPLINGS[sampling],
            clipping=_CLIPPINGS[clipping],
            noise=_NOISES[noise],
            release=_RELEASES[release],
        )
        yield " x ".join(names), plan
