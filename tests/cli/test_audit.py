"""`hush audit` on runs of `hush train`: below the charge, and above it where noise is missing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import hush
from hush.audit import lower_bound
from hush.core.plan import plan_text
from hush.core.randomness import RandomSource
from hush.noise import Gaussian
from tests.cli.command import call


def audit(*arguments: object) -> dict[str, Any]:
    """The JSON object of an audit, and its exit status."""
    result = call("audit", *map(str, arguments), "--json")
    assert result.returncode in (0, 1), result.stderr
    value: dict[str, Any] = json.loads(result.stdout)
    return {**value, "exit": result.returncode}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    plan = hush.plans.dpsgd(rate=1.0, clip_norm=1.0, multiplier=20.0)
    (folder / "plan.toml").write_text(plan_text(plan))
    asked = ("train", "--plan", "plan.toml", "--steps", 9, "--seed", 0, "--run-dir", "run")
    result = call(*asked, "--lr", 0.5, "--momentum", 0.5, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_the_charge_says_seeded_where_the_audit_was_given_a_seed(run: Path) -> None:
    for options, randomness in (((), "secret"), (("--seed", 1), "seeded")):
        result = audit(run, "--no-others", "--canaries", 8, *options)
        assert result["charge"]["randomness"] == randomness


@pytest.mark.parametrize("options", [(), ("--no-others",), ("--kind", "input")])
def test_a_run_stays_below_its_charge(run: Path, options: tuple[str, ...]) -> None:
    result = audit(run, "--seed", 1, *options)
    charged = hush.epsilon(hush.Plan.from_plain(result["plan"]), 9, 1e-5).epsilon
    assert result["charge"]["epsilon"] == charged.to_plain()
    assert result["lower_bound"] <= charged.upper
    assert (result["exceeded"], result["exit"], result["steps"]) == (False, 0, 9)
    assert result["sensitive"]
    assert result["canaries"] == (180 if options == ("--kind", "input") else 256)
    assert 0 <= result["guesses"]["right"] <= result["guesses"]["made"] <= result["canaries"]


def test_missing_noise_is_caught_and_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    privatize = Gaussian.privatize

    def less_noise(self: Gaussian, location: Tensor, *, norm: float, generator: RandomSource) -> Tensor:
        return privatize(self, location, norm=norm / 32, generator=generator)

    monkeypatch.setattr(Gaussian, "privatize", less_noise)
    result = audit(run, "--seed", 1, "--no-others")
    assert result["exceeded"]
    assert result["exit"] == 1
    assert result["lower_bound"] > result["charge"]["epsilon"]["upper"]
    text = call("audit", run, "--seed", 1, "--no-others").stdout
    assert "THE BOUND IS ABOVE THE CHARGE" in text
    assert "Repeat the audit" in text


@pytest.mark.parametrize("relation", ["replace", "add/remove"])
def test_an_audit_of_another_relation_than_the_runs_says_so(
    run: Path, tmp_path: Path, relation: str
) -> None:
    constant = ("--records", 1437) if relation == "add/remove" else ()
    began = ("train", "--plan", run / "plan.toml", "--steps", 1, "--seed", 0)
    call(*began, "--neighbours", relation, *constant, "--run-dir", tmp_path / "run")
    asked = ("audit", tmp_path / "run", "--canaries", 8, "--no-others", "--seed", 1)
    text = call(*asked).stdout
    assert f"the run is private under {relation}; a canary is included or left out" in text
    assert "bound below are under zero-out" in text
    assert audit(*asked[1:])["run_neighbours"] == relation
    same = call("audit", run, "--canaries", 8, "--no-others", "--seed", 1).stdout
    assert "the run promises" not in same


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--runs 2", "at least 32 runs"),
        ("--runs 40 --canaries 2", "not independent trials"),
        ("--canaries 7", "cannot refute an epsilon"),
        ("--canaries 651", "650"),
        ("--confidence 1", "--confidence"),
    ],
)
def test_audits_that_refute_nothing_are_refused(run: Path, options: str, words: str) -> None:
    result = call("audit", run, *options.split())
    assert result.returncode == 2
    assert words in result.stderr


def test_a_folder_without_charges_or_settings_is_refused(run: Path, tmp_path: Path) -> None:
    for name in ("settings.json", "plan.toml"):
        shutil.copy(run / name, tmp_path)
    assert "no ledger.jsonl with a step of its plan" in call("audit", tmp_path).stderr
    (tmp_path / "settings.json").write_text("{}")
    shutil.copy(run / "ledger.jsonl", tmp_path)
    assert "no readable settings.json" in call("audit", tmp_path).stderr


def test_a_run_of_python_is_audited_under_its_plan(run: Path, tmp_path: Path) -> None:
    for name in ("ledger.jsonl", "plan.toml"):  # a run of hush.train has no settings
        shutil.copy(run / name, tmp_path)
    asked = ("audit", tmp_path, "--canaries", 8, "--no-others", "--seed", 1)
    assert "was audited on the bundled digits and a linear model" in call(*asked).stdout
    result = audit(*asked[1:])
    assert result["plan"] == hush.plans.dpsgd(rate=1.0, clip_norm=1.0, multiplier=20.0).to_plain()
    assert (result["steps"], result["exceeded"]) == (9, False)


def test_an_estimate_above_the_charge_says_to_repeat_the_audit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_run = lower_bound.one_run

    def lucky(*scores: Any, **options: Any) -> lower_bound.CanaryBound:
        return replace(one_run(*scores, **options), gaussian_epsilon=99.0)

    monkeypatch.setattr(lower_bound, "one_run", lucky)
    text = call("audit", run, "--canaries", 8, "--no-others", "--seed", 1).stdout
    assert "repeat the audit" in text
    assert "found no violation" in text


def test_a_launcher_is_refused_in_words_for_a_shell(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in (("audit", run), ("train", "--epochs", 1), ("tune", "--epochs", 1)):
        result = call(*command)
        assert result.returncode == 2
        assert "Start it without the launcher" in result.stderr
