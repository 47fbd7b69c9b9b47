"""Batches of a largest or a fixed size: charges against neighbours, closed forms and dp-accounting."""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.signal import fftconvolve
from scipy.stats import binom, norm
from torch import nn

import hush
from hush.accounting.epsilon import deltas
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import Adjacency
from hush.core.parts import Sampling
from hush.core.randomness import Stream

_GRID = np.linspace(-14.0, 14.0, 20_001)


def plan_of(sampling: Sampling, multiplier: float = 1.0) -> hush.Plan:
    return hush.Plan(sampling=sampling, clipping=hush.L2(1.0), noise=hush.Gaussian(multiplier))


def truncated(limit: int, records: int = 25_600, rate: float = 0.01) -> hush.TruncatedPoisson:
    return hush.TruncatedPoisson(rate=rate, max_batch=limit, records=records)


@pytest.mark.parametrize(("limit", "slack"), [(300, 1.01), (350, 1.001)])
def test_truncation_costs_what_dp_accounting_finds(limit: int, slack: float) -> None:
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(25_600, 0.01, limit, 1.0)
    theirs = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    theirs.compose(event, 1000)
    ours = hush.epsilon(plan_of(truncated(limit)), 1000, 1e-5).epsilon
    assert ours.upper <= slack * theirs.get_epsilon(1e-5)
    assert ours.lower <= theirs.get_epsilon(1e-5)
    if limit == 300:
        poisson = hush.epsilon(plan_of(hush.Poisson(0.01)), 1000, 1e-5).epsilon
        assert ours.upper > 1.5 * poisson.upper, "a charge that ignores the truncation is caught"


def selections(sampling: Sampling) -> Iterator[tuple[float, frozenset[int]]]:
    """All sets that a sampling of a few slots can select, with their probabilities."""
    assert isinstance(sampling, hush.TruncatedPoisson | hush.FixedSize)
    slots = range(sampling.records)
    if isinstance(sampling, hush.FixedSize):
        chosen = list(itertools.combinations(slots, sampling.size))
        yield from ((1 / len(chosen), frozenset(each)) for each in chosen)
        return
    for count in range(sampling.records + 1):
        for drawn in itertools.combinations(slots, count):
            chance = sampling.rate**count * (1 - sampling.rate) ** (sampling.records - count)
            kept = list(itertools.combinations(drawn, min(count, sampling.max_batch)))
            yield from ((chance / len(kept), frozenset(each)) for each in kept)


@lru_cache
def _masses(mean: float, deviation: float) -> np.ndarray:
    return np.asarray(norm.pdf(_GRID, mean, deviation) * (_GRID[1] - _GRID[0]))


def hockey_sticks(
    sampling: Sampling,
    deviation: float,
    gradients: tuple[float, ...],
    epsilons: list[float],
    replacement: float = 0.0,
) -> list[float]:
    """Deltas of one step, the larger of both directions: slot 0 is filled, or empty (replaced)."""
    weights: tuple[dict[float, float], dict[float, float]] = {}, {}
    for chance, chosen in selections(sampling):
        others = sum((gradients[slot] for slot in chosen if slot), 0.0)
        own = (gradients[0], replacement) if 0 in chosen else (0.0, 0.0)
        for law, mean in zip(weights, (others + own[0], others + own[1]), strict=True):
            law[mean] = law.get(mean, 0.0) + chance
    filled, empty = (
        np.asarray(sum(weight * _masses(mean, deviation) for mean, weight in law.items()))
        for law in weights
    )
    return [
        max(float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum()) for one, other in pair)
        for epsilon in epsilons
        for pair in [((filled, empty), (empty, filled))]
    ]


SMALL = [
    hush.TruncatedPoisson(rate=0.5, max_batch=2, records=5),
    hush.TruncatedPoisson(rate=0.3, max_batch=1, records=4),
    hush.TruncatedPoisson(rate=0.2, max_batch=3, records=5),
    hush.FixedSize(size=2, records=5),
    hush.FixedSize(size=1, records=3),
]


