"""The demonstration: its table, plot and reports."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import hush
from hush.report import demo
from hush.report.demo import plot_accuracy


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
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    for epsilon in (1, 8):
        with hush.Ledger(tmp_path / f"epsilon-{epsilon}" / "ledger.jsonl") as ledger:
            assert sum(ledger.counts.values()) == 20
            assert ledger.epsilon(demo.DELTA).epsilon.upper <= epsilon


CURVES = {"epsilon 1": [(0.3, 0.5), (1.0, 0.8)], "epsilon 8": [(2.0, 0.7), (8.0, 0.9)]}


def test_a_picture_with_a_curve_for_each_run(tmp_path: Path) -> None:
    pictures = []
    for curves in (CURVES, {"epsilon 1": CURVES["epsilon 1"]}):
        path = tmp_path / f"{len(curves)}.png"
        plot_accuracy(path, curves, baseline=("no privacy", 0.95), title="a title", spent="epsilon")
        pictures.append(imread(path)[..., :3])
    colours = [len(np.unique(picture.reshape(-1, 3), axis=0)) for picture in pictures]
    assert pictures[0].shape == (630, 1050, 3)
    assert colours[0] > colours[1] > 10


def test_a_place_that_cannot_be_written_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        demo.demo(tmp_path / "file" / "runs")
    assert "training" not in capsys.readouterr().out
