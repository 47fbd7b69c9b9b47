"""The demonstration: its table, figure and report."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

import hush
from hush.data import load, tensors
from hush_recipes import demo
from tests.cli.command import answer


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
    assert "specific to the method" in table
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
    assert "The commands have the settings of the table" in printed
    assert "report.html (the first of 1 runs of DP-SGD, not their mean)" in printed
    for name, (paper, command, page) in demo.SOURCES.items():
        assert f"{name} ({paper}): {page}\n    {command}\n" in printed
        assert (Path(__file__).parents[2] / page).exists()
    report = (tmp_path / "report.html").read_text()
    assert "randomness seeded" in report
    assert "guesses whether a record was used from even odds" in report
    assert imread(tmp_path / "plot.png").shape == (510, 960, 4)
    with hush.Ledger(tmp_path / "dp-sgd" / "ledger.jsonl") as ledger:
        assert sum(ledger.counts.values()) == 12


PLANS = {name: source for name, source in demo.SOURCES.items() if source[1].startswith("hush train")}


@pytest.mark.parametrize("number", range(len(PLANS)), ids=PLANS)
def test_a_printed_command_runs_the_plan_of_its_row(number: int, tmp_path: Path) -> None:
    x, y, _, _ = tensors(load("digits"))
    plan, steps = demo.methods((x[:100], y[:100]), len(x), 200)[number]
    _, *command = [source[1] for source in PLANS.values()][number].split()
    run = answer(*command, "--seed", "0", "--per-instance", "0", cwd=tmp_path)
    found = hush.Plan.from_plain(run["plan"])
    assert run["steps"] == steps
    assert (found.sampling, found.release) == (plan.sampling, plan.release)
    if isinstance(plan.clipping, hush.Subspaces):
        assert isinstance(found.clipping, hush.Subspaces)
        assert found.clipping.l2 == pytest.approx(plan.clipping.l2, rel=5e-3)
        assert isinstance(plan.noise, hush.BlockGaussian)
        assert isinstance(found.noise, hush.BlockGaussian)
        assert found.noise.multipliers == pytest.approx(plan.noise.multipliers, rel=5e-3)
    else:
        assert (found.clipping, found.noise) == (plan.clipping, plan.noise)


def test_the_ratio_of_variances_is_that_of_the_deviations() -> None:
    x, y, _, _ = tensors(load("digits"))
    twice = demo.methods((x[:100], y[:100]), 1437, steps=12)[2][0]
    assert isinstance(twice.clipping, hush.Subspaces)
    ratio = demo._variance_ratio(twice, 12)
    blocks = zip(demo._multipliers(twice), twice.clipping.l2, strict=True)
    deviations = [number * norm for number, norm in blocks]
    isotropic = hush.calibrate(replace(twice, noise=hush.Gaussian(1.0)), demo.BUDGET, steps=12)
    one = isotropic.noise.to_plain()["multiplier"] * isotropic.clipping.reference_norm
    # the complement of the subspaces is in ordinary coordinates
    ranks = (4, 9, 18, 27, 650)
    shaped = sum(rank * s**2 for rank, s in zip(ranks, deviations, strict=True))
    assert ratio == pytest.approx(shaped / (sum(ranks) * one**2), rel=1e-6)
