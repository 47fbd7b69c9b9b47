"""Numbers that are not of one plan: comparisons, tuning, votes, filters, statistics."""

import numpy as np
import torch

import hush
from hush.accounting.compare import Setting, compare
from hush.accounting.filters import RenyiFilter, individual_gaussian_rdp
from hush.pate.argmax import Confident, NoisyMax, with_noise
from hush.pate.per_instance import per_instance
from hush_recipes.bounded.sampled import sampled_rdp
from hush_recipes.claims import CLAIMS
from hush_recipes.dpsur.gaussian_filter import GaussianFilter
from hush_recipes.dpsur.tuning import tune_selective
from hush_recipes.statistics.moments import NoisyMoments
from hush_recipes.statistics.quantile import NoisyQuantile
from tests.unchanged.entry import Entries, asked, entries
from tests.unchanged.numbers import FRACTIONAL, WHOLE

_BUDGET = hush.Budget(epsilon=2.0, delta=1e-5)


def studies() -> Entries:
    """All of them."""
    return {**_claims(), **_compared(), **_tuned(), **_votes(), **_filters(), **_statistics()}


def _claims() -> Entries:
    return entries("claims", {claim.source: [claim.printed, claim.true] for claim in CLAIMS})


def _compared() -> Entries:
    settings = {
        "plain": Setting(records=50_000, rate=0.02, steps=500, dimension=1000, budget=_BUDGET),
        "shaped": Setting(
            records=50_000,
            rate=0.02,
            steps=500,
            dimension=1000,
            budget=_BUDGET,
            cap=0.1,
            subspaces=((100, 2.0), (900, 1.0)),
        ),
    }
    numbers: Entries = {}
    for name, setting in settings.items():
        for row in compare(setting):
            columns = (row.deviation, row.variance, row.gradients)
            numbers |= entries(f"compare {name}, {row.method}", columns)
    return numbers


def _tuned() -> Entries:
    plan = hush.Plan(sampling=hush.Poisson(0.05), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    numbers: Entries = {}
    for test, updates in (("summed", 100), ("mean", 20)):
        tuned = tune_selective(
            plan,
            records=10_000,
            budget=hush.Budget(epsilon=4.0, delta=1e-5),
            updates=updates,
            test=test,  # type: ignore[arg-type]
        )
        parts = (tuned.plan, tuned.trials, tuned.guarantee, tuned.helpful, tuned.harmful)
        numbers |= entries(f"tune {test}", parts)
    return numbers


def _votes() -> Entries:
    scores = torch.from_numpy(np.random.default_rng(0).multinomial(250, [0.7, 0.2, 0.1], 30)).double()
    noises = {
        "Gaussian": hush.Gaussian(20.0),
        "Laplace": hush.Laplace(20.0),
        "GeneralizedGaussian1.5": hush.GeneralizedGaussian(beta=1.5, multiplier=30.0),
        "GeneralizedGaussian3": hush.GeneralizedGaussian(beta=3.0, multiplier=30.0),
    }
    numbers: Entries = {}
    for name, noise in noises.items():
        votes = {
            "replace": NoisyMax.of_votes(noise=noise),
            "add": NoisyMax.of_votes(noise=noise, neighbours=hush.Neighbours.ADD_REMOVE),
            "teachers": NoisyMax.of_teachers(noise=noise),
        }
        for kind, vote in votes.items():
            numbers |= asked(f"votes {name} {kind}", vote.guarantee, 30, 1e-5)
        vote = votes["replace"]
        test = Confident(vote=vote, threshold=150.0, noise=noise)
        seeded = torch.Generator().manual_seed(0)
        numbers |= {
            **asked(f"votes {name} answers", vote, scores, seeded),
            **asked(f"votes {name} confident", test.guarantee, 30, 1e-5, 10),
            **asked(f"votes {name} at hand", per_instance, vote, scores, 1e-5),
            **asked(f"votes {name} tested", per_instance, test, scores, 1e-5, 10),
            **asked(f"votes {name} noise", with_noise, test, _BUDGET, 30, 10),
        }
    return numbers


def _filters() -> Entries:
    renyi = RenyiFilter(orders=WHOLE, budget=np.array(WHOLE) / 2, records=2)
    gaussian = GaussianFilter(_BUDGET)
    costs = individual_gaussian_rdp([0.4, 0.9], 1.5, WHOLE)
    return {
        **entries("filter own", costs),
        **entries("filter admits", [renyi.admit(costs) for _ in range(6)]),
        **asked("filter odometer", renyi.odometer),
        **asked("filter guarantee", renyi.guarantee, 1e-5),
        **entries("gaussian filter", [gaussian.precision, gaussian.admit(0.01), gaussian.remaining]),
        **asked("gaussian filter guarantee", gaussian.guarantee, 1e-6),
    }


def _statistics() -> Entries:
    rows = np.random.default_rng(1).normal(size=(40, 3))
    numbers = {
        **asked("quantile", NoisyQuantile(multiplier=20.0).guarantee, 2, 1e-5),
        **asked("moments", NoisyMoments(multiplier=8.0).guarantee, 1e-5),
    }
    noises = {
        "Gaussian": hush.Gaussian(2.0),
        "Rectified": hush.Rectified(scale=2.0, bound=3.0),
        "Truncated": hush.Truncated(scale=2.0, bound=3.0),
        "StochasticSign": hush.StochasticSign(scale=2.0),
        "Quantized": hush.Quantized(scale=2.0, bound=3.0, levels=4),
    }
    for name, noise in noises.items():
        full = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(1.0), noise=noise)
        some = hush.Plan(sampling=hush.Coordinate(rate=0.5), clipping=hush.Linf(1.0), noise=noise)
        seeded = torch.Generator().manual_seed(2)
        private = hush.mean(rows, full, delta=1e-5, generator=seeded)
        numbers |= {
            **entries(f"mean {name}", [private.value, private.guarantee]),
            **asked(f"sampled {name}", sampled_rdp, some, rows[0], WHOLE),
            **asked(f"sampled {name} at", sampled_rdp, some, rows[0], FRACTIONAL),
        }
    return numbers
