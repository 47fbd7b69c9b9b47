"""`hush train` and `hush tune`: runs, their files, and resuming."""

import json
import re
from pathlib import Path

import pytest

import hush
from hush.cli.train import train
from hush.core.plan import read_plan
from tests.cli.command import answer, call


def test_train_without_arguments_and_what_it_leaves(tmp_path: Path) -> None:
    result = call("train", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stdout
    folder = tmp_path / "runs" / "digits-1"
    for name in ("plan.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors"):
        assert (folder / name).exists()
    with hush.Ledger(folder / "ledger.jsonl"):  # an open ledger can be read
        spent = answer("account", "--ledger", folder / "ledger.jsonl")
    assert spent["epsilon"]["upper"] <= 3.0
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert spent["epsilon"]["upper"] == metrics[-1]["epsilon"]
    assert metrics[-1]["accuracy"] > 0.8, "ten classes at epsilon 3"


def test_train_by_plan_file_repeats_resumes_and_stops(tmp_path: Path, plan_file: Path) -> None:
    asked = ("train", "--plan", plan_file, "--seed", "1", "--run-dir", "run")
    first = answer(*asked, "--steps", "20", cwd=tmp_path)
    assert first["plan"] == read_plan(plan_file).to_plain()
    assert first["steps"] == 20
    assert call(*asked, "--steps", "30", cwd=tmp_path).returncode == 2
    more = answer(*asked, "--steps", "30", "--resume", cwd=tmp_path)
    assert more["steps"] == 30
    whole = answer(*asked[:-1], "whole", "--steps", "30", cwd=tmp_path)
    assert whole["final"] == more["final"]
    way = f"`hush calibrate --plan {plan_file} --epsilon 9 --delta 1e-05 --steps 2`"
    few = call(*asked[:-1], "few", "--steps", "2", "--epsilon", "9", "--lr", "0.5", cwd=tmp_path).stdout
    assert f"2 steps of {read_plan(plan_file)}, learning rate 0.5, momentum 0\n" in few
    assert re.search(rf"the noise of {plan_file} spends [\d.]+ of epsilon 9: {way} finds", few)
    stopped = answer(*asked[:-1], "stopped", "--epsilon", "0.7", cwd=tmp_path)
    assert stopped["stopped"] == "budget"
    assert stopped["guarantee"]["epsilon"]["upper"] <= 0.7


def test_resuming_under_another_plan_says_how_to_continue(tmp_path: Path) -> None:
    asked = ("train", "--run-dir", "run", "--seed", "1", "--batch-size", "100", "--steps")
    assert answer(*asked, "4", cwd=tmp_path)["steps"] == 4
    for other in (("8",), ("4", "--epsilon", "6")):
        refused = call(*asked, *other, "--resume", cwd=tmp_path)
        assert refused.returncode == 2
        assert re.search(r"noise\.multiplier was \d.* and is now \d.*", refused.stderr)
        assert "calibrated noise depends on the budget and the steps" in refused.stderr
        assert "(--plan run/plan.toml)" in refused.stderr
    more = ("train", "--run-dir", "run", "--plan", "run/plan.toml", "--seed", "1", "--resume")
    assert answer(*more, "--steps", "8", "--epsilon", "6", cwd=tmp_path)["steps"] == 8


def test_a_run_is_resumed_with_the_settings_it_began_with(tmp_path: Path) -> None:
    begun = ("train", "--run-dir", "run", "--noise", "2", "--rate", "0.1", "--seed", "3", "--steps")
    answer(*begun, "2", cwd=tmp_path)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    more = (*begun, "3", "--resume")
    for changed, message in (
        (("--model", "mlp"), "model was logistic and is now mlp"),
        (("--lr", "0.5"), "learning_rate was 1.0 and is now 0.5"),
        (("--features", "scattering"), "features was not set and is now scattering"),
        (("--delta", "1e-6"), "delta was 1e-05 and is now 1e-06"),
        (("--data", "mnist", "--data-dir", "nowhere"), "data was digits and is now mnist"),
        (("--seed", "4"), "began with another seed, not with the seed 4"),
    ):
        refused = call(*more, *changed, cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")} == before


def test_a_run_that_is_interrupted_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hush.training.progress.Progress.advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run_dir=tmp_path / "run", noise=2.0, steps=2, as_json=True)
    assert f"--run-dir {tmp_path / 'run'} --resume" in capsys.readouterr().err


def test_noise_that_drowns_the_records_is_said(tmp_path: Path) -> None:
    usual = ("train", "--batch-size", "200", "--steps", "2", "--run-dir")
    drowned = call(*usual, tmp_path / "a", "--epsilon", "1e-9")
    assert drowned.returncode == 0
    said = "the noise is larger than the signal: over 2 steps, even if all gradients agree"
    assert said in drowned.stderr
    assert "signal" not in call(*usual, tmp_path / "b").stderr


SHORT = ("tune", "--steps", "3", "--trials", "2", "--delta", "1e-4", "--seed", "1")


def test_a_search_leaves_the_best_run_and_its_charge(tmp_path: Path) -> None:
    said = answer(*SHORT, "--lr", "0.5:2", "--clip", "0.5,1", "--run-dir", tmp_path / "run")
    assert 0.5 <= said["settings"]["learning_rate"] <= 2
    assert said["settings"]["clip"] in (0.5, 1.0)
    assert 2.9 < said["guarantee"]["epsilon"]["upper"] <= 3
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("anchor.json", "ledger.jsonl", "plan.toml", "tuned.json", "model.safetensors"),
        *("settings.json", "metrics.jsonl"),
    }
    assert json.loads((tmp_path / "run" / "tuned.json").read_text())["settings"] == said["settings"]
    with hush.Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True) as ledger:
        (plan,) = ledger.counts
        assert plan.release == hush.BestOf(steps=3, mean=2.0, score=10.0)
    accounted = answer("account", tmp_path / "run")
    assert accounted["epsilon"] == said["guarantee"]["epsilon"]
    assert not [note for note in accounted["notes"] if "missing" in note]
