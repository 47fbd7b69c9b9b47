"""The demonstration report: its table, plot and page."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

import hush
from hush.report import demo
from hush.report.demo import plot_accuracy, write_page
from hush.report.figure import Table


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
    page = (tmp_path / "report.html").read_text()
    assert page.count("DP-SGD") == 2
    for row in (
        "<td>steps</td><td>20</td>",
        "<td>sampling</td><td>Poisson, rate 0.25: 359.25 of 1437 records expected a step</td>",
        "<td>clipping</td><td>Euclidean norm 1 of each record&#x27;s gradient</td>",
        "<td>learning rate</td><td>2 (SGD)</td>",
        "<td>neighbours</td><td>zero-out, one record</td>",
        "<td>randomness</td><td>seeded</td>",
    ):
        assert row in page
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    for epsilon in (1, 8):
        with hush.Ledger(tmp_path / f"epsilon-{epsilon}" / "ledger.jsonl") as ledger:
            assert sum(ledger.counts.values()) == 20
            assert ledger.epsilon(demo.DELTA).epsilon.upper <= epsilon


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    plot.write_bytes(b"picture")
    page = tmp_path / "report.html"
    table = Table(header=["a"], rows=[["<1>"]])
    settings = Table(header=["setting", "value"], rows=[["rate", "<.25>"]])
    parts = {"lead": "lead", "table": table, "plot": plot, "settings": settings}
    write_page(page, title="A & B", notes=["x < y"], **parts)  # type: ignore[arg-type]
    text = page.read_text()
    assert "<title>A &amp; B</title>" in text
    assert "<li>x &lt; y</li>" in text
    assert "data:image/png;base64,cGljdHVyZQ==" in text
    assert "<td>rate</td><td>&lt;.25&gt;</td>" in text
    assert 'src="http' not in text


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
