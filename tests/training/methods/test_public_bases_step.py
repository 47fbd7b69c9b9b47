"""Steps in the subspaces of public gradients: what is summed, the noise, and going on after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.core.errors import DataError
from hush.core.parts import Noise, Sampling
from hush.core.randomness import source_for
from hush.training.step import PrivateStep
from tests.gradients.oracle import one_at_a_time
from tests.training.helpers import plan_of, run, seeded, step_of
from tests.training.helpers import weights_of as vector

RECORDS, PUBLIC, WIDTH, CLASSES = 24, 20, 40, 10
SIZE = WIDTH * CLASSES + CLASSES
NOISE = hush.Gaussian(1.0)
EACH = nn.CrossEntropyLoss(reduction="none")


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES).double()
    inputs = torch.randn(RECORDS + PUBLIC, WIDTH).double()
    targets = torch.randint(0, CLASSES, (RECORDS + PUBLIC,))
    data = inputs[:RECORDS], targets[:RECORDS]
    return model, data, (inputs[RECORDS:], targets[RECORDS:])


def plan(
    l2: tuple[float, float], noise: Noise = NOISE, sampling: Sampling | None = None, every: int = 2
) -> hush.Plan:
    bases = hush.Principal(groups=1, every=every, iterations=4)
    return plan_of(sampling, hush.Subspaces(ranks=(8, SIZE - 8), l2=l2, bases=bases), noise)


def stepper(chosen: hush.Plan, model: nn.Module, public: Any, **options: Any) -> PrivateStep:
    return step_of(model, chosen, lr=1.0, seed=3, records=RECORDS, public=public, **options)


def moved(step: PrivateStep, data: Any) -> Tensor:
    before = vector(step.model)
    run(step, data)
    return (before - vector(step.model)) * step.plan.sampling.expected(RECORDS)


def basis(step: PrivateStep) -> Tensor:
    assert step.basis_schedule is not None
    frame = step.basis_schedule.current
    assert frame is not None
    return frame.groups[0].basis


@pytest.mark.usefixtures("without_noise")
def test_the_sum_is_clipped_in_each_subspace() -> None:
    model, data, public = problem()
    rows = one_at_a_time(model, EACH, *data, RECORDS)
    step = stepper(plan((0.4, 0.3)), model, public)
    actual = moved(step, data)
    directions = basis(step)
    expected = torch.zeros(SIZE, dtype=torch.float64)
    for row in rows:
        inside = directions.T @ row
        remaining = row - directions @ inside
        assert inside.norm() > 0.4 or remaining.norm() > 0.3
        expected += directions @ (inside * min(1.0, 0.4 / float(inside.norm())))
        expected += remaining * min(1.0, 0.3 / float(remaining.norm()))
    # what cutting leaves stays in the residual: the projection takes nothing away without thinning
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)
    loose = stepper(plan((1e9, 1e9)), problem()[0], public)
    torch.testing.assert_close(moved(loose, data), rows.sum(0), rtol=1e-8, atol=1e-10)


def fits(values: Tensor, deviation: float) -> bool:
    share = stats.chi2.cdf(float((values / deviation).square().sum()), values.numel())
    return bool(1e-4 < share < 1 - 1e-4)


@pytest.mark.parametrize("thinned", [False, True])
def test_the_noise_is_what_is_charged_in_the_basis(thinned: bool) -> None:
    sampling = hush.Coordinate(rate=0.5) if thinned else hush.FullBatch()
    noise = hush.BlockGaussian(multipliers=(2e9, 5e9))
    inside, remaining = [], []
    for seed in range(30):
        model, data, public = problem()
        step = stepper(plan((1e-9, 1e-9), noise, sampling), model, public)
        step.generator = source_for(step.device, seeded(seed))
        update = moved(step, data)
        inside.append(basis(step).T @ update)
        remaining.append(update - basis(step) @ inside[-1])
    assert fits(torch.stack(inside), 2.0)
    assert not fits(torch.stack(inside), 5.0)
    # in SIZE - 8 dimensions: those of the subspace are taken out of the residual's noise
    total = float(torch.stack(remaining).square().sum()) / 25
    assert 1e-4 < stats.chi2.cdf(total, 30 * (SIZE - 8)) < 1 - 1e-4
    assert stats.chi2.cdf(total * 1.2, 30 * (SIZE - 8)) > 1 - 1e-4


def test_a_run_that_stops_between_bases_goes_on_exactly(tmp_path: Path) -> None:
    noise = hush.BlockGaussian(multipliers=(1.0, 1.0))
    ends = []
    for stop in (None, 3):
        model, data, public = problem()
        step = stepper(plan((0.4, 0.3), noise, hush.Poisson(0.5)), model, public)
        run(step, data, stop or 5)
        if stop is not None:
            state = step.state_dict()
            other = problem()[0]
            repeated = stepper(step.plan, other, public, ledger=step.ledger)
            repeated.load_state_dict(state)
            run(repeated, data, 2)
            model = other
        ends.append(vector(model))
    assert torch.equal(ends[0], ends[1])


def test_bases_are_found_anew_on_time() -> None:
    model, data, public = problem()
    step = stepper(plan((0.4, 0.3), every=2), model, public)
    observed = []
    for batch in step.batches(data, steps=4):
        step(batch)
        observed.append(basis(step))
    assert torch.equal(observed[0], observed[1])
    assert torch.equal(observed[2], observed[3])
    assert not torch.allclose(observed[1], observed[2])


def test_public_records_are_asked_for_and_are_not_the_private_ones() -> None:
    model, data, public = problem()
    with pytest.raises(DataError, match="public=None"):
        stepper(plan((1.0, 1.0)), model, None)
    with pytest.raises(DataError, match="the private data"):
        next(stepper(plan((1.0, 1.0)), model, data).batches(data))
    mixed = (torch.cat([public[0], data[0][:1]]), torch.cat([public[1], data[1][:1]]))
    with pytest.raises(DataError, match="same inputs as public ones"):
        next(stepper(plan((1.0, 1.0)), model, mixed).batches(data))
    with pytest.raises(DataError, match="does not use public="):
        stepper(plan_of(), model, public)
