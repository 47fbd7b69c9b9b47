"""Tables that the benchmark of the estimators makes up."""

import numpy as np
import pytest
from benchmarks.estimators import synthetic


@pytest.mark.parametrize(("kind", "spread"), [("wide", 1 / 3), ("narrow", 0.1), ("correlated", 1 / 3)])
def test_columns_are_as_wide_and_as_related_as_they_are_called(kind: str, spread: float) -> None:
    (rows, target), (fresh, _) = synthetic(kind, 5, 20_000, seed=1)
    assert rows.std(0) == pytest.approx([spread] * 5, rel=0.03)
    related = np.corrcoef(rows.T)[0, 1]
    assert related == pytest.approx(0.9 if kind == "correlated" else 0.0, abs=0.03)
    slopes = np.linalg.lstsq(np.c_[np.ones(len(rows)), rows], target, rcond=None)[0]
    assert (target - np.c_[np.ones(len(rows)), rows] @ slopes).std() == pytest.approx(0.1, rel=0.03)
    assert fresh.shape == (5000, 5)