@pytest.mark.parametrize("sampling", SMALL, ids=str)
@pytest.mark.parametrize("deviation", [0.7, 1.5])
@pytest.mark.parametrize("replacement", [0.0, -1.0], ids=["removed", "replaced"])
def test_no_neighbours_cost_more_than_a_step_is_charged(
    sampling: Sampling, deviation: float, replacement: float
) -> None:
    epsilons = [0.0, 0.3, 1.0, 2.0, 4.0]
    relation = hush.Neighbours.REPLACE if replacement else hush.Neighbours.ZERO_OUT
    charged = deltas({plan_of(sampling, deviation): 1}, epsilons, None, Adjacency(neighbours=relation))
    worst = [0.0] * len(epsilons)
    records = sampling.records  # type: ignore[attr-defined]
    for others in itertools.product([-1.0, 0.0, 1.0], repeat=records - 1):
        found = hockey_sticks(sampling, deviation, (1.0, *others), epsilons, replacement)
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    for bound, delta in zip(charged, worst, strict=True):
        assert bound.lower * (1 - 1e-6) - 1e-12 <= delta <= bound.upper * (1 + 1e-6) + 1e-12
    # the charge of Poisson sampling at the same rate is violated where records compete
    if isinstance(sampling, hush.FixedSize):
        plan = plan_of(hush.Poisson(sampling.participation), deviation)
        poisson = deltas({plan: 1}, epsilons, None, Adjacency(neighbours=relation))
        assert any(delta > 1.05 * bound.upper for bound, delta in zip(poisson, worst, strict=True))
        # the charge of a fixed size is attained, and the lower end follows it
        for bound, delta in zip(charged, worst, strict=True):
            assert delta >= bound.upper * (1 - 2e-3) - 1e-9
            assert bound.lower >= delta * (1 - 2e-3) - 1e-9


def test_no_directions_in_the_plane_cost_more() -> None:
    pick, side = np.random.default_rng(4), np.linspace(-9.0, 9.0, 601)
    x, y = np.meshgrid(side, side)

    def normal(centre: np.ndarray) -> np.ndarray:
        masses = np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / 2)
        return np.asarray(masses / masses.sum())

    sampling, epsilons = hush.FixedSize(size=2, records=5), [0.0, 0.5, 1.5]
    removed, replaced = (
        deltas({plan_of(sampling): 1}, epsilons, None, Adjacency(neighbours=relation))
        for relation in (hush.Neighbours.ZERO_OUT, hush.Neighbours.REPLACE)
    )
    exceeded = False
    for trial in range(30):
        own, other, another = pick.normal(size=(3, 2))
        own, other, another = (each / max(1.0, np.linalg.norm(each)) for each in (own, other, another))
        if trial % 3 == 0:
            other = another = -own / np.linalg.norm(own)
        base = 0.6 * normal(np.zeros(2))
        with_record = base + 0.4 * normal(own - other)
        for bounds, own_place in ((removed, np.zeros(2)), (replaced, another)):
            without = base + 0.4 * normal(own_place - other)
            for bound, epsilon in zip(bounds, epsilons, strict=True):
                found = max(
                    float(np.maximum(one - math.exp(epsilon) * two, 0.0).sum())
                    for one, two in ((with_record, without), (without, with_record))
                )
                assert found <= bound.upper * (1 + 2e-3) + 1e-6
                exceeded |= bounds is replaced and found > 1.1 * removed[epsilons.index(epsilon)].upper
    assert exceeded, "the charge of a removed record does not cover a replaced one"


