"""Figure 3: real votes, few trials; the published votes of 250 teachers."""

import csv
from pathlib import Path

import pytest

from hush_recipes.gg import fig3


@pytest.mark.real_data("pate-votes", "mnist")
def test_the_figure_on_real_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig3, "BETAS", (1.0, 4.0))
    monkeypatch.setattr(fig3, "EPSILONS", (0.3,))
    monkeypatch.setattr(fig3, "TRIALS", 2)
    figure = fig3.gg_fig3()
    figure.save(tmp_path)
    assert (tmp_path / "gg-fig3.png").stat().st_size > 10_000
    with (tmp_path / "gg-fig3.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        true, asked = float(row["true_epsilon"]), float(row["epsilon"])
        # Noise chosen for one count costs more than it was chosen for, and the sound one does not.
        assert (true <= asked) == (row["accounting"] == "sound")
        assert 0.9 < float(row["accuracy"]) <= 1.0
    assert "94.37%" in figure.table().markdown()
