"""What goes to standard error: warnings as lines, and progress while a command is silent."""

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import call


def test_a_warning_is_one_line_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubtful(**_: object) -> None:
        warnings.warn("delta=0.1 is more than\none in 5 records", UserWarning, stacklevel=1)

    monkeypatch.setattr("hush.cli.questions.opt.refuse_together", doubtful)
    result = call("calibrate", "--epsilon", "2", "--noise", "1", "--rate", "0.01", "--json")
    assert result.returncode == 0
    assert result.stderr.splitlines() == ["hush: warning: delta=0.1 is more than one in 5 records"]
    assert json.loads(result.stdout)["steps"] > 0


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.training.progress._SECONDS", 0.01)


def stopped_after(line: str, seconds: float = 60.0) -> Callable[..., Any]:
    """A function that runs until a line was printed, and then fails."""

    def never(*_: Any, **__: Any) -> None:
        deadline = time.monotonic() + seconds
        while line not in sys.stderr.getvalue() and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.01)
        raise OSError("stopped")

    return never


COMPARE = "compare --records 100 --dimension 5 --rate 0.1 --steps 1"


@pytest.mark.parametrize(
    ("asked", "slow", "line"),
    [
        ("probe --steps 1", "hush.training.methods.public_bases.probe", "measuring the grad"),
        (COMPARE, "hush.accounting.compare.compare", "calibrating the noise"),
        ("pate --teachers 5", "hush.pate.run.pate", "training teachers: 0 of 5"),
        ("tune --delta 1e-4", "hush.training.tuning.tune._outcomes", "tuning (do not publish"),
    ],
)
@pytest.mark.usefixtures("_often")
def test_commands_that_take_minutes_show_progress(
    asked: str, slow: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, stopped_after(line))
    for options in ((), ("--json",)):
        result = call(*asked.split(), *options, cwd=tmp_path)
        assert f"hush: {line}" in result.stderr
        assert result.stderr.endswith("hush: stopped\n")
        assert "\r" not in result.stderr
        assert result.stdout == ""


@pytest.mark.usefixtures("_often")
def test_recipes_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "computing slow: "
    monkeypatch.setattr("hush_recipes.registry.all_recipes", lambda: {"slow": stopped_after(line)})
    assert f"hush: {line}" in call("reproduce", "slow").stderr


@pytest.mark.usefixtures("_often")
def test_an_audit_counts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call("train", "--steps", "2", "--delta", "1e-4", "--run-dir", tmp_path / "run")
    line = "training with canaries: 2 of 2 steps"
    monkeypatch.setattr("hush.cli.audit_runner.one_run", stopped_after(line))
    assert f"hush: {line}" in call("audit", tmp_path / "run").stderr


@pytest.mark.usefixtures("_often")
def test_quiet_commands_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.accounting.compare.compare", stopped_after("none", seconds=0.1))
    asked = COMPARE.split()
    assert "calibrating" in call(*asked).stderr
    assert call(*asked, "--quiet").stderr == "hush: stopped\n"
