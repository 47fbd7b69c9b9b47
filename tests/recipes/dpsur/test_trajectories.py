"""Figures 1 and 4 of the DPSUR paper: paths of the weights, and the changes that a test sees."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import hush
from hush.core.plan import Plan
from hush.training.methods.selective import Trials
from hush_recipes.dpsur import fig1, fig4


def test_a_path_stays_where_proposals_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_much_noise(plan: Plan, *_: object, **__: object) -> Plan:
        return replace(plan, noise=hush.Gaussian(2.0))

    monkeypatch.setattr(fig1, "calibrate", with_much_noise)
    figure = fig1.dpsur_fig1(steps=12, seeds=1)
    assert len(figure.rows) == 4 * 13
    x, y = fig1.records()
    rejected = 0
    for before, after in zip(figure.rows, figure.rows[1:], strict=False):
        slope, intercept, loss = (float(str(cell)) for cell in after[3:6])
        moved = after[6]
        expected = (slope * x + intercept - y).square().mean() / 2
        assert loss == pytest.approx(float(expected), rel=1e-5)
        if after[2] == 0:
            assert (slope, intercept) == fig1.START
            continue
        assert (after[3:5] != before[3:5]) == moved
        rejected += not moved
        assert moved or after[0] == "DPSUR"
    assert 0 < rejected < 24
    assert all(path.exists() for path in figure.save(tmp_path))


def test_observed_trials_decide_as_others_and_see_the_unclipped_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    verdict = Trials.noisy_verdict

    def watched(self: Trials, rise: Tensor) -> bool:
        seen.append(float(rise))
        return verdict(self, rise)

    monkeypatch.setattr(Trials, "noisy_verdict", watched)
    figure = fig4.dpsur_fig4(steps=15)
    changes = [float(str(row[2])) for row in figure.rows]
    assert seen == pytest.approx(np.clip(changes, -fig4.CLIP, fig4.CLIP).tolist())
    assert max(np.abs(changes)) > fig4.CLIP
    monkeypatch.setattr(fig4, "ObservedTrials", _Unobserved)
    _, verdicts = fig4._run("digits", "logistic", 15, 0)
    assert verdicts.tolist() == [row[3] for row in figure.rows]
    assert all(path.exists() for path in figure.save(tmp_path))


class _Unobserved(Trials):
    changes = ()
