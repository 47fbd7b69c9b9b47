"""Acceptance of the DPSUR paper's test, against draws, and the settings that its Figure 9 varies."""

from pathlib import Path

import numpy as np
import pytest

from hush.core.errors import InvalidValue
from hush_recipes.dpsur.acceptance import dpsur_fig5, dpsur_fig6
from hush_recipes.dpsur.fig9 import dpsur_fig9
from hush_recipes.dpsur.runs import Method, Outcome


def test_acceptance_against_draws_and_against_what_is_printed() -> None:
    draws = np.random.default_rng(0).normal(size=400_000)
    for threshold, helpful, printed_helpful, harmful, printed_harmful in dpsur_fig5().rows:
        for centre, ours, printed in ((-1, helpful, printed_helpful), (1, harmful, printed_harmful)):
            share = 100 * np.mean(centre + 2 * draws < float(str(threshold)))
            assert float(str(ours)) == pytest.approx(share, abs=0.4)
            assert printed is None or float(str(ours)) == pytest.approx(float(str(printed)), abs=0.1)


def test_the_difference_is_largest_at_zero_and_the_ratio_grows_below() -> None:
    rows = [[float(str(cell)) for cell in row] for row in dpsur_fig6().rows]
    for noise in (0.8, 1.0, 1.3):
        at_noise = [row for row in rows if row[0] == noise]
        assert max(at_noise, key=lambda row: row[4])[1] == 0.0
        assert [row[5] for row in at_noise] == sorted((row[5] for row in at_noise), reverse=True)
        assert min(at_noise, key=lambda row: row[6])[1] == 0.5  # trials that are rejected are paid for


def test_the_studies_as_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(method: Method, *_: object) -> Outcome:
        return Outcome(accuracy=method.test_batch / 1000, sound=2.9, published=2.0, trials=8, accepted=2)

    monkeypatch.setattr("hush_recipes.dpsur.runs.run", reached)
    figure = dpsur_fig9(seeds=2)
    assert len(figure.rows) == 10
    assert figure.rows[-1] == ["test batch", 256.0, pytest.approx(25.6), None, 8, 0.25]
    assert all(path.exists() for path in figure.save(tmp_path))
    full = dpsur_fig9(device="cuda")
    assert ["test batch", 1024.0, pytest.approx(102.4), 68.36, 8, 0.25] in full.rows


def test_one_study_at_the_learning_rate_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(method: Method, *_: object) -> Outcome:
        return Outcome(accuracy=method.rates[2] / 100, sound=2.9, trials=8, accepted=2)

    monkeypatch.setattr("hush_recipes.dpsur.runs.run", reached)
    assert {row[2] for row in dpsur_fig9(device="cuda", only="threshold").rows} == {8.0}
    figure = dpsur_fig9(device="cuda", only="threshold", learning_rates=[4.0])
    assert [row[:3] for row in figure.rows] == [
        ["threshold", value, pytest.approx(4.0)] for value in (-3.0, -2.0, -1.0, 0.0, 1.0)
    ]
    assert all(path.exists() for path in figure.save(tmp_path))
    varied = dpsur_fig9(device="cuda", only="learning rate", learning_rates=[4.0]).rows
    assert [row[2] for row in varied] == pytest.approx([1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(InvalidValue, match="2 values"):
        dpsur_fig9(learning_rates=[4.0, 8.0])
