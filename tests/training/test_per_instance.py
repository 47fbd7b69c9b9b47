"""Per-instance costs of a run: against gradients and Jacobians computed one record at a time."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hush
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.core.errors import CheckpointError, DataError, InvalidValue, Unproved, Unsupported
from hush.training.per_instance import PerInstance, lanczos_error
from tests.training import helpers
from tests.training.helpers import plan_of

RECORDS, ORDERS = 7, [2.0, 6.0]
PLANS = {
    "rectified": (hush.L2(0.7), hush.Rectified(scale=1.5, bound=1.0)),
    "truncated": (hush.Linf(0.05), hush.Truncated(scale=0.4, bound=0.3)),
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
    watched = PerInstance(ORDERS, iterations=200)
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
        assert step(watched.observe(step, batch))
    assert watched.steps == 2
    assert watched.charges == pytest.approx(charges, rel=1e-6)
    assert watched.any_record == pytest.approx(any_record, rel=1e-6)
    assert (watched.charges <= watched.any_record * (1 + 1e-9)).all()
    assert watched.information == pytest.approx(information, rel=1e-6)
    assert watched.eigenvalue_error == 0, "as many iterations as inputs are exact"
    assert watched.worst_case == pytest.approx(2 * hush.rdp(step.plan, ORDERS, dimension=43))


def test_the_location_is_that_of_the_sum_that_runs() -> None:
    """A version that forgets a record, or the scale of clipping, has another location."""
    step, data = step_of(), data_of()
    batch = next(step.batches(data))
    watched = PerInstance(ORDERS)
    parts = [gradients for gradients, *_ in watched._clipped(step, batch)]
    total = np.concatenate(parts).sum(0)
    assert step.clipped_sum(batch).numpy() == pytest.approx(total, abs=1e-6)
    assert np.abs(np.concatenate(parts)[1:].sum(0) - total).max() > 1e-2


def test_an_empty_slot_costs_nothing() -> None:
    present = torch.arange(RECORDS) != 4
    step = step_of()
    watched = PerInstance(ORDERS)
    watched.observe(step, next(step.batches(data_of(), present=present)))
    assert (watched.charges[4] == 0).all()
    assert (watched.charges[present.numpy()] > 0).all()


def test_unknown_locations_are_refused() -> None:
    step = step_of(model=nn.Sequential(nn.Dropout(0.5), model_of()))
    with pytest.raises(Unsupported, match="forward passes are random"):
        PerInstance(ORDERS).observe(step, next(step.batches(data_of())))
    sampled = plan_of(hush.Poisson(0.5), *PLANS["both"])
    with pytest.raises(Unproved, match="Use FullBatch"):
        PerInstance(ORDERS).check(step_of(plan=sampled), RECORDS)
    owned = step_of(records=None, units=hush.Units(owners=[0] * RECORDS, per_unit=2))
    with pytest.raises(Unsupported, match="single records"):
        PerInstance(ORDERS).check(owned, RECORDS)
    step = step_of()
    batch = next(step.batches(data_of()))
    step(batch)
    with pytest.raises(DataError, match="before step"):
        PerInstance(ORDERS).observe(step, batch)


def test_watched_slots_have_the_numbers_that_all_have() -> None:
    every, some = PerInstance(ORDERS, iterations=20), PerInstance(ORDERS, slots=[5, 1], iterations=20)
    for watched in (every, some):
        torch.manual_seed(0)
        step = step_of()
        for batch in step.batches(data_of(), steps=2):
            step(watched.observe(step, batch))
    assert some.charges == pytest.approx(every.charges[[1, 5]])
    assert some.information == pytest.approx(every.information[[1, 5]], rel=1e-6)
    assert some.epsilons(1e-5).shape == some.losses().shape == (2,)
    assert (some.epsilons(1e-5) <= some.any_record_epsilon(1e-5)).all()
    with pytest.raises(InvalidValue, match="slots=9 must be below the 7 slots"):
        PerInstance(ORDERS, slots=[9]).check(step_of(), RECORDS)


def test_a_guard_leaves_out_records_whose_budget_is_used() -> None:
    """Costs by explicit gradients: a record takes part exactly while they fit its budget."""
    budget = np.array([0.5, 1.5])
    guard = hush.RenyiFilter(orders=ORDERS, budget=budget, records=RECORDS)
    step, watched = step_of(), PerInstance(ORDERS, guard=guard)
    present = []
    spent = np.zeros((RECORDS, 2))
    for batch in step.batches(data_of(), steps=4):
        norms = [
            float(clipped_gradient(step.model, step.plan.clipping, x, y).detach().norm())
            for x, y in zip(*data_of(), strict=True)
        ]
        costs = np.outer(np.square(norms), ORDERS) / 2 / 1.5**2
        admitted = (spent + costs <= budget).all(1)
        spent[admitted] += costs[admitted]
        kept = watched.observe(step, batch)
        assert kept.present is not None
        assert kept.present.tolist() == admitted.tolist()
        present.append(admitted)
        step(kept)
    assert present[0].all()
    assert not present[-1].all(), "the budget is used up"
    assert guard.odometer() == pytest.approx(spent, rel=1e-6)
    promised = watched.guarantee(1e-5)
    assert (promised.notion, promised.arithmetic) == ("dp", "assumed")
    assert promised.epsilon.upper < float(step.spent(1e-5))
    small = hush.RenyiFilter(orders=ORDERS, budget=budget, records=3)
    with pytest.raises(InvalidValue, match="one record for each of the 7 slots"):
        PerInstance(ORDERS, guard=small).check(step_of(), RECORDS)


def test_a_run_keeps_the_numbers_in_private_files_and_continues_them(tmp_path: Path) -> None:
    def run(folder: str, steps: int, *, resume: bool = False, orders: Any = ORDERS) -> hush.PerInstance:
        step, watched = step_of(), PerInstance(orders)
        done = helpers.train(
            step.model,
            step.plan,
            data_of(),
            optimizer=step.optimizer,
            steps=steps,
            directory=tmp_path / folder,
            resume=resume,
            randomness=helpers.randomness(2),
            per_instance=watched,
        )
        assert done.per_instance is watched
        return watched

    whole = run("whole", 3)
    run("parts", 2)
    continued = run("parts", 3, resume=True)
    assert continued.charges == pytest.approx(whole.charges, rel=1e-12)
    stored = np.load(tmp_path / "parts" / "private" / "per_instance.npz")
    assert stored["charges"] == pytest.approx(whole.charges, rel=1e-12)
    assert (tmp_path / "parts" / "private" / "per_instance.npz").stat().st_mode & 0o077 == 0
    assert stored["epsilon"] == pytest.approx(whole.epsilons(1e-5))
    assert stored["any_record_epsilon"] == pytest.approx(whole.any_record_epsilon(1e-5))
    assert stored["eta"] == pytest.approx(whole.losses())
    assert stored["slots"].tolist() == list(range(RECORDS))
    with pytest.raises(CheckpointError, match="cover 3 steps"):
        run("parts", 4, resume=True, orders=[3.0])


@pytest.mark.parametrize("orders", [[2.0], None])
def test_no_epsilon_is_above_that_of_any_records(orders: Any) -> None:
    """One order and one step: its conversion alone gives more than the guarantee of the run."""
    plan = plan_of(None, hush.L2(0.7), hush.Rectified(scale=9.0, bound=4.0))
    step = step_of(plan=plan)
    watched = PerInstance() if orders is None else PerInstance(orders)
    step(watched.observe(step, next(step.batches(data_of()))))
    most = step.spent(1e-5).epsilon.upper
    assert max(watched.epsilons(1e-5)) <= watched.any_record_epsilon(1e-5) <= most
    uncapped = [rdp_to_epsilon(each, watched.orders, 1e-5) for each in watched.charges]
    assert (max(uncapped) > most) == (orders is not None)
    wide = hush.individual_rdp(plan, np.zeros(43), watched.orders)
    assert (watched.any_record <= wide * 1.01).all()


def test_lanczos_is_below_the_largest_eigenvalue_by_less_than_its_error() -> None:
    """The projection of a spectrum without a gap; the uncorrected value fails nearly always."""
    rng, failure, dimension, size = np.random.default_rng(0), 0.2, 60, 6
    spectrum = np.linspace(0, 1, dimension)
    error, below, corrected = lanczos_error(dimension, size, failure), 0, 0
    for _ in range(300):
        powers = np.vander(spectrum, size) * rng.standard_normal(dimension)[:, None]
        basis = np.linalg.qr(powers)[0]
        value = np.linalg.eigvalsh(basis.T @ (spectrum[:, None] * basis))[-1]
        below += value < 1 - 1e-3
        corrected += value / (1 - error) < 1
    assert below > 270
    assert corrected <= failure * 300
    assert lanczos_error(dimension, dimension, failure) == 0
    assert 0 < lanczos_error(dimension, 30, 1e-6) < 0.12


def test_fisher_losses_of_images_are_exact_also_if_eigenvalues_are_nearly_equal() -> None:
    """A clustered spectrum exhausts the Krylov space; repeating a vector is 6.7 times too much."""
    inputs, targets, _, _ = hush.data.tensors(hush.data.load("digits"))
    inputs, targets = inputs[:20], targets[:20]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    noise = hush.Truncated(scale=10.0, bound=1000.0)
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=noise)
    watched = hush.PerInstance(slots=range(3), iterations=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=20)
    watched.observe(step, next(step.batches((inputs, targets), steps=1)))
    weight, bias = (parameter.detach() for parameter in model.parameters())
    for loss, x, y in zip(watched.losses(), inputs, targets, strict=False):

        def clipped(value: Tensor, y: Tensor = y) -> Tensor:
            errors = torch.softmax(weight @ value + bias, 0) - nn.functional.one_hot(y, 10)
            gradient = torch.cat([torch.outer(errors, value).flatten(), errors])
            shorter: Tensor = gradient / gradient.norm().clamp(min=1.0)
            return shorter

        jacobian = torch.autograd.functional.jacobian(clipped, x.flatten())
        assert loss == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)) / 10, rel=1e-3)
