"""Training without privacy: it learns, also with Adam, and stands beside the printed accuracy."""

from pathlib import Path

import pytest

from hush.core.errors import InvalidValue
from hush_recipes.dpsur import nonprivate
from hush_recipes.dpsur.methods import METHODS
from hush_recipes.dpsur.nonprivate import COLUMNS, Column, dpsur_nonprivate


@pytest.mark.parametrize("adam", [False, True])
def test_the_digits_are_learned(adam: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_CACHE", str(tmp_path))
    column = Column(model="scattering-linear", printed=99.0, batch=64, adam=adam)
    monkeypatch.setitem(COLUMNS, "digits", column)
    trained = dpsur_nonprivate(data="digits", seeds=2, epochs=10)
    ((data, _, accuracy, spread, printed),) = trained.rows
    assert (data, printed) == ("digits", 99.0)
    assert float(str(accuracy)) > 90
    assert spread is not None
    assert all(path.exists() for path in trained.save(tmp_path))
    monkeypatch.setattr(nonprivate, "without_privacy", lambda *_, **__: None)
    assert float(str(dpsur_nonprivate(data="digits").rows[0][2])) < 50, "an untrained network"


def test_the_networks_are_those_of_the_private_rows() -> None:
    assert set(COLUMNS) == set(METHODS)
    for data, column in COLUMNS.items():
        assert column.model in {method.model for method in METHODS[data] if method.printed}


def test_other_data_are_not_in_the_table() -> None:
    with pytest.raises(InvalidValue, match="choose from mnist"):
        dpsur_nonprivate(data="digits")
