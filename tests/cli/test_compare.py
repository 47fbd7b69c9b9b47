"""`hush compare` and `hush probe`; the mechanisms are in tests/accounting/test_compare.py."""

import json
import math
from pathlib import Path

import pytest

from hush.accounting.compare import Row
from hush.cli.compare import _table, probe
from tests.cli.command import answer


def row(mechanism: str, deviation: float, cost: float) -> Row:
    return Row(
        mechanism=mechanism,
        accountant="PLD",
        deviation=deviation,
        published=None,
        variance=deviation**2,
        signal_to_noise=1 / deviation,
        cost=cost,
    )


def test_a_bar_is_as_long_as_the_noise() -> None:
    rows = [row("shaped", 1.0, 0.25), row("plain", 2.0, 1.0), row("none", math.inf, math.inf)]
    lines = _table(rows).markdown().splitlines()[2:]
    half, plain, endless = (line.split(" | ")[2].strip() for line in lines)
    assert len(plain) == 2 * len(half) == 6, "a quarter of 24: the longest is 4 times plain"
    assert len(endless) == 24
    assert endless[-1] == ">"


def test_probe_measures_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("probe", "--model", "logistic", "--records", "50", "--steps", "2", "--out", tmp_path)
    report = answer(*asked)
    assert report["dimension"] == 650
    assert report["records"] == 50
    assert 0 < report["split"]["variance_ratio"] <= 1
    assert report["notes"][0].startswith("no privacy")
    assert json.loads((tmp_path / "probe.json").read_text()) == report
    probe(model="logistic", records=50, steps=2, out=tmp_path / "again", device="cpu")
    text = capsys.readouterr().out
    assert "must be public" in text
    assert f"--dimension 650 --linf-ratio {report['linf_cap']:.3g}" in text