def two_sided_losses(rate: float, multiplier: float, replaced: bool) -> tuple[np.ndarray, np.ndarray]:
    """Losses and masses of the pair of a full batch, on a fine grid of outcomes."""
    x = np.linspace(-14.0, 16.0, 60_001) * max(1.0, multiplier)

    def law(change: float) -> np.ndarray:
        densities = (1 - rate) * norm.pdf(x, 0, multiplier) + rate * norm.pdf(x, change, multiplier)
        return np.asarray(densities * (x[1] - x[0]))

    gained, lost = (law(2), law(0 if replaced else 1)), (law(2 if replaced else 1), law(0))
    losses, masses = [], []
    for sign, (first, second) in ((1, gained), (-1, lost)):
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.log(first / second)
        positive = loss > 0
        losses.append(sign * loss[positive])
        masses.append((first if sign == 1 else second)[positive])
    masses.append(np.array([1 - sum(each.sum() for each in masses)]))
    return np.append(np.concatenate(losses), 0.0), np.concatenate(masses)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("rate", "multiplier"), [(0.3, 2.0), (0.05, 1.5), (0.9, 1.5)])
def test_two_steps_of_fixed_size_cost_what_the_two_sided_pair_costs(
    rate: float, multiplier: float, replaced: bool
) -> None:
    records = 1000
    plan = plan_of(hush.FixedSize(size=round(rate * records), records=records), multiplier)
    relation = hush.Neighbours.REPLACE if replaced else hush.Neighbours.ZERO_OUT
    losses, masses = two_sided_losses(rate, multiplier, replaced)
    width = 1e-3
    places = np.round(losses / width).astype(int)
    histogram = np.bincount(places - places.min(), masses)
    twice = fftconvolve(histogram, histogram)
    total = (np.arange(len(twice)) + 2 * places.min()) * width
    for epsilon in (0.2, 0.8, 2.0):
        expected = float((twice * np.maximum(-np.expm1(epsilon - total), 0.0)).sum())
        bound = deltas({plan: 2}, [epsilon], None, Adjacency(neighbours=relation))[0]
        assert bound.upper == pytest.approx(expected, rel=1e-2)
        assert bound.lower <= expected * (1 + 5e-3)


def test_one_step_of_fixed_size_costs_half_the_noise_of_poisson_if_replaced() -> None:
    fixed = hush.FixedSize(size=256, records=25_600)
    halved = plan_of(hush.Poisson(0.01), 1.0)
    for delta in (1e-3, 1e-5):
        removed, replaced = (
            hush.epsilon(plan_of(fixed, 2.0), 1, delta, neighbours=relation).epsilon.upper
            for relation in (hush.Neighbours.ZERO_OUT, hush.Neighbours.REPLACE)
        )
        expected = hush.epsilon(halved, 1, delta).epsilon.upper
        assert replaced == pytest.approx(expected, rel=1e-3)
        assert removed < 0.95 * expected


def test_fixed_size_costs_less_than_the_general_bound() -> None:
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, 10, dp_accounting.GaussianDpEvent(1.0)
    )  # in units of a replaced record, which moves the sum by two norms
    theirs = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    theirs.compose(event, 500)
    sampling = hush.FixedSize(size=10, records=1000)
    ours = hush.epsilon(plan_of(sampling, 2.0), 500, 1e-5).epsilon.upper
    assert 0.2 * theirs.get_epsilon(1e-5) < ours < theirs.get_epsilon(1e-5)


@pytest.mark.parametrize("sampling", [truncated(300), SMALL[0], SMALL[3]], ids=str)
def test_renyi_divergences_bound_the_loss_distribution(sampling: Sampling) -> None:
    plan = plan_of(sampling, 2.0)
    orders = [2.0, 4.0, 8.0]
    for order, cost in zip(orders, hush.rdp(plan, orders), strict=True):
        assert cost >= hush.rdp(plan_of(hush.Poisson(sampling.participation), 2.0), [order])[0] * 0.999
    if isinstance(sampling, hush.FixedSize):
        losses, masses = two_sided_losses(sampling.participation, 2.0, replaced=True)
        for order, cost in zip(orders, hush.rdp(plan, orders), strict=True):
            exact = math.log(float((masses * np.exp((order - 1) * losses)).sum())) / (order - 1)
            assert exact <= cost * (1 + 1e-6)


