"""Canaries in private runs: every plan that trains, tight where it can be, and broken ones caught."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.accounting.pld import analytic_gaussian
from hush.audit.canaries import CanaryRun, directions_for, run_with_canaries
from hush.audit.lower_bound import one_run
from hush.core.randomness import RandomSource
from hush.noise import Gaussian

DELTA, CANARIES = 1e-5, 24
POISSON, FULL, NORMAL = hush.Poisson(0.3), hush.FullBatch(), hush.Gaussian(2.0)
TWICE = hush.Twice(rate=0.5, coordinate_rate=0.5)
L2, LINF = hush.L2(1.0), hush.Linf(0.1)
PLANS = {
    "L2": (POISSON, L2, NORMAL),
    "Lp, Laplace": (POISSON, hush.Lp(p=1.0, norm=1.0), hush.Laplace(8.0)),
    "Lp": (FULL, hush.Lp(p=3.0, norm=1.0), hush.GeneralizedGaussian(beta=3.0, multiplier=20.0)),
    "Linf": (POISSON, LINF, hush.Gaussian(20.0)),
    "L2Linf": (TWICE, hush.L2Linf(l2=1.0, linf=0.2), NORMAL),
    "Coordinate": (hush.Coordinate(rate=0.5), hush.L2Linf(l2=1.0, linf=0.2), NORMAL),
    "Box": (
        POISSON,
        hush.Box(bounds=((30, 0.1), (25, 0.2))),
        hush.BlockGaussian(multipliers=(5.0, 5.0)),
    ),
    "Subspaces": (POISSON, hush.Subspaces(ranks=(30, 25), l2=(1.0, 0.5)), NORMAL),
    "Principal": (
        POISSON,
        hush.Subspaces(ranks=(5, 50), l2=(1.0, 0.5), bases=hush.Principal(groups=1, every=5)),
        NORMAL,
    ),
    "Banded": (
        hush.CyclicPoisson(rate=0.6, cycle=2),
        L2,
        hush.Banded(multiplier=2.0, strategy=(1.0, 0.5)),
    ),
    "Importance": (POISSON, hush.Importance(1.0), NORMAL),
    "Rectified": (FULL, LINF, hush.Rectified(scale=2.0, bound=9.0)),
    "Truncated": (FULL, LINF, hush.Truncated(scale=2.0, bound=9.0)),
    "StochasticSign": (FULL, LINF, hush.StochasticSign(scale=2.0)),
    "Quantized": (FULL, LINF, hush.Quantized(scale=2.0, bound=9.0, levels=8)),
}
SELECTIVE = hush.Selective(rate=0.3, clip=0.1, multiplier=3.0, threshold=0.0, test="summed")


def plans() -> dict[str, hush.Plan]:
    by_name = {
        name: hush.Plan(sampling=sampling, clipping=clipping, noise=noise)
        for name, (sampling, clipping, noise) in PLANS.items()
    }
    by_name["Selective"] = hush.Plan(sampling=POISSON, clipping=L2, noise=NORMAL, release=SELECTIVE)
    return by_name


def records(many: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(many, 10, generator=generator)
    return inputs, (inputs[:, 0] > 0).long()


def planted(
    plan: hush.Plan,
    *,
    steps: int,
    canaries: int = CANARIES,
    classes: int = 5,
    seed: int = 0,
    others: bool = True,
    physical_batch: int = 16,
    **options: Any,
) -> tuple[CanaryRun, Tensor]:
    """A run with directions for canaries."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, loss, data = nn.Linear(10, classes), nn.CrossEntropyLoss(), records(20)
    per_sample = nn.CrossEntropyLoss(reduction="none")
    aimed = directions_for(plan, model, per_sample, data, canaries, generator)
    included = torch.rand(canaries, generator=generator) < 0.5
    projected = isinstance(plan.clipping, hush.Subspaces) and plan.clipping.bases is not None
    run = run_with_canaries(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        plan,
        data,
        aimed,
        included,
        steps=steps,
        delta=DELTA,
        others=others,
        generator=torch.Generator().manual_seed(seed + 1000),
        physical_batch=physical_batch,
        public=records(30, 7) if projected else None,
        **options,
    )
    return run, included


