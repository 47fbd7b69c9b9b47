"""The help of all commands, and the modules that it imports."""

import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from hush.cli.main import app
from hush.cli.options import MODELS
from hush.core.guarantee import DEFAULT_DELTA
from tests.cli.command import answer, call


def test_values_of_options_are_in_the_help_and_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    """In a new process, because the tests have imported torch."""
    from hush.models import networks

    assert tuple(networks())[: len(MODELS)] == MODELS
    wrong = [("--neighbours", "exact"), ("--data", "x"), ("--device", "x"), ("--features", "x")]
    wrong += [("--model", "x"), ("--test", "x")]
    code = (
        "import sys\nfrom unittest import mock\nfrom hush.cli.main import main\n"
        f"for option in {wrong}:\n"
        "    with mock.patch.object(sys, 'argv', ['hush', 'train', *option]):\n"
        "        try:\n            main()\n        except SystemExit as end:\n"
        "            print(option[0], end.code, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.splitlines() == [f"{option} 2 False" for option, _ in wrong], result.stderr
    described = " ".join(call("train", "--help").stdout.replace("│", "").split())
    defaults = (
        "256 by default",
        "by default as in the plan",
        "20 epochs by default",
        "noise of a plan file is not calibrated",
    )
    assert all(each in described for each in defaults)
    choices = ("zero-out|add/remove", "summed|mean", "efficientnet-lite0", "wrn-10-2", "fashion-mnist")
    for value in choices:
        assert value in described


def test_claims_are_listed_with_their_tests() -> None:
    claims = answer("claims")["claims"]
    text = call("claims").stdout
    assert len(claims) == text.count("  test     tests/recipes/test_claims.py::test_")
    assert all(claim["statement"] in text for claim in claims)


def test_help_names_every_command_and_no_range_of_integers() -> None:
    text = call("--help").stdout
    for command in get_command(app).commands:  # type: ignore[attr-defined]
        assert command in text
        helped = call(command, "--help").stdout
        assert "x<=" not in helped
        assert "x>=" not in helped


def test_every_command_has_the_same_default_delta() -> None:
    parameters = [p for c in get_command(app).commands.values() for p in c.params]  # type: ignore[attr-defined]
    deltas = [each.default for each in parameters if each.name == "delta"]
    assert {DEFAULT_DELTA} <= set(deltas) <= {DEFAULT_DELTA, None}, "None: the delta of a ledger"
