"""Selective runs from the shell."""

from pathlib import Path

import pytest

from hush.core.plan import read_plan
from tests.cli.command import answer, call


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_selective_run_says_how_many_trials_were_accepted() -> None:
    plan = ["--plan", "dpsur", "--batch-size", "256", "--test-batch", "64", "--test", "summed"]
    asked = ["train", *plan, "--noise", "3", "--steps", "12", "--seed", "1"]
    run = answer(*asked, "--run-dir", "run")
    assert run["steps"] == 12
    assert 0 <= run["accepted"] <= 12
    assert run["plan"]["release"]["test"] == "summed"
    text = call(*asked, "--run-dir", "again").stdout
    assert f"12 trials, {run['accepted']} accepted, of Plan(" in text
    by_file = ("train", "--plan", "run/plan.toml", "--steps", "12", "--seed", "1")
    assert answer(*by_file)["accepted"] == run["accepted"]


def test_a_test_that_cannot_be_accounted_for_is_refused() -> None:
    asked = (
        "train --plan dpsur --test-batch 64 --test-noise 1.3 --test-threshold -90 --noise 2 --steps 5"
    )
    result = call(*asked.split())
    assert result.returncode == 2
    assert "between m=1.12e-268 and M=4.22e-257: 5 trials would most likely all be" in result.stderr


def test_the_tuner_prints_the_better_plan(tmp_path: Path) -> None:
    asked = ("tune-selective", "--records", "60000", "--batch-size", "2048", "--updates", "600")
    path = tmp_path / "plan.toml"
    path.write_text(call(*asked, "--epsilon", "1").stdout)
    tuned = answer(*asked, "--epsilon", "1")
    assert tuned["best"] == "summed"
    assert tuned["tests"]["summed"]["plan"] == read_plan(path).to_plain()
    assert tuned["tests"]["mean"]["trials"] == 1200
    noise = {test: choice["plan"]["noise"]["multiplier"] for test, choice in tuned["tests"].items()}
    assert noise["summed"] < noise["mean"]
