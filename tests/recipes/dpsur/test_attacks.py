"""Tables 3 and 4 of the DPSUR paper, on digits: every line is there, charged, beside what is printed."""

from dataclasses import replace
from pathlib import Path

import pytest

from hush.core.errors import BudgetExceeded, InvalidValue
from hush_recipes.dpsur import attacked as dpsur_attacked
from hush_recipes.dpsur.attacked import Case, pooled
from hush_recipes.dpsur.attacks import CPU, attack, attacked, dpsur_table4, row
from hush_recipes.dpsur.runs import Method

LINEAR = Method(name="DPSGD-HF", model="scattering-linear", batch=100, rates=(4.0, 4.0, 4.0, 4.0))
TESTED = replace(
    LINEAR,
    name="DPSUR",
    kind="mean",
    noise=(9.0, 9.0, 9.0, 9.0),
    test_noise=(3.0, 3.0, 3.0, 3.0),
    test_batch=20,
    threshold=0.0,
)
TINY = replace(CPU, records=600, epsilons=(1.0,), epochs=2, plain_epochs=5)


@pytest.fixture(autouse=True)
def on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_CACHE", str(tmp_path))
    monkeypatch.setattr(dpsur_attacked, "METHODS", {"digits": (LINEAR, TESTED)})


@pytest.mark.slow
def test_every_line_is_charged_and_drawn(tmp_path: Path) -> None:
    figure = attacked("x", "digits", "cpu", None, 1, None, TINY)
    assert [line[0] for line in figure.rows[::4]] == ["non-private", "DP-SGD", "DPSUR"]
    assert {line[4] for line in figure.rows} == {
        *("loss threshold", "black-box/shadow", "white-box/partial", "LiRA, offline")
    }
    for line in figure.rows:
        epsilon, accuracy, low, high = (line[k] for k in (1, 5, 6, 7))
        assert (epsilon is None) == (line[0] == "non-private")
        assert epsilon is None or 0.9 <= float(str(epsilon)) <= 1.0
        assert float(str(low)) <= float(str(accuracy)) <= float(str(high))
    assert all(path.exists() for path in figure.save(tmp_path / "out"))


def test_the_papers_numbers_stand_beside_ours() -> None:
    case = Case(data="digits", method="DP-SGD", level=4.0, seed=0, device="cpu", size=TINY)
    result = attack(replace(case, level=None, method="non-private"))
    lines = [row(replace(case, data="fashion-mnist"), result, verdict) for verdict in result.verdicts]
    assert [line[-1] for line in lines] == [None, 0.494, 0.505, None]
    lines = [
        row(replace(case, data="cifar10", level=1.0), result, verdict) for verdict in result.verdicts
    ]
    assert [line[-1] for line in lines] == [None, 0.504, 0.500, None]


def test_records_are_pooled_once_each() -> None:
    x, y, classes = pooled("digits", "cpu", None)
    assert (len(x), len(y), classes) == (1797, 1797, 10)
    assert len(x.flatten(1).unique(dim=0)) > 1700
    some, _, _ = pooled("digits", "cpu", 30)
    assert len(some) == 30


def test_what_is_not_in_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValue, match="cuda"):
        dpsur_table4()
    with pytest.raises(InvalidValue, match="not in the table"):
        attacked("x", "digits", "cpu", [5.0], 1, None, TINY)
    short = replace(TESTED, noise=(0.1, 0.1, 0.1, 0.1))
    monkeypatch.setattr(dpsur_attacked, "METHODS", {"digits": (LINEAR, short)})
    with pytest.raises(BudgetExceeded, match="one trial"):
        attack(Case(data="digits", method="DPSUR", level=1.0, seed=0, device="cpu", size=TINY))
