"""DPAGD's moves and questions, on a few made-up records."""

from pathlib import Path

import pytest
import torch

from hush.core.guarantee import Budget
from hush_recipes.dpsur import dpagd
from hush_recipes.dpsur.gaussian_filter import GaussianFilter
from hush_recipes.dpsur.inputs import Inputs
from hush_recipes.dpsur.runs import DELTA


def test_fewer_records_have_the_same_noise_each() -> None:
    precisions = [
        GaussianFilter(Budget(epsilon=level, delta=DELTA)).precision
        for level in (1.0, dpagd.equal_noise(1.0, 500, 2000))
    ]
    assert precisions[1] == pytest.approx(16 * precisions[0], rel=2e-3)


@pytest.mark.slow
def test_moves_and_questions_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.arange(120) % 3
    x = torch.randn(120, 81, 1, 1, generator=torch.Generator().manual_seed(0))
    x[:, 0, 0, 0] += 4 * y  # something to learn
    made_up = Inputs(classes=3, train=(x, y), test=(x, y))
    monkeypatch.setattr(dpagd, "inputs_on", lambda *_: made_up)
    monkeypatch.setattr(dpagd, "RECORDS", 100)
    monkeypatch.setattr(dpagd, "ALL", 1000)
    monkeypatch.setattr(dpagd, "LONGEST", (1.0,))
    figure = dpagd.dpsur_dpagd(epsilons=(1.0,), seeds=1)
    ((longest, epsilon, seed, moves, asked, stays, accuracy),) = figure.rows
    assert (longest, epsilon, seed) == (1.0, 1.0, 0)
    assert isinstance(moves, int)
    # a move takes at least two of the 120 shares of the budget: its gradient and its question
    assert 0 < moves <= 60
    assert asked == moves + int(str(stays))
    assert float(str(accuracy)) > 50
    assert all(path.exists() for path in figure.save(tmp_path))
