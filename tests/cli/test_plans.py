"""`hush plans`, and named plans in other commands."""

from dataclasses import replace
from pathlib import Path

import pytest

import hush
from hush import plans
from hush.core.plan import read_plan
from tests.cli.command import answer, call


def test_plans_are_listed_and_printed_as_files(tmp_path: Path) -> None:
    text = call("plans").stdout
    for name, named in plans.NAMES.items():
        assert f"{name}: {named.summary}" in text
        assert named.paper in text
        path = tmp_path / "plan.toml"
        path.write_text(call("plans", name).stdout)
        assert read_plan(path) == named.make()
    spent = answer("account", "--plan", "dpsgd", "--steps", "10")
    assert spent["charged"] == [{"plan": plans.dpsgd().to_plain(), "steps": 10}]


@pytest.mark.parametrize("name", ["dpsgd", "dpsur", "twice", "beta", "rectified"])
def test_a_named_plan_trains_within_the_budget(name: str, tmp_path: Path) -> None:
    asked = ("train", "--plan", name, "--epsilon", "2", "--steps", "3", "--run-dir", tmp_path / "run")
    run = answer(*asked)
    own, found = plans.NAMES[name].make(), hush.Plan.from_plain(run["plan"])
    assert replace(found, noise=own.noise) == own
    assert run["steps"] == 3
    assert 1.9 < run["guarantee"]["epsilon"]["upper"] <= 2


def test_subspaces_are_those_of_the_public_records(tmp_path: Path) -> None:
    asked = ("train", "--plan", "subspaces", "--noise", "5", "--steps", "2", "--run-dir", tmp_path)
    refused = call(*asked)
    assert refused.returncode == 2
    assert "no record is public. Pass e.g. --public-records 100" in refused.stderr
    assert not any(tmp_path.iterdir())
    ranks = answer(*asked, "--public-records", "60")["plan"]["clipping"]["ranks"]
    assert sum(ranks[:-1]) <= 60 < sum(ranks) == 650


def test_costs_of_watched_records_are_summarised_and_private(tmp_path: Path) -> None:
    asked = ("train", "--plan", "truncated", "--per-instance", "20", "--steps", "1", "--run-dir")
    run = tmp_path / "run"
    printed = call(*asked, run).stdout
    epsilons, losses = printed.partition("sensitive, of 20 watched")[2].splitlines()[1:3]
    for line, title in ((epsilons, "per-instance epsilon at delta 1e-05"), (losses, "Fisher info")):
        assert line.strip().startswith(title)
        assert "median" in line
        counts = line.partition("records in ten bins of equal width: ")[2].split()
        assert len(counts) == 10
        assert sum(map(int, counts)) == 20
    assert (run / "per_instance.npz").stat().st_mode & 0o777 == 0o600
    noise = read_plan(run / "plan.toml").noise
    assert isinstance(noise, hush.Truncated)
    assert noise.bound == pytest.approx(noise.scale), "calibration keeps it one deviation away"
    refused = call(*asked, tmp_path / "other", "--rate", "0.1")
    assert refused.returncode == 2
    assert "Poisson x L2 has no per-instance charge" in refused.stderr
    assert "Use FullBatch" in refused.stderr


def test_hyperparameters_replace_those_of_the_plan(tmp_path: Path) -> None:
    asked = ("train", "--plan", "beta", "--beta", "1.2", "--batch-size", "100", "--noise", "9")
    run = answer(*asked, "--clip", "0.5", "--steps", "2", "--run-dir", tmp_path / "run")
    rate = 100 / 1437
    assert run["plan"] == plans.beta(beta=1.2, rate=rate, multiplier=9.0, clip_norm=0.5).to_plain()
    for wrong, message in {
        "--plan dpsgd --beta 1.2": "--beta is no hyperparameter of --plan dpsgd: its noise is Gaussian",
        "--plan dpsgd --test-clip 1": "--test-clip is no hyperparameter of --plan dpsgd: its release is",
        "--plan nix": "neither a plan file nor a named plan: dpsgd, dpsur",
        "--beta 1.2": "--beta is a hyperparameter of a named plan",
        "--plan beta --beta 0.5": "beta=0.5 must be",
    }.items():
        refused = call("train", *wrong.split(), cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
