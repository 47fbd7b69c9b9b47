"""The recipe of private tuning, on a few made-up images."""

import pytest
import torch
from torch import Tensor

from hush_recipes.tuning import fashion


def test_all_rows_cost_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def images(device: str) -> tuple[Tensor, ...]:
        drawn = torch.Generator().manual_seed(0)
        x = torch.rand(300, 1, 28, 28, generator=drawn)
        y = torch.randint(0, 10, (300,), generator=drawn)
        return x, y, x[:50] * 0.9, y[:50]

    monkeypatch.setattr(fashion, "_tensors", images)
    monkeypatch.setattr(fashion, "HELD_OUT", 50)
    monkeypatch.setattr(fashion, "BATCH", 60)
    monkeypatch.setattr(fashion, "TRIALS", 1.5)
    monkeypatch.setattr(fashion, "GRID", {"learning_rate": (1.0,), "clip": (1.0,)})
    figure = fashion.tuning_fashion(seeds=1, steps=2)
    assert [row[0] for row in figure.rows] == [
        *("tuned, all charged", "hand-picked, choice not charged", "drawn once")
    ]
    assert all(2.98 < float(str(row[5])) <= 3.0 for row in figure.rows)
    tuned, picked = (float(str(row[4])) for row in figure.rows[:2])
    assert tuned > picked, "the choice is paid for with noise"
