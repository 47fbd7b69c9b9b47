"""Progress: a bar on a terminal, lines elsewhere; `--quiet` is tested with the commands."""

import time

import pytest
import torch
from torch import nn

from hush.training.progress import Progress
from tests.training import helpers


def test_the_bar_shows_steps_and_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with Progress("training", 4, done=1) as bar:
        bar.advance()
        bar.show({"step": 2, "loss": 0.25, "accuracy": 0.5, "epsilon": 1.23411, "delta": 1e-6})
    shown = capsys.readouterr().err
    for part in ("training", "2/4", "loss 0.250", "accuracy 50.0%", "epsilon 1.235", "delta 1e-06"):
        assert part in shown


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


def test_a_task_within_another_one_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with Progress("trial", visible=False), Progress("training", 4):
        pass
    assert capsys.readouterr().err == ""
    with Progress("training", 4):
        pass
    assert "training" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "shown"), [(None, True), (False, False)])
def test_training_shows_a_bar_by_default_on_a_terminal(
    asked: bool | None,
    shown: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = torch.randn(20, 4), torch.randint(0, 3, (20,))
    helpers.train(nn.Linear(4, 3), helpers.plan_of(), data, steps=2, progress=asked)
    assert capsys.readouterr().err == "", "not a terminal"
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr(Progress, "on_terminal", staticmethod(lambda: True))
    helpers.train(nn.Linear(4, 3), helpers.plan_of(), data, steps=2, progress=asked)
    assert ("2/2" in capsys.readouterr().err) is shown
