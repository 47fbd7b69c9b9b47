"""Figures 3 and 4 of the bounded-support paper for CIFAR-10, on a few made-up records."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush_recipes.bounded import fig3_cifar10 as fig3
from hush_recipes.bounded import fig4_cifar10 as fig4
from hush_recipes.bounded.probe import GridPoint
from hush_recipes.bounded.wide_resnet import Training


def records(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=source), torch.randint(10, (60,), generator=source)
    x[:, 0] += y  # something to learn
    return x, y, x, y


@pytest.mark.parametrize("kind", ["rectified", "truncated"])
def test_charges_are_sums_over_the_steps(kind: str) -> None:
    plan = GridPoint(kind=kind, scale=1e3, bound=0.5, clip=2e-3).plan()
    locations = np.random.default_rng(0).normal(0, 3.0, size=(20, 40))
    orders = fig3.suited(plan, 40)
    for steps, (paper, charged) in zip(fig3.LENGTHS, fig3.charges((plan, locations)), strict=True):
        total = sum(hush.individual_rdp(plan, row, orders) for row in locations[:steps])
        assert charged == pytest.approx(rdp_to_epsilon(np.asarray(total), orders, 1e-5), rel=1e-9)
        assert 0 < paper <= charged


@pytest.mark.parametrize("scale", [1e3, 5e4])
def test_the_orders_suit_the_plan(scale: float) -> None:
    """For the normal law no other order does better by more than a hundredth."""
    plan = GridPoint(kind="Gaussian", scale=scale, bound=None, clip=2e-3).plan()
    epsilons = dict(enumerate(fig3.charges((plan, np.zeros((20, 12_800))))))
    fine = 1 + np.geomspace(1e-2, 1e5, 4000)
    best = rdp_to_epsilon(20 * hush.rdp(plan, fine, dimension=12_800), fine, 1e-5)
    assert best * 0.999 <= epsilons[1][1] <= 1.01 * best
    assert epsilons[1][0] == pytest.approx(epsilons[1][1], rel=1e-9)


def test_figure_3_runs_the_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    grid = [
        GridPoint(kind="Gaussian", scale=200.0, bound=None, clip=2e-2),
        GridPoint(kind="rectified", scale=200.0, bound=0.5, clip=2e-2),
        GridPoint(kind="truncated", scale=200.0, bound=1.5, clip=2e-2),
    ]
    monkeypatch.setattr(fig3, "features", records)
    monkeypatch.setattr(fig3, "grid", lambda: grid)
    monkeypatch.setattr(fig3, "TARGETS", (0.0, 101.0))
    figure = fig3.bounded_fig3_cifar10(seeds=2, processes=1)
    assert len(figure.rows) == 3 * 2 * 2
    for row in figure.rows:
        charged, published = float(str(row[5])), float(str(row[6]))
        assert charged > 0
        if row[0] == "Gaussian":
            assert published <= charged <= 1.6 * published, "by sums of divergences, a little more"
    gaussian = [row for row in figure.rows if row[0] == "Gaussian"]
    # the shorter run is the cheaper one
    assert [row[-1] for row in gaussian] == [10, 20, 10, 20]
    assert float(str(gaussian[0][5])) < float(str(gaussian[1][5]))
    assert "| - " in figure.table().markdown(), "nobody reaches 101%"
    assert all(path.exists() for path in figure.save(tmp_path))


def test_the_grid_has_the_paper_s_supports() -> None:
    supports = {
        round(point.bound * point.scale * point.clip, 9)
        for point in fig3.grid()
        if point.bound is not None
    }
    assert supports == set(fig3.BOUNDS)
    assert {point.plan().clipping.reference_norm for point in fig3.grid()} == set(fig3.CLIPS)
    for point in fig3.grid():
        assert (point.bound is None) == (point.kind == "Gaussian")


def test_figure_4_trains_and_watches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[Training] = []
    outcome = fig4.outcome

    def recording(run: Any) -> tuple[float, float, float]:
        runs.append(run[0])
        return outcome(run)

    monkeypatch.setattr(fig4, "_tensors_on", records)
    monkeypatch.setattr(fig4, "outcome", recording)
    for name, value in (
        ("MODEL", "mlp"),
        ("BATCH", 20),
        ("SCALES", (20.0, 80.0)),
        ("WATCHED", 3),
        ("MOMENTS", 2),
        ("ITERATIONS", 5),
    ):
        monkeypatch.setattr(fig4, name, value)
    figure = fig4.bounded_fig4_cifar10(epochs=2, seeds=2, processes=1)
    assert [run.steps for run in runs] == [6] * 12
    assert {run.seed for run in runs} == {0, 1}
    rows = {(row[0], row[1]): [float(str(cell)) for cell in row[3:]] for row in figure.rows}
    assert len(rows) == 6
    for kind in fig4.LAWS:
        # four times the noise tells less
        assert rows[kind, 80.0][1] < rows[kind, 20.0][1]
        assert all(0 < losses[2] <= losses[1] for losses in rows.values())
    assert all(path.exists() for path in figure.save(tmp_path))
