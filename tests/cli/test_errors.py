"""Mistakes at the command line: the value, the limit, the reason and the way out, never a traceback."""

from pathlib import Path

import pytest

from tests.cli.command import call

HUGE = "9" * 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("account", "no steps to account for"),
        ("account --noise 1 --steps 10", "--records and --batch-size"),
        ("account --noise 1 --rate 0.1", "Pass --steps or --epochs"),
        ("account --noise 1 --rate 0.1 --steps -1", "--steps=-1 must be"),
        ("account --noise 1 --rate 0.1 --steps 10 --delta 0.2", "<= 0.1: delta is the probability"),
        ("account --noise 1 --records 10 --batch-size 20 --steps 1", "<= the 10 records"),
        ("account --noise 1 --rate 0.1 --epochs 0", "--epochs 0"),
        ("account --noise 1 --rate 0.1 --batch-size 5 --records 9 --steps 1", "--rate and --batch-size"),
        ("account --plan none.toml --steps 1", "cannot read the plan file none.toml"),
        ("account --ledger none.jsonl", "no ledger at none.jsonl"),
        ("calibrate --epsilon 1 --noise 1", "the sampling rate is missing"),
        ("calibrate --epsilon 1 --noise 1 --rate 0.1 --steps 9", "no value is unknown"),
        ("calibrate --tpr .05 --fpr .01 --rate .01 --steps 3", "holds without any noise (at most 0.03"),
        ("compare --records 9 --dimension 5 --rate 0.1 --steps 1 --subspaces a:1", "--subspaces a:1"),
        (
            "compare --records 9 --dimension 100 --rate .1 --steps 1 --linf-ratio .05",
            "1/sqrt(100) = 0.1",
        ),
        ("train --data none", "--data none must be one of digits, adult"),
        ("train --model none", "--model none must be one of logistic, mlp"),
        ("train --model imdb-lstm", "token ids, in any number, not 1 x 8 x 8 numbers"),
        ("train --features none", "--features none must be one of efficientnet-lite0, scat"),
        ("train --batch-size 5000", "<= the 1437 records"),
        ("train --noise 0.3 --epsilon 0.1", "below the cost of one step"),
        ("train --lr -1", "learning_rate=-1.0 must be"),
        ("train --steps -1 --noise 1.0 --rate 0.1", "--steps=-1 must be"),
        (f"train --steps {HUGE} --noise 1.0 --rate 0.1", "400 characters"),
        ("train --plan p.toml --clip 1", "--plan and --clip"),
        ("train --steps 3 --epochs 3", "--steps and --epochs"),
        ("train --resume --run-dir nowhere", "no run in nowhere"),
        ("train --run-dir /proc/hush", "--run-dir=/proc must be a writable folder"),
        ("train --steps 1 --run-dir file", "--run-dir=file must be a writable folder"),
        ("tune --steps 1 --trials 2 --run-dir file", "--run-dir=file must be a writable folder"),
        ("pate --run-dir file", "--run-dir=file must be a writable folder"),
        ("demo --out file", "--out=file must be a writable folder"),
        (
            "train --data mnist --data-dir nowhere --plan none.toml",
            "cannot read the plan file none.toml",
        ),
        ("train --public-records 1437", "--public-records 1437 must be"),
        ("train --device warp", "--device warp must be cpu, cuda or cuda:N"),
        ("train --device cuda:99", "numbered from 0"),
        ("train --plan dpsur --test both", "'both' is not one of 'summed', 'mean'"),
        ("train --test-noise 2", "--test-noise is an option of named plans"),
        ("audit . --kind all", "'all' is not one of 'gradient', 'input'"),
        ("audit .", "no readable settings.json"),
        ("report nowhere", "no ledger at nowhere"),
        ("report .", "no ledger at ledger.jsonl"),
        ("report . --out -", "must end in .html"),
        ("tune --lr 1:2:3", "must be a number"),
        ("tune --momentum 0:0.9", "must be a number"),
        ("tune --clip 0,1", "--clip=0.0 must be"),
        ("tune --held-out 5000", "must be below"),
        ("tune --trials 0", "--trials=0.0 must be a finite number >= 1.01"),
        ("pate --data none", "--data none must be one of digits"),
        ("pate --teachers 2000", "teachers=2000 is more than the 1437 records"),
        ("pate --queries 0", "--queries 0 must be > 0"),
        ("pate --queries 360", "below the 360 test records"),
        ("pate --threshold 101", "threshold=101 is more than the 100 votes"),
        ("pate --noise 5 --epsilon 3", "--noise and --epsilon set the same value"),
        ("pate --test-noise 5", "--test-noise 5 needs --threshold"),
        ("pate --resume", "Pass it as --run-dir"),
        ("pate --resume --run-dir nowhere", "to resume"),
        ("pate --data mnist --data-dir nowhere", "nowhere is not there"),
    ],
)
def test_mistakes_are_answered_before_any_work(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call(*arguments.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 3000
    assert not list(tmp_path.rglob("*.safetensors")), "nothing was trained"
    assert not list(tmp_path.rglob("ledger.jsonl")), "no step was charged"
