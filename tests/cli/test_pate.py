"""`hush pate` as a user meets it."""

import json
import re
from pathlib import Path

from tests.cli.command import answer, call

SMALL = ("--teachers", "30", "--queries", "40", "--epochs", "10", "--model", "logistic", "--lr", "0.05")


def test_a_run_prints_what_may_be_published_and_what_may_not(tmp_path: Path) -> None:
    result = call("pate", *SMALL, "--run-dir", tmp_path / "run", "--seed", "0")
    assert result.returncode == 0, result.stderr
    public, _, private = result.stdout.partition("sensitive, computed from the private records")
    assert "40 of 40 queries answered" in public
    assert "student: accuracy" in public
    assert "epsilon <= 7.99" in public
    assert "add/remove one record, proved, randomness: seeded, publishable" in public
    assert "of their votes right" in private
    spread = re.search(
        r"deviation ([\d.]+) on each count of the votes of 30 teachers; fewer --queries", public
    )
    assert spread is not None
    assert float(spread[1]) > 30 / 6
    assert "sensitive: do not publish" in private
    assert "seeded" in private
    resumed = call("pate", *SMALL, "--run-dir", tmp_path / "run", "--seed", "0", "--resume", "--json")
    value = json.loads(resumed.stdout)
    assert value["answered"] == 40
    assert value["guarantee"]["epsilon"]["upper"] <= 8.0
    assert value["sensitive"]["per_instance"]["sensitive"] is True
    for named in ((tmp_path / "run",), ("--ledger", tmp_path / "run" / "ledger.jsonl")):
        spent = answer("account", *named)
        assert spent["epsilon"] == value["guarantee"]["epsilon"]
        assert "a PATE run has no checkpoint to compare the ledger with" in spent["notes"][1]


def test_users_are_protected_where_their_records_are_named(tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("".join(f"u{record // 5}\n" for record in range(1437)))
    result = call("pate", *SMALL, "--run-dir", tmp_path / "run", "--seed", "0", "--units", ids)
    assert result.returncode == 0, result.stderr
    assert "add/remove one user, proved" in result.stdout
    refused = call("pate", *SMALL, "--run-dir", tmp_path / "run", "--seed", "0", "--resume")
    assert "other settings (owners, per_unit)" in refused.stderr
    ids.write_text("u1\nu2\n")
    refused = call("pate", *SMALL, "--run-dir", tmp_path / "other", "--units", ids)
    assert "there are 1437 training records" in refused.stderr
    assert not (tmp_path / "other").exists()
