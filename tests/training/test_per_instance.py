"""Per-instance costs of a run: against gradients and Jacobians computed one record at a time."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, Unproved, Unsupported
from hush.training.per_instance import PerInstance
from tests.training import helpers
from tests.training.helpers import plan_of

RECORDS, ORDERS = 7, [2.0, 6.0]
PLANS = {
    "rectified": (hush.L2(norm=0.7), hush.Rectified(scale=1.5, bound=1.0)),
    "truncated": (hush.Linf(norm=0.05), hush.Truncated(scale=0.4, bound=0.3)),
    "both": (hush.L2Linf(l2=0.5, linf=0.1), hush.Rectified(scale=1.0, bound=0.5)),
}


def model_of(hidden: int = 5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()


def data_of() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = 2 * torch.randn(RECORDS, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (RECORDS,), generator=generator)


def step_of(name: str = "rectified", model: nn.Module | None = None, **options: Any) -> hush.PrivateStep:
    usual: dict[str, Any] = {"plan": plan_of(None, *PLANS[name]), "records": RECORDS}
    usual |= {"execution": hush.Execution(physical_batch=3)}
    return helpers.step_of(model or model_of(), lr=0.5, seed=1, **{**usual, **options})


def clipped_gradient(model: nn.Module, clipping: Any, x: Tensor, y: Tensor) -> Tensor:
    """Clipped gradient of one record, by autograd alone."""
    loss = nn.functional.cross_entropy(model(x[None]), y[None])
    parts = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    gradient = torch.cat([part.reshape(-1) for part in parts])
    if not isinstance(clipping, hush.Linf):
        norm = clipping.norm if isinstance(clipping, hush.L2) else clipping.l2
        gradient = gradient * (norm / gradient.norm()).clamp(max=1.0)
    if not isinstance(clipping, hush.L2):
        limit = clipping.norm if isinstance(clipping, hush.Linf) else clipping.linf
        gradient = gradient.clamp(-limit, limit)
    return gradient


@pytest.mark.parametrize("name", PLANS)
def test_charges_and_information_are_those_of_explicit_gradients(name: str) -> None:
    step, (inputs, targets) = step_of(name), data_of()
    watched = PerInstance(step, ORDERS, iterations=200)
    charges, information = np.zeros((RECORDS, 2)), np.zeros(RECORDS)
    any_record = np.zeros(2)
    clipping, records = step.plan.clipping, list(zip(inputs, targets, strict=True))

    def clipped(x: Tensor, y: Tensor) -> Tensor:
        return clipped_gradient(step.model, clipping, x, y)

    for batch in step.batches((inputs, targets), steps=2):
        gradients = torch.stack([clipped(x, y) for x, y in records]).detach().numpy()
        location = gradients.sum(0)
        eta = torch.from_numpy(hush.fisher(step.plan, location))
        any_record += hush.individual_rdp(step.plan, location, ORDERS)
        for i, (x, y) in enumerate(records):
            charges[i] += hush.individual_rdp(step.plan, location, ORDERS, change=-gradients[i])
            jacobian = torch.autograd.functional.jacobian(partial(clipped, y=y), x)
            information[i] += float(torch.linalg.eigvalsh(jacobian.T @ (eta[:, None] * jacobian))[-1])
        watched.observe(batch)
        assert step(batch)
    assert watched.steps == 2
    assert watched.charges == pytest.approx(charges, rel=1e-6)
    assert watched.any_record == pytest.approx(any_record, rel=1e-6)
    assert (watched.charges <= watched.any_record * (1 + 1e-9)).all()
    assert (watched.information >= information * (1 - 1e-6)).all()
    assert watched.information == pytest.approx(information, rel=0.1)


def test_the_location_is_that_of_the_sum_that_runs() -> None:
    """A version that forgets a record, or the scale of clipping, has another location."""
    step, data = step_of(), data_of()
    batch = next(step.batches(data))
    watched = PerInstance(step, ORDERS)
    parts = [gradients for gradients, *_ in watched._clipped(batch)]
    total = np.concatenate(parts).sum(0)
    assert step.clipped_sum(batch).numpy() == pytest.approx(total, abs=1e-6)
    assert np.abs(np.concatenate(parts)[1:].sum(0) - total).max() > 1e-2


def test_an_empty_slot_costs_nothing() -> None:
    present = torch.arange(RECORDS) != 4
    step = step_of()
    watched = PerInstance(step, ORDERS)
    watched.observe(next(step.batches(data_of(), present=present)))
    assert (watched.charges[4] == 0).all()
    assert (watched.charges[present.numpy()] > 0).all()


def test_unknown_locations_are_refused() -> None:
    step = step_of(model=nn.Sequential(nn.Dropout(0.5), model_of()))
    with pytest.raises(Unsupported, match="forward passes draw at random"):
        PerInstance(step, ORDERS).observe(next(step.batches(data_of())))
    sampled = plan_of(hush.Poisson(rate=0.5), *PLANS["both"])
    with pytest.raises(Unproved, match="Use FullBatch"):
        PerInstance(step_of(plan=sampled), ORDERS)
    with pytest.raises(Unsupported, match="single records"):
        PerInstance(step_of(records=None, units=hush.Units(owners=[0] * RECORDS, per_unit=2)), ORDERS)
    step = step_of()
    batch = next(step.batches(data_of()))
    step(batch)
    with pytest.raises(DataError, match="before step"):
        PerInstance(step, ORDERS).observe(batch)
