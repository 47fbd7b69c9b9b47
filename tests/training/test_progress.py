"""Progress: a bar on a terminal, lines elsewhere, silence where it is asked for."""

import threading
import time

import pytest

from hush.training.progress import Progress


def test_the_bar_shows_steps_and_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with Progress("training", 4, done=1) as bar:
        bar.advance()
        bar.show({"step": 2, "loss": 0.25, "accuracy": 0.5, "epsilon": 1.25, "delta": 1e-6})
    shown = capsys.readouterr().err
    for part in ("training", "2/4", "loss 0.250", "accuracy 50.0%", "epsilon 1.250", "delta 1e-06"):
        assert part in shown


def test_a_bar_without_a_total_still_moves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with Progress("computing the curves"):
        pass
    assert "computing the curves" in capsys.readouterr().err


def test_a_line_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 11.0, 22.5])
    monkeypatch.setattr("hush.training.progress.time.monotonic", lambda: next(seconds))
    bar = Progress("training", 9, done=1, visible=False)
    bar.advance()
    bar.advance()
    assert bar.line() == "hush: training: 3 of 9 steps, 11 seconds so far"
    stated = {"delta": 1e-6, "neighbours": "zero-out", "unit": "one record"}
    bar.show({"step": 3, "loss": 0.25, "epsilon": 1.25, **stated})
    assert bar.line() == (
        "hush: training: 3 of 9 steps, loss 0.250, epsilon 1.250, delta 1e-06, zero-out one record, 22 "
        "seconds so far"
    )


def test_what_is_not_counted_has_no_count() -> None:
    bar = Progress("calibrating", unit="mechanisms", visible=False)
    assert bar.line() == "hush: calibrating: 0 seconds so far"
    bar.advance()
    assert bar.line() == "hush: calibrating: 1 mechanisms, 0 seconds so far"


def test_lines_come_while_the_task_runs_and_end_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hush.training.progress._SECONDS", 0.01)
    lines = ""
    with Progress("training teachers", 30, unit="teachers") as bar:
        bar.advance()
        bar.advance()
        deadline = time.monotonic() + 60
        while "2 of 30" not in lines and time.monotonic() < deadline:
            time.sleep(0.01)
            lines += capsys.readouterr().err
    assert "hush: training teachers: 2 of 30 teachers, 0 seconds so far\n" in lines
    assert "\r" not in lines
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "it ends with the task"


def test_a_task_that_fails_ends_its_progress() -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Progress("training"):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_it_is_silent_unless_visible(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hush.training.progress._SECONDS", 0.001)
    with Progress("training", 4, visible=False) as bar:
        bar.advance()
        bar.show({"loss": 0.25})
        time.sleep(0.02)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
