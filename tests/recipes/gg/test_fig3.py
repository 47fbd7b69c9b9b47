"""Figure 3: real votes, few trials; the published votes of 250 teachers."""

import csv
from pathlib import Path

import pytest

from hush.core.errors import DataError
from hush.data import load
from hush_recipes.gg import fig3
from hush_recipes.gg.fig3 import TEACHERS, read_votes


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


@pytest.mark.real_data("pate-votes", "mnist")
def test_the_votes_are_those_of_250_teachers() -> None:
    mnist, svhn = read_votes()
    assert mnist.shape == (9000, 10)
    assert svhn.shape == (26032, 10)
    for votes in (mnist, svhn):
        assert (votes.sum(1) == TEACHERS).all()
    assert (mnist.argmax(1) == load("mnist").y_test[:9000]).mean() == pytest.approx(0.9437, abs=1e-4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pate_votes").mkdir()
    (tmp_path / "pate_votes" / "mnist_250_teachers.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match="damaged or not the published one"):
        read_votes(tmp_path)
