"""What goes to standard error: warnings as lines, and progress while a command is silent."""

import json
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hush.cli.output import progress_lines
from tests.cli.command import call


class DoubtfulDelta(UserWarning):
    pass


def test_a_warning_is_one_line_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubtful(*_: object) -> None:
        warnings.warn("delta=0.1 is more than\none in 5 records", DoubtfulDelta, stacklevel=1)

    monkeypatch.setattr("hush.cli.accounting.refuse_together", lambda **_: doubtful())
    asked = ("calibrate", "--epsilon", "2", "--noise", "1", "--rate", "0.01", "--json")
    result = call(*asked)
    assert result.returncode == 0
    assert result.stderr.splitlines() == ["hush: warning: delta=0.1 is more than one in 5 records"]
    assert json.loads(result.stdout)["steps"] > 0


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.cli.output._SECONDS", 0.01)


@pytest.mark.usefixtures("_often")
def test_progress_is_told_while_a_task_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ""
    with progress_lines("teachers trained", 30) as done:
        done()
        done()
        deadline = time.monotonic() + 60
        while "2 of 30" not in lines and time.monotonic() < deadline:
            time.sleep(0.01)
            lines += capsys.readouterr().err
    assert "hush: teachers trained: 2 of 30, 0 seconds so far\n" in lines
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "it ends with the task"


def test_a_task_that_fails_ends_its_progress() -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), progress_lines("training"):
        raise KeyboardInterrupt
    assert threading.active_count() == before


PATE = ("pate", "--teachers", "5", "--queries", "10", "--epochs", "1", "--model", "logistic")


@pytest.mark.parametrize(
    ("asked", "slow", "line"),
    [
        (
            ("probe", "--records", "20", "--steps", "1"),
            "hush.training.methods.public_gradients.probe",
            "measuring the grad",
        ),
        (
            ("compare", "--records", "100", "--dimension", "5", "--rate", "0.1", "--steps", "1"),
            "hush.accounting.compare.compare",
            "calibrating the noise",
        ),
        (PATE, "hush.pate.run.pate", "teachers trained: 0 of 5"),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.usefixtures("_often")
def test_commands_that_take_minutes_are_not_silent(
    asked: tuple[str, ...],
    slow: str,
    line: str,
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> SimpleNamespace:
        deadline = time.monotonic() + 60
        while line not in sys.stderr.getvalue() and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.01)
        raise OSError("stopped")

    monkeypatch.setattr(slow, never)
    result = call(*asked, *(["--json"] if as_json else []), cwd=tmp_path)
    assert f"hush: {line}" in result.stderr
    assert result.stderr.endswith("hush: stopped\n")
    assert result.stdout == ""