def draws(sampling: Sampling, count: int) -> list[list[int]]:
    records = sampling.records  # type: ignore[attr-defined]
    source = Stream(torch.device("cpu"), bytes(range(32)))
    return [sampling.draw(records, source).tolist() for _ in range(count)]


@pytest.mark.parametrize("sampling", SMALL, ids=str)
def test_draws_have_the_probabilities_that_are_charged(sampling: Sampling) -> None:
    expected: dict[frozenset[int], float] = {}
    for chance, chosen in selections(sampling):
        expected[chosen] = expected.get(chosen, 0.0) + chance
    count = 3000
    found = draws(sampling, count)
    assert all(each == sorted(set(each)) for each in found)
    sets = [frozenset(each) for each in found]
    for chosen, chance in expected.items():
        limit = 5 * math.sqrt(chance * (1 - chance) / count) + 1e-9
        assert abs(sets.count(chosen) / count - chance) < limit
    records = sampling.records  # type: ignore[attr-defined]
    assert sum(map(len, sets)) / count == pytest.approx(sampling.participation * records, rel=0.05)


def test_truncation_that_keeps_the_first_records_is_caught() -> None:
    sampling = SMALL[0]
    assert isinstance(sampling, hush.TruncatedPoisson)
    source = Stream(torch.device("cpu"), bytes(range(32)))
    first = [
        hush.Poisson(sampling.rate).draw(sampling.records, source)[: sampling.max_batch].tolist()
        for _ in range(3000)
    ]
    share = sum(0 in each for each in first) / 3000
    ours = sum(0 in each for each in draws(sampling, 3000)) / 3000
    assert ours == pytest.approx(sampling.participation, abs=0.05)
    assert share > sampling.participation + 0.05


def test_the_probability_to_be_in_a_truncated_batch() -> None:
    for limit in (1, 200, 256, 300):
        sampling = truncated(limit)
        drawn = binom(25_600, 0.01)
        mean = sum(min(k, limit) * float(drawn.pmf(k)) for k in range(1000))
        assert sampling.participation == pytest.approx(mean / 25_600, rel=1e-9)


@pytest.mark.parametrize(
    "sampling", [truncated(12, 40, 0.25), hush.FixedSize(size=10, records=40)], ids=str
)
def test_a_model_trains_and_another_number_of_slots_is_refused(sampling: Sampling) -> None:
    inputs, targets = torch.randn(40, 6), torch.randint(0, 3, (40,))
    loss = nn.CrossEntropyLoss()

    def step_of(records: int, **options: object) -> hush.PrivateStep:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hush.PrivateStep(
            model,
            loss,
            optimizer,
            plan_of(sampling),
            records=records,
            **options,  # type: ignore[arg-type]
        )

    step = step_of(40)
    for batch in step.batches((inputs, targets), steps=8):
        assert len(batch) <= 12
        assert step(batch)
    guarantee = step.spent(1e-3)
    assert guarantee.epsilon.upper == hush.epsilon(plan_of(sampling), 8, 1e-3).epsilon.upper
    with pytest.raises(InvalidValue, match="records=40"):
        step_of(41)
    with pytest.raises(Unproved, match="number of slots"):
        step_of(40, neighbours=hush.Neighbours.ADD_REMOVE)
    with pytest.raises(Unproved, match="number of slots"):
        hush.epsilon(plan_of(sampling), 8, 1e-3, neighbours=hush.Neighbours.ADD_REMOVE)


def test_replaced_records_and_groups_cost_more() -> None:
    plan = plan_of(truncated(350))
    one = hush.epsilon(plan, 100, 1e-5).epsilon.upper
    for options in ({"group": 2}, {"neighbours": hush.Neighbours.REPLACE}):
        assert hush.epsilon(plan, 100, 1e-5, **options).epsilon.upper > one


def test_more_places_than_records_are_refused() -> None:
    with pytest.raises(InvalidValue, match="no record is drawn twice"):
        hush.FixedSize(size=11, records=10)
