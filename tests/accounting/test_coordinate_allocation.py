"""The table for few large coordinates against exact laws of explicit allocations."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

import hush
from hush.accounting.epsilon import compose, deltas
from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld.coordinate_allocation import (
    CoordinateAllocationLaw,
    allocation_table,
    dominating_allocation,
)

_WIDTH = 1e-3


def one_coordinate(rate: float, change: float) -> tuple[Array, Array, int]:
    """Masses of the log-likelihood ratio on a grid, with and without the record, and the first place."""
    reach = 9.5 * change + change**2
    low = max(math.floor(math.log1p(-rate) / _WIDTH), math.floor(-reach / _WIDTH)) - 2
    high = math.ceil(reach / _WIDTH) + 2
    moved = (np.exp((np.arange(low, high + 2) - 0.5) * _WIDTH) - 1 + rate) / rate
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.where(moved > 0, (np.log(moved) + change**2 / 2) / change, -np.inf)
    without = np.diff(norm.cdf(place))
    return (1 - rate) * without + rate * np.diff(norm.cdf(place - change)), without, low


def laws(rate: float, changes: Sequence[float]) -> tuple[Array, Array]:
    """Masses of the product of coordinates, with and without the record, on a common grid."""
    first, second, _ = one_coordinate(rate, changes[0])
    for change in changes[1:]:
        other = one_coordinate(rate, change)
        first, second = fftconvolve(first, other[0]), fftconvolve(second, other[1])
    assert first.sum() == pytest.approx(1, abs=1e-6)
    assert second.sum() == pytest.approx(1, abs=1e-6)
    return np.maximum(first, 0), np.maximum(second, 0)


def exact(pair: tuple[Array, Array], record_rate: float, epsilon: float) -> tuple[float, float]:
    """delta of a sampled record in both directions."""
    mixed, without, z = (1 - record_rate) * pair[1] + record_rate * pair[0], pair[1], math.exp(epsilon)
    return float(np.maximum(mixed - z * without, 0).sum()), float(
        np.maximum(without - z * mixed, 0).sum()
    )


def charged(law: CoordinateAllocationLaw, epsilon: float) -> tuple[float, float]:
    """delta of the table in both directions, by definition."""
    table = allocation_table(law.coordinate_rate, law.entry, law.norm)
    assert table is not None
    ratios = 1 - law.rate + law.rate * np.exp(table.logs)
    z = math.exp(epsilon)
    removed = table.masses @ np.maximum(ratios - z, 0) + law.rate * table.infinite_mass
    return float(removed), float(table.masses @ np.maximum(1 - z * ratios, 0))


def allocations(pick: np.random.Generator, entry: float, size: float) -> list[list[float]]:
    """Changes of coordinates with a norm of at most `size` and entries of at most `entry`."""
    total, cap = size**2, min(entry, size) ** 2
    full = [cap] * int(total / cap + 1e-9)
    rest = total - sum(full)
    many = max(int(pick.integers(1, 30)), math.ceil(total / cap))
    uneven = pick.dirichlet(np.full(int(pick.integers(2, 7)), 0.7)) * total
    border = min(cap, total * 5.01 / 24)
    found = [full + [rest] * (rest > 1e-9), [total / many] * many, [border] * int(total / border)]
    found.append([min(float(each), cap) for each in uneven if each > 1e-6])
    found.append([cap] + [(total - cap) / 12] * 12 * (total - cap > 1e-9))
    return [[math.sqrt(each) for each in squares] for squares in found]


CASES = [(0.5, 0.8, 1.0), (1 / 3, 1.3, 1.3), (0.1, 1.5, 2.0), (0.5, 1.6, 2.0), (0.8, 0.5, 1.0)]


@pytest.mark.parametrize(("rate", "entry", "size"), CASES)
def test_no_allocation_costs_more_than_the_table(rate: float, entry: float, size: float) -> None:
    pick, closest = np.random.default_rng(1), 0.0
    for changes in allocations(pick, entry, size):
        pair = laws(rate, changes)
        for record_rate in (1.0, 0.2, 0.01):
            law = dominating_allocation(record_rate, rate, entry, size)
            assert law is not None
            for epsilon in (0.0, 0.1 * record_rate, 0.7 * record_rate, 2.0 * record_rate, 2.0):
                found, bounds = exact(pair, record_rate, epsilon), charged(law, epsilon)
                for delta, bound in zip(found, bounds, strict=True):
                    assert delta <= bound * (1 + 1e-5) + 1e-9
                    closest = max(closest, delta / bound if delta > 1e-6 else 0.0)
    assert closest > 0.8


@pytest.mark.parametrize(("rate", "entry", "size"), CASES)
def test_a_table_for_smaller_changes_is_caught(rate: float, entry: float, size: float) -> None:
    pick = np.random.default_rng(1)
    smaller = dominating_allocation(1.0, rate, 0.7 * entry, size)
    shorter = dominating_allocation(1.0, rate, 0.7 * entry, 0.7 * size)
    exceeded = {
        law: any(
            delta > 1.02 * bound + 1e-6
            for changes in allocations(pick, entry, size)
            for epsilon in (0.1, 1.0, 3.0)
            for delta, bound in zip(
                exact(laws(rate, changes), 1.0, epsilon), charged(law, epsilon), strict=True
            )
        )
        for law in (smaller, shorter)
        if law is not None
    }
    assert exceeded
    assert all(exceeded.values())


@pytest.mark.parametrize("direction", ["removed", "added"])
def test_the_accountant_composes_the_table(direction: str) -> None:
    law = dominating_allocation(0.1, 0.5, 0.8, 1.0)
    assert law is not None
    for epsilon in (0.05, 0.3):
        bound = accountant.delta({law: 1}, epsilon)
        one = charged(law, epsilon)[direction == "added"]
        assert one <= bound.upper * (1 + 1e-9)
    assert bound.upper <= 1.01 * max(charged(law, epsilon))
    ten = accountant.epsilon({law: 10}, 1e-5).upper
    assert accountant.epsilon({law: 1}, 1e-5).upper < ten < 10 * accountant.epsilon({law: 1}, 1e-6).upper


@pytest.mark.parametrize(
    ("rate", "steps", "most"), [(0.01, 1, 1.5), (0.001, 1, 0.062), (0.01, 100, 4.1)]
)
def test_a_step_with_few_large_coordinates_is_charged_by_the_table(
    rate: float, steps: int, most: float
) -> None:
    """Without coordinate sampling the charge was 3.03, 0.338 and 5.56."""
    plan = hush.Plan(
        sampling=hush.Twice(rate=rate, coordinate_rate=0.5),
        clipping=hush.L2Linf(l2=1.0, linf=0.8),
        noise=hush.Gaussian(0.5),
    )
    bound = hush.epsilon(plan, steps, 1e-5).epsilon
    assert bound.lower < bound.upper <= most
    assert bound.upper <= 1.3 * bound.lower
    if steps == 1:
        # the lower end is attained by two coordinates, and no lower end of one of them is as high
        two, one = laws(0.5, [1.6, 1.2]), laws(0.5, [1.6])
        assert max(exact(two, rate, bound.lower)) >= 0.999e-5
        assert max(exact(two, rate, 1.01 * bound.lower)) <= 1e-5
        assert max(exact(one, rate, bound.lower)) < 0.9e-5
        assert max(exact(two, rate, bound.upper)) <= 1e-5
        assert deltas({plan: 1}, [bound.upper])[0].upper == pytest.approx(1e-5, rel=0.05)


def test_a_ledger_with_other_steps_and_groups() -> None:
    twice = hush.Plan(
        sampling=hush.Twice(rate=0.01, coordinate_rate=0.5),
        clipping=hush.L2Linf(l2=1.0, linf=0.8),
        noise=hush.Gaussian(0.7),
    )
    plain = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    alone, both = compose({twice: 50}, 1e-5).epsilon, compose({twice: 50, plain: 50}, 1e-5).epsilon
    assert alone.lower < both.lower < both.upper
    assert compose({plain: 50}, 1e-5).epsilon.upper < both.upper
    group = hush.epsilon(twice, 50, 1e-5, group=2).epsilon
    assert alone.upper < group.upper
