"""The demonstration: its table, figure and report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

import hush
from hush_recipes import demo


def test_the_demonstration_runs_every_method_within_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.demo(tmp_path, steps=12, seeds=1)
    printed = capsys.readouterr().out
    table = (tmp_path / "table.md").read_text()
    assert table.strip() in printed
    rows = {line.split("|")[1].strip(): line.split("|")[2:] for line in table.splitlines()[2:9]}
    assert next(iter(rows)) == "no privacy"
    assert len(rows) == 7
    assert "result of its own" in table
    assert f"learning rate {demo._LEARNING_RATE:g}" in table
    for name, (epsilon, accuracy, rate, clip, steps, noise, own, _) in rows.items():
        assert int(steps.split()[0]) > 0
        assert noise.strip().endswith(" votes") == (name == demo._PATE)
        if name not in ("no privacy", demo._PATE):
            assert 0 < float(rate.split(" x ")[0]) <= 1
            assert 0 < float(clip.split(",")[0]) <= 1
        if name != "no privacy":
            assert 2.9 < float(epsilon) <= 3.0
            assert float(noise.split()[0].strip(",")) > 0
        assert 0 < float(accuracy.strip().rstrip("%")) <= 100
        assert own.strip() or name in ("no privacy", "DP-SGD")
    assert "do not repeat the results above" in printed
    assert "report.html (the first run of DP-SGD)" in printed
    for paper, command, page in demo.SOURCES.values():
        line = next(line for line in printed.splitlines() if f"| {command} " in line)
        assert paper in line
        assert page in line
        assert (Path(__file__).parents[2] / page).exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["guarantee"]["randomness"] == "seeded"
    assert report["guarantee"]["epsilon"]["upper"] <= 3
    assert report["statements"]["for_lawyers"] in (tmp_path / "report.html").read_text()
    assert imread(tmp_path / "plot.png").shape == (510, 960, 4)
    with hush.Ledger(tmp_path / "dp-sgd" / "ledger.jsonl") as ledger:
        assert sum(ledger.counts.values()) == 12


def test_the_ratio_of_variances_is_that_of_the_deviations() -> None:
    twice = demo.methods(1437, 650, steps=12)[2][0]
    assert isinstance(twice.clipping, hush.Subspaces)
    ratio = demo._variance_ratio(twice, 12)
    blocks = zip(demo._multipliers(twice), twice.clipping.l2, strict=True)
    deviations = [number * norm for number, norm in blocks]
    isotropic = hush.calibrate(replace(twice, noise=hush.Gaussian(1.0)), demo.BUDGET, steps=12)
    one = isotropic.noise.to_plain()["multiplier"] * isotropic.clipping.reference_norm
    # the complement of the subspaces is in ordinary coordinates
    shaped = sum(rank * s**2 for rank, s in zip((10, 40, 650), deviations, strict=True))
    assert ratio == pytest.approx(shaped / (700 * one**2), rel=1e-6)
