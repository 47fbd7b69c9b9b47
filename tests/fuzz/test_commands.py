"""Odd values of every option of the commands: an answer or an error of hush, never a traceback."""

import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from hush.cli.main import app
from tests.cli.command import call

COMMANDS = {
    "train": "--steps 1 --noise 1 --rate 0.1",
    "tune": "--steps 1 --trials 2",
    "account": "--noise 1 --rate 0.1 --steps 10",
    "explain": "--noise 1 --rate 0.1 --steps 10",
    "calibrate": "--epsilon 1 --rate 0.1 --steps 10",
    "compare": "--records 1000 --dimension 10 --rate 0.1 --steps 2",
    "report": "run",
    "audit": "run --no-others --canaries 8",
    "pate": "--teachers 5 --queries 5 --epochs 1 --model logistic",
}
WRONG = ["nan", "-inf", "abc", "9" * 400]
"""Values that no option with a number takes."""
TEXT = {
    *("--data-dir", "--run-dir", "--out", "--plan", "--units", "--ledger", "--device"),
    *("--data", "--features", "--model", "--neighbours", "--test", "--subspaces", "--kind"),
    "--test-data",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    asked = ("train", "--steps", 2, "--noise", 20, "--rate", 0.5, "--run-dir", folder)
    assert call(*asked).returncode == 0
    return folder


def options(command: str) -> list[str]:
    """Options of a command that take a number."""
    parameters = get_command(app).commands[command].params  # type: ignore[attr-defined]
    named = [each for each in parameters if each.opts[0].startswith("--")]
    return [each.opts[0] for each in named if not each.is_flag and each.opts[0] not in TEXT]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_numbers_are_refused_before_any_work(command: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    for option in options(command):
        words = COMMANDS[command].split()
        replaced = {option, "--rate"} if option == "--batch-size" else {option}
        replaced |= {"--steps"} if option == "--epochs" else set()
        for name in replaced & set(words):
            place = words.index(name)
            words[place : place + 2] = []
        for value in WRONG:
            result = call(command, *words, f"{option}={value}", cwd=tmp_path)  # raises a traceback
            assert result.returncode == 2, (option, value, result.stdout, result.stderr)
            assert 0 < len(result.stderr) < 3500, (option, value)
    assert sorted(tmp_path.rglob("*")) == before, "no files are left"
