"""Filters against the exact law of all courses of events, and rules that only look like filters."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm

import hush
from hush.accounting.filters import RenyiFilter, individual_gaussian_rdp

STEPS, SCALE, ORDERS = 5, 1.0, [2.0, 6.0]
PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.Linf(3.0), noise=hush.StochasticSign(scale=SCALE)
)
Past = tuple[int, ...]
Location = Callable[[Past], float | None]
"""The sum that the next sign is drawn around, by what was released before; None: no more is released."""


def law(location: Callable[[], Location]) -> dict[Past, float]:
    """The probability of every course of events; a filter is made anew for each, as it would be run."""
    chances: dict[Past, float] = {}
    for signs in itertools.product((-1, 1), repeat=STEPS):
        run, chance = location(), 1.0
        past: Past = ()
        for sign in signs:
            at = run(past)
            if at is None:
                break
            chance *= float(norm.cdf(sign * at / SCALE))
            past = (*past, sign)
        chances[past] = chance
    assert sum(chances.values()) == pytest.approx(1.0)
    return chances


def divergence(p: dict[Past, float], q: dict[Past, float], order: float) -> float:
    if any(chance and not q.get(past) for past, chance in p.items()):
        return math.inf
    return math.log(sum(p[x] ** order * q[x] ** (1 - order) for x in p)) / (order - 1)


def largest(with_it: Callable[[], Location], without: Callable[[], Location]) -> list[float]:
    p, q = law(with_it), law(without)
    return [max(divergence(p, q, order), divergence(q, p, order)) for order in ORDERS]


def gradient(record: int, past: Past) -> float:
    """Records answer to what was released: the first is small and steady, the second large."""
    mood = sum(past) + 0.5
    return (0.6 if mood > 0 else -0.9) if record == 0 else math.copysign(1.2, mood)


def realised(at: float, mine: float) -> np.ndarray:
    return hush.individual_rdp(PLAN, [at], ORDERS, change=[-mine])[None]


@pytest.mark.parametrize("removed", [0, 1])
def test_everyone_s_own_filter(removed: int) -> None:
    def run(present: tuple[int, ...]) -> Callable[[], Location]:
        def make() -> Location:
            guards = {k: RenyiFilter(orders=ORDERS, budget=[20.0, 60.0]) for k in present}

            def at(past: Past) -> float:
                sizes = {k: gradient(k, past) for k in present}
                admitted = [
                    g
                    for k, g in sizes.items()
                    if guards[k].admit(individual_gaussian_rdp([abs(g)], SCALE, ORDERS))[0]
                ]
                return sum(admitted)

            return at

        return make

    divergences = largest(run((0, 1)), run((1 - removed,)))
    assert (np.array(divergences) <= [20.0, 60.0]).all()
    assert divergences[0] > 0.1


def test_stopping_where_the_charge_says_so_tells_everything() -> None:
    """A budget is not enough: the neighbour's run would not stop at the same step."""
    costs = {at: hush.individual_rdp(PLAN, [at], ORDERS)[None] for at in (0.5, 2.0)}
    budget = (costs[0.5] + costs[2.0])[0] / 2

    def run(present: tuple[int, ...]) -> Callable[[], Location]:
        def make() -> Location:
            guard = RenyiFilter(orders=ORDERS, budget=budget)

            def at(past: Past) -> float | None:
                location = 0.5 if len(present) == 1 else 2.0
                return location if guard.admit(costs[location])[0] else None

            return at

        return make

    assert math.isinf(largest(run((0, 1)), run((1,)))[0])


def test_filters_for_all_that_look_at_the_location_exceed_their_budget() -> None:
    """The second record's push comes and goes with the presence of the first, which has little."""
    budgets = {0: [0.05, 0.5], 1: [0.93, 60.0]}

    def run(present: tuple[int, ...]) -> Callable[[], Location]:
        def make() -> Location:
            guards = {k: RenyiFilter(orders=ORDERS, budget=budgets[k]) for k in present}

            def at(past: Past) -> float:
                total = sum(gradient(k, past) for k in present)
                let = {k: guards[k].admit(realised(total, gradient(k, past)))[0] for k in present}
                return sum(gradient(k, past) for k in present if let[k])

            return at

        return make

    assert largest(run((0, 1)), run((1,)))[0] > 3 * budgets[0][0]


def test_the_guarantee_is_the_budget_and_may_be_published() -> None:
    guard = RenyiFilter(orders=[2.0, 8.0], budget=[0.5, 2.0])
    before = guard.guarantee(1e-5)
    guard.admit([[0.5, 2.0]])
    assert guard.guarantee(1e-5) == before
    assert before.notion == "dp"
    assert not before.sensitive
    # Canonne, Kamath and Steinke 2020, Proposition 12, at the better order
    expected = 2.0 + math.log1p(-1 / 8) - math.log(1e-5 * 8) / 7
    assert before.epsilon.upper == pytest.approx(expected)
