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


@pytest.mark.usefixtures("_often")
def test_quiet_commands_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.accounting.compare.compare", stopped_after("none", seconds=0.1))
    asked = COMPARE.split()
    assert "calibrating" in call(*asked).stderr
    assert call(*asked, "--quiet").stderr == "hush: stopped\n"
