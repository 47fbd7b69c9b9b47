"""Copies of a ledger count what it was charged, as it was charged, and nothing else."""

from pathlib import Path

import pytest

import hush
from hush.accounting.ledger.ledger import Ledger
from hush.accounting.ledger.mirror import follow, mirror, snapshot_of
from hush.core.errors import LedgerError

PLAN = hush.Plan(
    sampling=hush.Poisson(rate=0.1), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
)


def test_a_copy_is_the_ledger_line_by_line(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x", arithmetic="assumed", records=100)
        ledger.store_delta(1e-5)
        copy = Ledger()
        mirror(copy, snapshot_of(ledger))
        assert (copy.head, copy.identity, copy.counts) == (ledger.head, ledger.identity, ledger.counts)
        for step in (2, 3):
            ledger.charge(PLAN, run="a", step=step, release=str(step), records=100)
            follow(copy, PLAN, run="a", step=step, release=str(step), records=100)
        assert copy.head == ledger.head
        assert copy.epsilon() == ledger.epsilon()
        assert copy.digest_at("a", 3) == ledger.digest_at("a", 3) is not None


def test_a_repeated_step_is_not_charged_to_a_copy(tmp_path: Path) -> None:
    ledger, copy = Ledger(), Ledger()
    ledger.charge(PLAN, run="a", step=1, release="x")
    mirror(copy, snapshot_of(ledger))
    follow(copy, PLAN, run="a", step=1, release="x")
    assert sum(copy.counts.values()) == 1
    with pytest.raises(LedgerError):
        follow(copy, PLAN, run="a", step=1, release="y")


def test_a_void_ledger_has_void_copies() -> None:
    ledger, copy = Ledger(), Ledger()
    ledger.charge(PLAN, run="a", step=1, release="x")
    ledger.void("moved")
    mirror(copy, snapshot_of(ledger))
    with pytest.raises(LedgerError, match="void"):
        copy.epsilon(1e-5)


def test_a_copy_takes_no_charge_and_a_ledger_follows_nobody(tmp_path: Path) -> None:
    ledger, copy = Ledger(), Ledger()
    mirror(copy, snapshot_of(ledger))
    with pytest.raises(LedgerError, match="copy of the one that rank 0 writes"):
        copy.charge(PLAN, run="a", step=1, release="x")
    with pytest.raises(LedgerError, match="is no copy"):
        follow(ledger, PLAN, run="a", step=1, release="x")


def test_charges_are_not_hidden_by_a_copy(tmp_path: Path) -> None:
    charged = Ledger()
    charged.charge(PLAN, run="a", step=1, release="x")
    with pytest.raises(LedgerError, match="would hide"):
        mirror(charged, snapshot_of(Ledger()))
    with Ledger(tmp_path / "ledger.jsonl") as ledger, pytest.raises(LedgerError, match="would hide"):
        mirror(ledger, snapshot_of(Ledger()))
