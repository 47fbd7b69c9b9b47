"""Standard error: warnings as lines, and progress of a long command."""

import json
import time
import warnings

import pytest

from tests.cli.command import call


def test_a_warning_is_one_line_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubtful(**_: object) -> None:
        warnings.warn("delta=0.1 is more than\none in 5 records", UserWarning, stacklevel=1)

    monkeypatch.setattr("hush.cli.questions.opt.reject_together", doubtful)
    result = call("calibrate", "--epsilon", "2", "--noise", "1", "--rate", "0.01", "--json")
    assert result.returncode == 0
    assert result.stderr.splitlines() == ["hush: warning: delta=0.1 is more than one in 5 records"]
    assert json.loads(result.stdout)["steps"] > 0


def test_quiet_commands_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        time.sleep(0.1)
        raise OSError("stopped")

    monkeypatch.setattr("hush.training.progress._SECONDS", 0.01)
    monkeypatch.setattr("hush.accounting.compare.compare", stopped)
    asked = ("compare", "--records", 100, "--dimension", 5, "--rate", 0.1, "--steps", 1)
    assert "calibrating" in call(*asked).stderr
    assert call(*asked, "--quiet").stderr == "hush: stopped\n"
