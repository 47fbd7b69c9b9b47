"""Figures 3 and 4 of the bounded-support paper on a few made-up records."""

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush_recipes.bounded import fig3_cifar10, fig4
from hush_recipes.bounded import probe as bounded_probe
from hush_recipes.bounded.probe import CLIP, ORDERS, GridPoint, accuracy, descent

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def records(device: str = "cpu") -> Data:
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=source), torch.randint(10, (60,), generator=source)
    x[:, 0] += y  # something to learn
    return x, y, x, y


def clamped(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """One record's gradient by autograd in double precision, clamped."""
    at = weights.double().clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy((x.double() @ at.T)[None], y[None])
    return torch.autograd.grad(loss, at, create_graph=True)[0].clamp(-CLIP, CLIP)


@pytest.mark.parametrize("kind", ["rectified", "truncated"])
def test_what_is_charged_is_the_sum_over_the_steps(kind: str) -> None:
    x, y, *_ = records()
    point = GridPoint(kind=kind, scale=20.0, bound=0.5)
    run = descent(point, x, y, seed=0)
    weights, total = torch.zeros(10, 4), np.zeros(len(ORDERS))
    for after in run.run(3):
        step_sum = sum(clamped(weights, *record) for record in zip(x, y, strict=True))
        location = np.asarray(torch.as_tensor(step_sum).detach().double()).ravel()
        assert run.location == pytest.approx(location, abs=1e-5), "the sum, and not the draw around it"
        total += hush.individual_rdp(point.plan(), location, ORDERS)
        weights = after
    assert run.charged() == pytest.approx(rdp_to_epsilon(total, ORDERS, 1e-5), rel=1e-4)
    assert 0 < run.paper() < run.charged()
    worst = hush.rdp(point.plan(), ORDERS, dimension=40)
    assert run.charged() < rdp_to_epsilon(3 * worst, ORDERS, 1e-5)


def test_ratios_are_of_the_lowest_epsilon_that_reaches_a_target() -> None:
    def row(kind: str, reached: float, paper: float, charged: float) -> list[object]:
        return [kind, 1.0, 1.0, reached, paper, charged, 9.0]

    rows = [
        row("Gaussian", 80, 2.0, 2.0),
        row("Gaussian", 70, 1.0, 1.0),
        row("rectified", 81, 1.0, 1.5),
        row("rectified", 75, 0.4, 0.6),
        row("truncated", 75, 0.5, 0.5),
    ]
    assert fig3_cifar10.lowest_ratios(rows, 78.0) == [78.0, 0.5, 0.75, None, None]
    assert fig3_cifar10.lowest_ratios(rows, 70.0) == [70.0, 0.4, 0.6, 0.5, 0.5]


def test_losses_against_a_jacobian_that_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [GridPoint(kind=kind, scale=20.0, bound=0.5) for kind in ("rectified", "truncated")]
    grid.append(GridPoint(kind="Gaussian", scale=20.0, bound=None))
    monkeypatch.setattr(fig4, "features", records)
    monkeypatch.setattr(fig4, "grid", lambda: grid)
    monkeypatch.setattr(fig4, "STEPS", 2)
    monkeypatch.setattr(fig4, "WATCHED", 7)
    rows = {row[0]: row for row in fig4.bounded_fig4(seeds=1).rows}
    x, y, *_ = records()
    for point in grid:
        run, squared, before = descent(point, x, y, seed=0), np.zeros(7), torch.zeros(10, 4)
        for after in run.run(2):
            eta = torch.as_tensor(hush.fisher(point.plan(), run.location)).sqrt()
            for k in range(7):
                moved = torch.autograd.functional.jacobian(
                    lambda value, k=k, before=before: clamped(before, value, y[k]).reshape(-1), x[k]
                )
                squared[k] += float(torch.linalg.matrix_norm(eta[:, None] * moved.double(), 2)) ** 2
            before = after
        reached = accuracy(before, x, y)
        assert rows[point.kind][3] == pytest.approx(reached)
        largest, median = float(np.sqrt(squared.max())), float(np.median(np.sqrt(squared)))
        # certified upper ends, so no less; and close
        assert largest * (1 - 1e-5) <= float(str(rows[point.kind][4])) < 1.6 * largest
        assert median * (1 - 1e-5) <= float(str(rows[point.kind][5])) < 1.6 * median


def test_records_that_set_the_scale_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from hush.data import Dataset

    source = np.random.default_rng(0)
    images = source.normal(3.0, 2.0, size=(40, 1, 8, 8)).astype(np.float32)
    dataset = Dataset(
        name="made",
        classes=10,
        x_train=images,
        y_train=np.arange(40) % 10,
        x_test=images[:5],
        y_test=np.arange(5),
    )
    monkeypatch.setattr(bounded_probe, "load", lambda name: dataset)
    monkeypatch.setattr(bounded_probe, "with_features", lambda dataset, features, device: dataset)
    monkeypatch.setattr(bounded_probe, "PUBLIC", 30)
    x, y, x_test, _ = bounded_probe.features("cpu")
    assert (x.shape, y.tolist(), x_test.shape) == ((10, 4), [k % 10 for k in range(30, 40)], (5, 4))
    images[35] = 100.0  # another record: its own row moves and no other
    after = bounded_probe.features("cpu")[0]
    assert torch.equal(x[:5], after[:5])
    assert not torch.equal(x[5], after[5])
