import pytest

from hush.training.progress import RunProgress


def test_the_bar_shows_steps_and_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with RunProgress(4, 1, visible=True) as bar:
        bar.advance()
        bar.show({"step": 2, "loss": 0.25, "accuracy": 0.5, "epsilon": 1.25, "delta": 1e-6})
    shown = capsys.readouterr().err
    for part in ("2/4", "loss 0.250", "accuracy 50.0%", "epsilon 1.250", "delta 1e-06"):
        assert part in shown


def test_lines_tell_how_far_it_is_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 4.0, 11.0, 12.0, 22.5])
    monkeypatch.setattr("hush.training.progress.time.monotonic", lambda: next(seconds))
    with RunProgress(9, 1, visible=True) as bar:
        bar.advance()
        bar.advance()
        stated = {"delta": 1e-6, "neighbours": "zero-out", "unit": "one record"}
        bar.show({"step": 3, "loss": 0.25, "epsilon": 1.25, **stated})
        bar.advance()
        bar.advance()
    assert capsys.readouterr().err.splitlines() == [
        "hush: training: 3 of 9 steps, 11 seconds so far",
        "hush: training: 5 of 9 steps, loss 0.250, epsilon 1.250, delta 1e-06, zero-out one record, 22 "
        "seconds so far",
    ]


def test_it_is_silent_unless_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(4, 0, visible=False) as bar:
        bar.advance()
        bar.show({"loss": 0.25})
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
