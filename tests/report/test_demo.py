from pathlib import Path

import pytest

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
