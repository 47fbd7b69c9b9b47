"""Figures 3 and 4 of the bounded-support paper for CIFAR-10, on a few made-up records."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hush_recipes.bounded import fig3_cifar10 as fig3
from hush_recipes.bounded import fig4_cifar10 as fig4
from hush_recipes.bounded.probe import GridPoint
from hush_recipes.bounded.wide_resnet import Training


def records(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=source), torch.randint(10, (60,), generator=source)
    x[:, 0] += y  # something to learn
    return x, y, x, y


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
