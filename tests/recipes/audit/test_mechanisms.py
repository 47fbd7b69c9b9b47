"""The table of attacks says which charge was exceeded."""

from dataclasses import replace
from pathlib import Path

import pytest

from hush_recipes.audit import mechanisms as recipe
from hush_recipes.audit.combinations import attacks
from hush_recipes.audit.scores import Audit


def test_what_exceeds_its_charge_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, *_ = attacks()

    def undercharged(**settings: float) -> Audit:
        audit = plain.attack(**settings)
        return replace(audit, charge=audit.lower / 2)

    broken = replace(plain, name="a broken one", attack=undercharged)
    monkeypatch.setattr(recipe, "attacks", lambda: [plain, broken])
    figure = recipe.audit_mechanisms()
    (name, runs, lower, charge, share), below = figure.rows
    assert (name, runs) == (plain.name, plain.runs * recipe.SIDE_BY_SIDE // 2)
    assert 0 < float(str(lower)) < float(str(charge))
    assert float(str(share)) == float(str(lower)) / float(str(charge))
    assert float(str(below[-1])) == pytest.approx(2)
    assert "above their charge: a broken one" in figure.notes
    assert all(path.exists() for path in figure.save(tmp_path))
