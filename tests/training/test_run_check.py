"""A run's files held against each other: what was emptied, cut, edited or replaced is noticed."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import BudgetExceeded, HushError, LedgerError
from hush.training.loop import Run
from hush.training.run_folder import checked_ledger, read_metrics
from tests.training import helpers
from tests.training.helpers import ENOUGH, plan_of, randomness

PLAN = plan_of(hush.Poisson(0.25))


def train(folder: Path, steps: int, *, kill_at: int = 0, **options: Any) -> Run:
    def kill(step: int, metrics: object) -> None:
        if step == kill_at:
            raise KeyboardInterrupt

    torch.manual_seed(5)
    data = torch.randn(20, 3), torch.randint(0, 2, (20,))
    options.setdefault("randomness", randomness(7))
    return helpers.train(
        nn.Linear(3, 2), PLAN, data, steps=steps, directory=folder, every=3, callbacks=[kill], **options
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    train(folder, 6)
    return folder


@pytest.fixture
def run(tmp_path: Path, built: Path) -> Path:
    folder = tmp_path / "run"
    copytree(built, folder)
    return folder


def test_a_whole_run_fits(run: Path) -> None:
    ledger, notes = checked_ledger(run)
    assert ledger.counts == {PLAN: 6}
    assert notes == ["fits its plan, anchor and checkpoint (of step 6)"]


def test_the_folder_of_secrets_is_for_its_owner(run: Path) -> None:
    assert (run / "private").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (run / "private").iterdir()] == ["checkpoint.safetensors"]


def edited(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    """Damage to the lines of a ledger."""

    def damage(run: Path) -> None:
        lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        (run / "ledger.jsonl").write_bytes(b"".join(change(lines)))

    return damage


def without(*names: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for name in names:
            (run / name).unlink()

    return damage


def begun_anew(run: Path) -> None:
    (run / "ledger.jsonl").unlink()
    with hush.Ledger(run / "ledger.jsonl") as ledger:
        for step in range(1, 7):
            ledger.charge(PLAN, run="r", step=step, release="x")


def rewritten(run: Path) -> None:
    """With one charge fewer, under the same first line: each line follows the one before."""
    before = hush.Ledger(run / "ledger.jsonl", read_only=True)
    name, charges = next(iter(before._journal.runs.items()))
    first = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)[0]
    (run / "ledger.jsonl").write_bytes(first)
    with hush.Ledger(run / "ledger.jsonl") as ledger:
        for step, release in enumerate(charges.releases[1:], start=2):
            ledger.charge(PLAN, run=name, step=step, release=release)


DAMAGE = [
    (edited(lambda lines: []), "it is empty"),
    (edited(lambda lines: lines[:-2]), "has 6 steps .* has 4: charges are missing"),
    (edited(lambda lines: lines[:2] + lines[3:]), "damaged at line 3"),
    (begun_anew, "was replaced, and does not contain the charges of the run"),
    (rewritten, "does not belong to the checkpoint"),
    (without("ledger.jsonl"), "ledger"),
    (without("anchor.json"), r"anchor\.json cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_what_does_not_fit_is_neither_accounted_for_nor_resumed(
    run: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(run)
    files = {path: path.read_bytes() for path in run.rglob("*.*")}
    with pytest.raises(LedgerError, match=message):
        checked_ledger(run)
    with pytest.raises(LedgerError, match=message):
        train(run, 9, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*.*")} == files


def test_a_damaged_checkpoint_is_named_and_a_missing_one_noted(run: Path) -> None:
    path = run / "private" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(LedgerError, match=r"checkpoint\.safetensors is damaged"):
        checked_ledger(run)
    path.unlink()
    assert "not compared with the checkpoint" in checked_ledger(run)[1][0]


def test_a_ledger_ahead_of_the_checkpoint_fits(run: Path) -> None:
    behind = (run / "private" / "checkpoint.safetensors").read_bytes()
    train(run, 9, resume=True)
    (run / "private" / "checkpoint.safetensors").write_bytes(behind)
    assert checked_ledger(run)[0].counts == {PLAN: 9}
    assert train(run, 9, resume=True).steps == 9
    assert checked_ledger(run)[0].counts == {PLAN: 9}, "repeated without a new charge"


def torn_last_charge(run: Path, budget: hush.Budget = ENOUGH) -> None:
    behind = (run / "private" / "checkpoint.safetensors").read_bytes()
    train(run, 9, resume=True, budget=budget)
    (run / "private" / "checkpoint.safetensors").write_bytes(behind)
    (run / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes()[:-60])


def budget_of(steps: int) -> hush.Budget:
    return hush.Budget(epsilon=hush.epsilon(PLAN, steps=steps, delta=1e-5).epsilon.upper, delta=1e-5)


def test_a_run_whose_last_charge_was_torn_takes_all_its_steps(run: Path) -> None:
    exactly, ledger = budget_of(9), run / "ledger.jsonl"
    torn_last_charge(run, exactly)
    assert hush.Ledger(ledger, read_only=True).counts == {PLAN: 9}
    result = train(run, 9, resume=True, budget=exactly)
    assert result.steps == 9
    assert result.stopped == "steps"
    assert result.guarantee.epsilon.upper <= exactly.epsilon
    assert hush.Ledger(ledger, read_only=True).counts == {PLAN: 9}


def test_a_torn_charge_that_will_not_be_repeated_stays_within_the_budget(run: Path) -> None:
    torn_last_charge(run)
    with pytest.raises(BudgetExceeded, match="the charges on the ledger"):
        train(run, 8, resume=True, budget=budget_of(8))


@pytest.mark.parametrize("cut", [2, 60, 140])
@pytest.mark.parametrize("reseed", [False, True])
def test_a_torn_first_charge_is_repeated_or_kept_beside_new_noise(
    tmp_path: Path, cut: int, *, reseed: bool
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", 3, kill_at=1)
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-cut])
    names_its_run = b'"run": "' in ledger.read_bytes()
    assert train(tmp_path / "run", 3, resume=True, reseed=reseed).steps == 3
    assert checked_ledger(tmp_path / "run")[0].counts == {PLAN: 3 + (reseed and names_its_run)}


CHECKPOINT = "private/checkpoint.safetensors"


@pytest.mark.parametrize(
    ("damage", "resumed", "reseeded"),
    [
        (torn_last_charge, 9, 12),
        (edited(lambda lines: [lines[0][:60]]), *["damaged at line 1: .*Restore it"] * 2),
        (without(CHECKPOINT), r"checkpoint.* is missing.*pass reseed=True .*more charges", 15),
        (without("ledger.jsonl"), *[r"Restore ledger\.jsonl"] * 2),
        (without("ledger.jsonl", CHECKPOINT), *[r"Restore ledger\.jsonl"] * 2),
    ],
)
@pytest.mark.parametrize("reseed", [False, True])
def test_a_damaged_run_keeps_every_charge_or_says_how_to(
    run: Path, damage: Callable[[Path], None], resumed: int | str, reseeded: int | str, *, reseed: bool
) -> None:
    damage(run)
    expected = reseeded if reseed else resumed
    if isinstance(expected, str):
        with pytest.raises(HushError, match=expected):
            train(run, 9, resume=True, reseed=reseed)
        return
    result = train(run, 9, resume=True, reseed=reseed)
    assert (result.steps, checked_ledger(run)[0].counts) == (9, {PLAN: expected})
    steps = [line["step"] for line in read_metrics(run / "metrics.jsonl")]
    assert steps == [3, 6, 9]
    assert train(run, 10, resume=True).steps == 10
