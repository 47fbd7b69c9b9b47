"""The command line as a whole: mistakes, help, and what is loaded for them."""

import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush.cli.options import MODELS
from tests.cli.command import answer, call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("account", "nothing to account for"),
        ("account --noise 1 --steps 10", "--records and --batch-size"),
        ("account --noise 1 --rate 0.1", "Pass --steps or --epochs"),
        ("account --noise 0 --rate 0.1 --steps 10", "multiplier=0"),
        ("account --noise 1 --rate 1.5 --steps 10", "rate=1.5 must be"),
        ("account --noise 1 --rate nan --steps 10", "rate=nan must be"),
        ("account --noise 1 --rate 0.1 --steps -1", "steps=-1"),
        ("account --noise 1 --rate 0.1 --steps 10 --delta 0", "delta=0"),
        ("account --noise 1 --rate 0.1 --steps 10 --delta 1", "delta=1"),
        ("account --noise 1 --records 10 --batch-size 20 --steps 1", "<= the 10 records"),
        ("account --noise 1 --rate 0.1 --epochs 0", "--epochs 0"),
        ("account --plan none.toml --steps 1", "cannot read the plan file none.toml"),
        ("account --ledger none.jsonl", "no ledger at none.jsonl"),
        ("calibrate --epsilon -1 --rate 0.1 --steps 1", "epsilon=-1"),
        ("calibrate --epsilon 1 --rate 0.1 --steps 0", "steps=0"),
        ("calibrate --epsilon 1 --noise 1", "pass --steps to find the rate"),
        ("calibrate --epsilon 1 --noise 1 --rate 0.1 --steps 9", "nothing to find"),
        (
            "compare --records 9 --dimension 5 --rate 0.1 --steps 1 --subspaces a:1",
            "--subspaces a:1",
        ),
        (
            "compare --records 9 --dimension 5 --rate 0.1 --steps 1 --linf-ratio 2",
            "--linf-ratio=2.0 must",
        ),
        (
            "compare --records 9 --dimension 100 --rate 0.1 --steps 1 --linf-ratio 0.05",
            "1/sqrt(100) = 0.1",
        ),
        ("train --data none", "--data none must be one of digits, adult"),
        ("train --model none", "--model none must be one of logistic, mlp"),
        ("train --model imdb-lstm", "token ids, in any number, not 1 x 8 x 8 numbers"),
        ("train --features none", "--features none must be one of efficientnet-lite0, scat"),
        ("train --batch-size 5000", "<= the 1437 records"),
        ("train --epsilon 0", "epsilon=0"),
        ("train --noise 0.3 --epsilon 0.1", "below what one step costs"),
        ("train --device warp", "--device warp must be cpu, cuda or cuda:N"),
        ("train --lr -1", "--lr=-1.0 must be"),
        ("train --lr nan", "--lr=nan must be"),
        ("train --momentum 2", "--momentum=2.0 must be"),
        ("train --noise 0", "multiplier=0"),
        ("train --clip 0", "norm=0"),
        ("train --epochs inf", "--epochs inf"),
        ("train --adam --momentum 0.5", "--adam and --momentum"),
        ("train --plan p.toml --clip 1", "--plan and --clip"),
        ("train --steps 3 --epochs 3", "--steps and --epochs"),
        ("train --resume --run-dir nowhere", "no run in nowhere"),
        ("train --run-dir /proc/hush", "/proc/hush"),
        ("train --views 0", "--views=0 must be"),
        ("train --views 1000000", "<= 1024"),
        ("train --features scattering --views 2", "is for images, and scattering features are none"),
        (
            "train --data mnist --data-dir nowhere --plan none.toml",
            "cannot read the plan file none.toml",
        ),
        ("train --public-records 1437", "--public-records 1437 must be"),
        ("account --noise 1 --rate 0.1 --batch-size 5 --records 9 --steps 1", "--rate and --batch-size"),
        ("train --device meta", "--device meta must be cpu, cuda or cuda:N"),
        ("train --device cuda:99", "numbered from 0"),
        ("train --arithmetic exact", "--arithmetic exact must be one of proved, assumed"),
        ("train --test-batch 9 --test both", "--test both must be one of summed, mean"),
        ("pate --data none", "--data none must be one of digits"),
        ("audit runs --kind all", "--kind all must be one of gradient, input"),
        ("probe --model none", "--model none must be one of logistic"),
        (
            "account --ledger .",
            "is a folder, and a ledger is a file. For a run's folder: hush account .",
        ),
        ("account --noise 1 --rate 0.1 --steps 10000000000000", "must be a whole number"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(arguments: str, message: str, tmp_path: Path) -> None:
    result = call(*arguments.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.safetensors")), "nothing was trained"


def test_values_of_options_are_in_the_help_and_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    """In a process of its own: here torch is loaded already."""
    from hush.models import networks

    assert tuple(networks())[: len(MODELS)] == MODELS
    wrong = [("--arithmetic", "exact"), ("--data", "x"), ("--device", "x"), ("--features", "x")]
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
    for value in ("proved, or assumed", "summed", "efficientnet-lite0", "wrn-10-2", "fashion-mnist"):
        assert value in described


def test_claims_are_listed_with_their_tests() -> None:
    claims = answer("claims")["claims"]
    text = call("claims").stdout
    assert len(claims) == text.count("  test     tests/accounting/test_claims.py::test_")
    assert all(claim["statement"] in text for claim in claims)


def test_the_version_is_the_packages() -> None:
    assert call("--version").stdout.strip() == hush.__version__


def test_help_names_every_command() -> None:
    text = call("--help").stdout
    for command in ("train", "account", "calibrate", "compare", "claims", "demo", "reproduce"):
        assert command in text
