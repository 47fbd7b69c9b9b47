"""Trials with normal noise on a fixed support: charges against laws that are written out in cells.

A cell tells less than its points do, so a divergence over cells is a lower bound on the true one. Units:
deviation 1, and a test whose number lies within one unit.
"""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import norm
from torch import nn

import hush
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.selective import Trial
from hush.accounting.steps import SampledGaussian
from hush.core.errors import Unproved, Unsupported
from hush.core.parts import Clipping, Noise
from hush_recipes.bounded.linear import LinearDescent
from hush_recipes.bounded.sampled import sampled_rdp

Array = npt.NDArray[np.float64]
BOUND, LEVELS = 1.2, 4
NOISES: dict[str, Noise] = {
    "rectified": hush.Rectified(scale=1.0, bound=BOUND),
    "truncated": hush.Truncated(scale=1.0, bound=BOUND),
    "sign": hush.StochasticSign(scale=1.0),
    "quantized": hush.Quantized(scale=1.0, bound=BOUND, levels=LEVELS),
}


def law(kind: str, location: float, bound: float = BOUND, cells: int = 300) -> Array:
    """Probabilities of cells under the law at a location: ends first and last, if they have any."""
    if kind == "sign":
        edges = np.zeros(1)
    elif kind == "quantized":
        levels = np.linspace(-bound, bound, LEVELS)
        edges = (levels[1:] + levels[:-1]) / 2
    else:
        edges = np.linspace(-bound, bound, cells + 1)
    ends = np.concatenate([[-np.inf], edges, [np.inf]]) - location
    below, above = norm.cdf(ends), norm.sf(ends)
    # from the lighter tail, where differences keep their digits
    masses: Array = np.where(ends[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    if kind == "truncated":
        masses = masses[1:-1] / masses[1:-1].sum()
    return masses


def divergence(first: Array, second: Array, order: float) -> float:
    log_moment = np.logaddexp.reduce(order * np.log(first) + (1 - order) * np.log(second))
    return float(log_moment) / (order - 1)


def worst_trial(present: Array, absent: Array, release: hush.Selective, order: float) -> float:
    """The larger divergence of the trials of some adversaries: the worst corner at each outcome, for the
    moment of either direction, and records that turn the verdict on a share of the outcomes."""
    low, high = norm.cdf((release.threshold + np.array([-1, 1])) / (2 * release.multiplier))
    without, drawn = np.array([(u, b) for u in (low, high) for b in (low, high)]).T[:, :, None]
    accepted = (1 - release.rate) * without + release.rate * drawn
    ratio = present / absent * accepted / without
    adversaries = []
    for weight, each in ((without * absent, ratio), (accepted * present, 1 / ratio)):
        corner = (weight * (each**order - 1 - order * (each - 1))).argmax(0)
        adversaries.append((without[corner, 0], drawn[corner, 0]))
    for share in (0.2, 0.5, 0.8):
        turned = np.cumsum(absent) <= share
        adversaries.append((np.where(turned, low, high), np.where(turned, high, low)))
    found = []
    for alone, with_record in adversaries:
        joined = (1 - release.rate) * alone + release.rate * with_record
        first, second = (np.append(part, 1 - part.sum()) for part in (joined * present, alone * absent))
        found += [divergence(first, second, order), divergence(second, first, order)]
    return max(found)


def plan(noise: Noise, release: hush.Selective, clipping: Clipping) -> hush.Plan:
    return hush.Plan(sampling=hush.FullBatch(), clipping=clipping, noise=noise, release=release)


def mean_test(rate: float, multiplier: float, threshold: float) -> hush.Selective:
    return hush.Selective(rate=rate, clip=1.0, multiplier=multiplier, threshold=threshold, test="mean")


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("coordinates", [1, 2])
def test_no_trial_costs_more_than_either_charge(kind: str, coordinates: int) -> None:
    rng = np.random.default_rng(coordinates)
    nearest = 0.0
    for _ in range(12):
        norm_, order = float(rng.uniform(0.2, 2)), float(rng.choice([1.5, 2.0, 6.0]))
        release = mean_test(*rng.uniform((0.01, 0.5, -1.0), (1.0, 3.0, 1.0)).tolist())
        chosen = plan(NOISES[kind], release, hush.Linf(norm_))
        location = rng.uniform(-3, 3, coordinates)
        change = norm_ * rng.choice([-1, 1], coordinates)
        cells = 300 if coordinates == 1 else 40
        absent, present = np.ones(1), np.ones(1)
        for at, moved in zip(location, location + change, strict=True):
            absent = np.outer(absent, law(kind, at, cells=cells)).ravel()
            present = np.outer(present, law(kind, moved, cells=cells)).ravel()
        found = worst_trial(present, absent, release, order)
        for_all = float(hush.individual_rdp(chosen, location, [order])[0])
        for_any = float(hush.rdp(chosen, [order], dimension=coordinates)[0])
        for_one = float(hush.individual_rdp(chosen, location, [order], change=change)[0])
        assert found <= for_one * (1 + 1e-9) <= for_all * (1 + 2e-9) <= for_any * (1 + 3e-9)
        nearest = max(nearest, found / for_one)
    assert nearest > 0.5, "the adversaries are not far from the charge"


def test_the_step_s_own_charge_is_too_little_for_its_trial() -> None:
    """A charge without the test fails: a sum far outside the support is hidden, its verdict not."""
    release, order = mean_test(1.0, 0.8, -1.0), 2.0
    chosen = plan(hush.Rectified(scale=1.0, bound=1.0), release, hush.Linf(1.0))
    absent, present = law("rectified", 6.0, 1.0), law("rectified", 5.0, 1.0)
    found = worst_trial(present, absent, release, order)
    step = float(
        hush.individual_rdp(hush.Plan(**{**vars(chosen), "release": hush.Always()}), [6.0], [order])[0]
    )
    assert step < 0.004 < 0.9 < found
    assert found <= float(hush.individual_rdp(chosen, [6.0], [order])[0])


def test_a_divergence_does_not_tell_what_a_trial_costs() -> None:
    """Why the rebate of a mean test is not given for the records at hand: of a normal step with the same
    divergence at that order the trial costs less than of this one."""
    release, order, bound = mean_test(0.01, 7.1, 0.85), 1.69, 4.53
    absent, present = law("rectified", -4.88, bound, 4000), law("rectified", -4.89, bound, 4000)
    found = worst_trial(present, absent, release, order)
    step = max(divergence(present, absent, order), divergence(absent, present, order))
    test = SampledGaussian(release.rate, release.multiplier)
    normal = Trial(SampledGaussian(1.0, math.sqrt(order / (2 * step))), test, release.threshold / 2)
    assert found > 1.01 * float(normal.rdp(np.array([order]))[0])
    assert found < step + float(renyi_divergence(test, [order])[0])
    chosen = plan(hush.Rectified(scale=1.0, bound=bound), release, hush.Linf(0.01))
    assert found < float(hush.individual_rdp(chosen, [-4.88], [order])[0])


def test_hidden_trials_and_other_numbers_of_the_records_are_refused() -> None:
    hidden = hush.Selective(rate=0.2, clip=1.0, multiplier=1.0, accounting="per-acceptance", test="mean")
    linf = hush.Linf(0.5)
    with pytest.raises(Unproved, match="selected among hidden"):
        hush.individual_rdp(plan(NOISES["truncated"], hidden, linf), [0.0], [2.0])
    tested = plan(NOISES["truncated"], mean_test(0.2, 1.0, 0.0), linf)
    with pytest.raises(Unproved, match="release=Selective"):
        hush.fisher(tested, [0.0])
    sampled = hush.Plan(**{**vars(tested), "sampling": hush.Coordinate(rate=0.5)})
    with pytest.raises(Unproved, match="release=Selective"):
        sampled_rdp(sampled, [0.0], [2.0])
    with pytest.raises(Unsupported, match="untested"):
        LinearDescent(torch.ones(4, 2), torch.zeros(4).long(), tested, classes=2, lr=1.0)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_step_runs_and_charges_trials_on_a_support(noise: Noise) -> None:
    model = nn.Linear(3, 2)
    chosen = plan(noise, mean_test(0.5, 1.0, 0.0), hush.Linf(0.5))
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        chosen,
        records=8,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(0)),
    )
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2
    moved = []
    for batch in step.batches(data, steps=12):
        before = [weight.detach().clone() for weight in model.parameters()]
        accepted = step(batch)
        same = all(map(torch.equal, before, model.parameters()))
        assert same is not accepted
        moved.append(accepted)
    assert 0 < sum(moved) < 12
    assert step.spent(1e-5).epsilon == hush.epsilon(chosen, 12, 1e-5, dimension=8).epsilon
