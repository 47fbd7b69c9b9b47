"""ROC curves against scikit-learn, intervals by simulation, the ceiling against an exact trade-off."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from sklearn.metrics import roc_auc_score, roc_curve

from hush.accounting.pld import analytic_gaussian
from hush_recipes.dpsur.roc import Roc, ceiling


@pytest.mark.parametrize("ties", [False, True])
def test_the_curve_and_its_area_against_scikit_learn(ties: bool) -> None:
    rng = np.random.default_rng(0)
    members, others = rng.normal(0.4, 1, 300), rng.normal(0, 1, 217)
    if ties:
        members, others = members.round(0), others.round(0)
    roc = Roc(members, others)
    truth, scores = np.repeat([1, 0], [300, 217]), np.concatenate([members, others])
    assert roc.auc == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    np.testing.assert_allclose(roc.rates[0], false)
    np.testing.assert_allclose(roc.rates[1], true)
    assert roc.at(0.05).value == pytest.approx(true[false <= 0.05].max())


def test_intervals_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = {"accuracy": 0, "rate": 0}
    for _ in range(400):
        roc = Roc((rng.random(60) < 0.9).astype(float), (rng.random(60) < 0.4).astype(float))
        accuracy, rate = roc.accuracy(0.5), roc.at(1.0)
        covered["accuracy"] += accuracy.low <= 0.75 <= accuracy.high
        narrow = Roc((rng.random(60) < 0.9).astype(float), np.zeros(60)).at(0.0)
        covered["rate"] += narrow.low <= 0.9 <= narrow.high
        assert rate.value == 1.0
    assert covered["accuracy"] >= 380
    assert covered["rate"] >= 380
    # and are not as wide as to say nothing
    assert accuracy.high - accuracy.low < 0.2


def test_no_normal_mechanism_is_above_its_ceiling_which_it_touches() -> None:
    false = np.linspace(1e-6, 1 - 1e-6, 20_001)
    for separation in (0.5, 1.0, 3.0):
        exact = ndtr(ndtri(false) + separation)
        for epsilon in (0.1, 0.8, 2.0):
            delta = analytic_gaussian.delta(separation, epsilon).upper
            if delta > 0.1:  # no guarantee has such a delta
                continue
            above = ceiling(false, epsilon, delta)
            assert (exact <= above + 1e-12).all()
            assert (above - exact).min() < 1e-6
            # with half of that delta the ceiling is broken
            assert (exact > ceiling(false, epsilon, delta / 2)).any()
