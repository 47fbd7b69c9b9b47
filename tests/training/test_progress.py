import pytest

from hush.training.progress import RunProgress


def test_the_bar_shows_steps_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(4, 1, shown=True) as bar:
        bar.advance()
        bar.show({"step": 2, "loss": 0.25, "accuracy": 0.5, "epsilon": 1.25})
    shown = capsys.readouterr().err
    for part in ("2/4", "loss 0.250", "accuracy 50.0%", "epsilon 1.250"):
        assert part in shown


def test_it_is_silent_unless_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(4, 0, shown=False) as bar:
        bar.advance()
        bar.show({"loss": 0.25})
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
