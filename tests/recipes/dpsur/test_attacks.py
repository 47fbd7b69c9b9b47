"""Tables 3 and 4 of the DPSUR paper, on digits: every line is there, charged, beside what is printed."""

from dataclasses import replace
from pathlib import Path

import pytest

from hush_recipes.dpsur import attacked as dpsur_attacked
from hush_recipes.dpsur.attacked import Case
from hush_recipes.dpsur.attacks import CPU, attack, attacked, row
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
