"""The recipe of clipping rules, with few steps and candidates."""

import pytest

from hush_recipes.tuning import clipping


def test_every_rule_has_a_row_at_every_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "EPSILONS", (3.0,))
    monkeypatch.setattr(clipping, "LEARNING_RATES", (0.3,))
    monkeypatch.setattr(clipping, "NORMS", (0.5,))
    rows = clipping.tuning_clipping(seeds=1, steps=3).rows
    assert [row[2] for row in rows[:6]] == ["0.5", "0.05", "0.05", "5", "5", "0.5"]
    assert [row[0] for row in rows] == list(clipping._rules(0.5))
    assert all(5 <= float(str(row[4])) <= 100 for row in rows)
    # the norm alone differs, and a larger one has more noise
    assert rows[3][3] == rows[4][3] == 0.3
