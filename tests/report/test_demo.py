"""The demonstration: its table, plot and reports."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

import hush
from hush.report import demo


def test_the_demonstration_compares_and_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STEPS", 20)
    monkeypatch.setattr(demo, "EPSILONS", (1.0, 8.0))
    demo.demo(tmp_path)
    printed = capsys.readouterr().out
    table = (tmp_path / "table.md").read_text()
    assert table.strip() in printed
    assert table.count("DP-SGD") == 2
    assert table.endswith("\n\nepsilon at delta 1e-05, zero-out one record\n")
    for epsilon in (1, 8):
        report = json.loads((tmp_path / f"epsilon-{epsilon}" / "report.json").read_text())
        assert report["guarantee"]["epsilon"]["upper"] <= epsilon
        assert report["guarantee"]["randomness"] == "seeded"
        assert f"{report['accuracy']['without_privacy']:.1%}" in table
        assert f"{report['accuracy']['private']:.1%}" in table
        page = tmp_path / f"epsilon-{epsilon}" / "report.html"
        assert str(page) in printed
        assert report["statements"]["for_lawyers"] in page.read_text()
    assert imread(tmp_path / "plot.png").shape == (510, 780, 4)
    for epsilon in (1, 8):
        with hush.Ledger(tmp_path / f"epsilon-{epsilon}" / "ledger.jsonl") as ledger:
            assert sum(ledger.counts.values()) == 20
            assert ledger.epsilon(demo.DELTA).epsilon.upper <= epsilon