@pytest.mark.parametrize("name", plans())
def test_every_plan_that_trains_can_be_audited(name: str) -> None:
    plan = plans()[name]
    run, included = planted(plan, steps=4)
    assert run.steps == 4
    charged = hush.epsilon(plan, 4, DELTA, dimension=55).epsilon.upper
    assert run.charge.epsilon.upper == pytest.approx(charged)
    bound = one_run(run.scores, included, delta=DELTA)
    assert bound.epsilon <= charged


def plan_of(multiplier: float) -> hush.Plan:
    return hush.Plan(sampling=FULL, clipping=L2, noise=hush.Gaussian(multiplier))


def test_a_canary_that_is_in_moves_the_sum_by_the_clipping_norm_and_no_more() -> None:
    """Without noise to speak of, each score is 1 or 0 over the divisor, times the steps."""
    run, included = planted(plan_of(1e-6), steps=5, others=False)
    torch.testing.assert_close(run.scores * (20 + CANARIES) / 5, included.double(), atol=1e-4, rtol=0)


def test_signs_fill_a_box_and_scores_see_it() -> None:
    plan = hush.Plan(sampling=FULL, clipping=LINF, noise=hush.Rectified(scale=1e-6, bound=9.0))
    run, included = planted(plan, steps=1, canaries=1, others=False, seed=0)
    assert bool(included)
    assert float(run.scores) == pytest.approx(55 * 0.1**2 / 21, rel=3e-3)


@pytest.mark.parametrize("bases", [None, hush.Principal(groups=1, every=5)])
def test_canaries_fill_every_subspace(bases: hush.Principal | None) -> None:
    """What one adds has the clipping norm in each block, and its trace is scored by that."""
    plan = hush.Plan(
        sampling=FULL,
        clipping=hush.Subspaces(ranks=(5, 50), l2=(1.0, 0.5), bases=bases),
        noise=hush.Gaussian(1e-6),
    )
    run, included = planted(plan, steps=3, canaries=1, others=False)
    assert bool(included)
    assert float(run.scores) * 21 / 3 == pytest.approx(1.0**2 + 0.5**2, rel=1e-3)


PRIVATIZE = Gaussian.privatize


def quarter(self: Gaussian, location: Tensor, *, norm: float, generator: RandomSource) -> Tensor:
    return PRIVATIZE(self, location, norm=norm / 4, generator=generator)


def test_noise_over_four_is_caught_and_what_runs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record in 25 steps of normal noise 20 is a separation of 1/4; with a quarter of it, of 1."""
    settings = {"steps": 25, "canaries": 400, "classes": 60, "physical_batch": 420}
    ran, included = planted(plan_of(20.0), others=False, **settings)
    charge = ran.charge.epsilon.upper
    assert charge == pytest.approx(analytic_gaussian.epsilon(0.25, DELTA).upper)
    sound = one_run(ran.scores, included, delta=DELTA)
    assert sound.epsilon <= charge
    assert sound.gaussian_epsilon <= charge
    monkeypatch.setattr(Gaussian, "privatize", quarter)
    broken, included = planted(plan_of(20.0), others=False, **settings)
    assert broken.charge == ran.charge
    bound = one_run(broken.scores, included, delta=DELTA)
    assert bound.separation > 0.25
    assert bound.gaussian_epsilon > charge


def test_absent_canaries_leave_no_trace_in_a_selective_test() -> None:
    """The verdicts of a run are those of the run whose canaries were never there."""
    release = hush.Selective(rate=1.0, clip=1.0, multiplier=1e-9, threshold=-1e-6, test="summed")
    plan = hush.Plan(sampling=FULL, clipping=L2, noise=hush.Gaussian(1e-9), release=release)
    x, y = records(20)
    weights = []
    for canary in (x[:3] * math.nan, x[:3]):
        torch.manual_seed(0)
        model = nn.Linear(10, 5)
        run_with_canaries(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.5),
            plan,
            (x, y),
            (canary, y[:3]),
            torch.zeros(3, dtype=torch.bool),
            steps=3,
            delta=DELTA,
            generator=torch.Generator().manual_seed(0),
        )
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights)
    assert not torch.allclose(weights[0], nn.Linear(10, 5).weight)
