"""`hush compare` and `hush probe`; the mechanisms are in tests/accounting/test_compare.py."""

import json
from pathlib import Path

import pytest

from hush.cli.compare import probe
from tests.cli.command import answer


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
