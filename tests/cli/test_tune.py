"""`hush tune`."""

import json
from pathlib import Path

import hush
from tests.cli.command import answer

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
    assert answer("account", tmp_path / "run")["epsilon"] == said["guarantee"]["epsilon"]
