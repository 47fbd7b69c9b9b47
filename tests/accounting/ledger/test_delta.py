"""The delta on a ledger: of the newest budget, over folds and torn lines, and charging nothing."""

import json
from pathlib import Path

import pytest

import hush
from hush.accounting.ledger import ledger as module
from hush.core.errors import InvalidValue, LedgerError
from hush.core.guarantee import Adjacency
from tests.accounting.ledger.charged import OTHER, PLAN, charge, counts


def test_a_ledger_answers_at_the_delta_it_was_run_under(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        assert ledger.delta is None
        ledger.store_delta(1e-6)
        ledger.charge(PLAN, run="r", step=1, release="x", records=500)
    for read_only in (True, False):
        with hush.Ledger(path, read_only=read_only) as ledger:
            assert ledger.delta == 1e-6
            assert ledger.epsilon() == hush.epsilon(PLAN, steps=1, delta=1e-6)
            assert ledger.epsilon(1e-3) == hush.epsilon(PLAN, steps=1, delta=1e-3)


def test_without_a_delta_there_is_no_epsilon() -> None:
    ledger = hush.Ledger()
    with pytest.raises(LedgerError, match=r"in memory keeps no delta.*Pass e\.g\. delta=1e-05"):
        ledger.epsilon()
    ledger.charge(PLAN, run="r", step=1, release="x", records=500)
    with pytest.raises(LedgerError, match=r"promises nothing\. Pass e\.g\. delta=0\.0002"):
        ledger.epsilon()


def test_of_two_budgets_the_last_one_counts_and_the_same_one_is_not_written_again(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        for delta in (1e-6, 1e-6, 1e-5, 1e-5):
            ledger.store_delta(delta)
            ledger.charge(PLAN, run="r", step=ledger.last_step("r") + 1, release="x")
    stored = [json.loads(line).get("delta") for line in path.read_text().splitlines()]
    assert [delta for delta in stored if delta is not None] == [1e-6, 1e-5]
    with hush.Ledger(path) as ledger:
        assert ledger.delta == 1e-5
        assert ledger.counts == {PLAN: 4}
        ledger.store_delta(1e-6)
        assert ledger.delta == ledger.epsilon().delta == 1e-6


def test_a_fold_keeps_the_delta(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_FOLDED", 5)
    with hush.Ledger(path) as ledger:
        ledger.store_delta(1e-4)
        ledger.store_delta(1e-6)
        for step in range(1, 9):
            ledger.charge(PLAN, run="r", step=step, release="x", adjacency=Adjacency(per_unit=2))
        ledger.compact("r", 8)
        before = ledger.epsilon()
    kinds = [next(iter(json.loads(line))) for line in path.read_text().splitlines()]
    assert kinds == ["ledger", "plan", "protects", "delta", "folded"]
    with hush.Ledger(path) as ledger:
        assert ledger.epsilon() == before
        assert before.delta == 1e-6
        ledger.charge(PLAN, run="r", step=9, release="x", adjacency=Adjacency(per_unit=2))
        assert ledger.counts == {PLAN: 9}


@pytest.mark.parametrize("cut", range(2, 64))
def test_a_torn_delta_charges_nothing_and_leaves_the_one_before(path: Path, cut: int) -> None:
    charge(path, PLAN, range(1, 3))
    with hush.Ledger(path) as ledger:
        ledger.store_delta(1e-4)
        size = path.stat().st_size
        ledger.store_delta(1e-6)
    whole = path.read_bytes()
    left = whole[size : len(whole) - cut]
    path.write_bytes(whole[:size] + left)
    # a beginning that a charge shares may have been one, as of every line
    charged = 2 + (0 < len(left) <= len(b'{"'))
    for _ in range(2):
        with hush.Ledger(path) as ledger:
            assert ledger.counts == {PLAN: charged}
            assert ledger.delta == 1e-4
    with hush.Ledger(path) as ledger:
        ledger.store_delta(1e-6)
        ledger.charge(PLAN, run="r", step=3, release="3")
    assert counts(path) == {PLAN: 3}
    assert hush.Ledger(path, read_only=True).delta == 1e-6


@pytest.mark.parametrize("value", ["0.2", "0", "NaN", '"1e-6"', "null"])
def test_a_delta_that_no_run_can_have_written_is_damage(path: Path, value: str) -> None:
    with hush.Ledger(path) as ledger:
        ledger._journal.append({"delta": 1e-6})
        state = ledger._journal.state
        with pytest.raises((ValueError, TypeError)):
            state.apply({"delta": json.loads(value)}, b"", "0" * 32)
    with pytest.raises(InvalidValue):
        hush.Ledger().store_delta(json.loads(value))


@pytest.mark.parametrize("left", [b"", b"{", b'{"', b'{"prot'])
def test_a_torn_relation_can_be_written_again(path: Path, left: bytes) -> None:
    users = Adjacency(per_unit=2)
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="x", adjacency=users)
    lines = path.read_bytes().splitlines(keepends=True)
    assert b"protects" in lines[1], "before the plan, under which a torn line would be counted"
    path.write_bytes(lines[0] + left)
    with hush.Ledger(path) as ledger:
        ledger.charge(OTHER, run="s", step=1, release="x", adjacency=users)
        assert ledger.epsilon(1e-5).unit == "one user, at most 2 records a step"
        assert ledger.counts == {OTHER: 1}


def test_a_relation_may_change_while_nothing_is_charged(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="x", adjacency=Adjacency(per_unit=2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))  # killed before the first charge
    for _ in range(2):
        with hush.Ledger(path) as ledger:
            ledger.charge(PLAN, run="r", step=1, release="x", adjacency=Adjacency(per_unit=3))
            assert ledger.epsilon(1e-5).unit == "one user, at most 3 records a step"
