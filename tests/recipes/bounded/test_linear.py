"""Closed-form descent and what it tells, against gradients taken one record at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import hush
from hush.accounting.filters import RenyiFilter
from hush.accounting.ledger import Ledger
from hush.core.errors import HushError, LedgerError
from hush.core.guarantee import Adjacency
from hush.core.parts import Noise
from hush_recipes.bounded.linear import LinearDescent

torch.manual_seed(0)
X, Y = torch.randn(60, 8), torch.randint(0, 3, (60,))
ORDERS = np.array([2.0, 8.0])


def plan(noise: Noise, norm: float = 0.3) -> hush.Plan:
    return hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(norm), noise=noise)


def gradients(weights: torch.Tensor, norm: float) -> torch.Tensor:
    """Each record's clamped gradient, by autograd in double precision."""
    rows = []
    for x, y in zip(X.double(), Y, strict=True):
        at = weights.double().clone().requires_grad_()
        (row,) = torch.autograd.grad(nn.functional.cross_entropy((x @ at.T)[None], y[None]), at)
        rows.append(row.clamp(-norm, norm).reshape(-1))
    return torch.stack(rows)


def test_it_learns_and_pays() -> None:
    x = torch.randn(2000, 10)
    y = (x[:, 0] > 0).long()
    noise = hush.Truncated(scale=20.0, bound=2000.0)
    descent = LinearDescent(
        x, y, plan(noise), classes=2, lr=4.0, generator=torch.Generator().manual_seed(0)
    )
    weights = list(descent.run(steps=10))[-1]
    assert float(((x @ weights.T).argmax(1) == y).float().mean()) > 0.93
    assert descent.spent(1e-5) == replace(
        hush.epsilon(descent.plan, 10, 1e-5, dimension=20), randomness="seeded"
    )


def test_charges_of_every_record() -> None:
    noise = hush.Rectified(scale=2.0, bound=1.0)
    descent = LinearDescent(X, Y, plan(noise), classes=3, lr=0.5, orders=ORDERS)
    location = gradients(torch.zeros(3, 8), 0.3)
    next(descent.run(steps=1))
    actual = descent.charges()
    total = location.sum(0).numpy()
    assert actual.for_all == pytest.approx(hush.individual_rdp(descent.plan, total, ORDERS), rel=1e-5)
    exact = hush.individual_rdp(descent.plan, total, ORDERS, change=-location.numpy())
    assert (exact <= actual.each * (1 + 1e-5)).all(), "no charge is below the record's own"
    own = (location**2).sum(1).numpy()[:, None] * ORDERS / (2 * 2.0**2)
    assert actual.each == pytest.approx(np.minimum(own, actual.for_all), rel=1e-5)
    assert (actual.for_all < hush.rdp(descent.plan, ORDERS, dimension=24)).all()


def test_records_are_left_out_when_their_budget_is_used() -> None:
    noise = hush.Rectified(scale=2.0, bound=1e3)
    budget = 3 * float((gradients(torch.zeros(3, 8), 0.3) ** 2).sum(1).median()) * ORDERS / (2 * 2.0**2)
    guard = RenyiFilter(orders=ORDERS, budget=budget, records=60)
    descent = LinearDescent(
        X,
        Y,
        plan(noise),
        classes=3,
        lr=0.0,
        individual=guard,
        generator=torch.Generator().manual_seed(1),
    )
    for _ in descent.run(steps=6):
        assert (guard.odometer() <= budget).all()
    # with a learning rate of 0 the costs repeat: those below a sixth of the budget were always let in
    own = (gradients(torch.zeros(3, 8), 0.3) ** 2).sum(1).numpy()[:, None] * ORDERS / (2 * 2.0**2)
    expected = np.minimum(6, np.floor(budget * (1 - 1e-9) / own)) * own
    assert guard.odometer() == pytest.approx(expected, rel=1e-4)
    assert (expected < 5.5 * own).any()
    assert descent.spent(1e-5).epsilon.upper <= guard.guarantee(1e-5).epsilon.upper
    long = hush.epsilon(descent.plan, 6, 1e-5, dimension=24).epsilon.upper
    assert descent.spent(1e-5).epsilon.upper < long, "the budget is less than six steps at worst"
    with pytest.raises(HushError, match="Pass RenyiFilter"):
        LinearDescent(
            X, Y, plan(noise), classes=3, lr=1.0, individual=RenyiFilter(orders=ORDERS, budget=budget)
        )


def test_a_filter_says_nothing_of_other_steps_on_the_ledger() -> None:
    ledger, noisy = Ledger(), plan(hush.Gaussian(10.0))
    own = RenyiFilter(orders=ORDERS, budget=0.01 * ORDERS, records=len(X))

    def descent(individual: RenyiFilter | None) -> LinearDescent:
        return LinearDescent(X, Y, noisy, classes=3, lr=0.1, ledger=ledger, individual=individual)

    first = descent(own)
    list(first.run(steps=2))
    assert first.spent(1e-5) == own.guarantee(1e-5)
    pair = first.spent(1e-5, group=2)
    assert pair == ledger.epsilon(1e-5, group=2), "the filter's budget is one record's"
    list(descent(None).run(steps=200))
    for each in (first, descent(RenyiFilter(orders=ORDERS, budget=0.01 * ORDERS, records=len(X)))):
        assert each.spent(1e-5) == ledger.epsilon(1e-5)
        assert each.spent(1e-5).epsilon.lower > own.guarantee(1e-5).epsilon.upper


def test_a_ledger_of_users_is_refused() -> None:
    ledger, noisy = Ledger(), plan(hush.Gaussian(10.0))
    users = Adjacency(per_unit=2)
    ledger.charge(noisy, run="a", step=1, release="x", dimension=24, adjacency=users)
    with pytest.raises(LedgerError, match="do not add up"):
        next(LinearDescent(X, Y, noisy, classes=3, lr=0.1, ledger=ledger).run(steps=1))
    assert sum(ledger.counts.values()) == 1
