"""Lines of a ledger: torn ones stay charged, damaged ones are refused."""

import json
from pathlib import Path

import pytest

import hush
from hush.core.errors import LedgerError
from tests.accounting.ledger.charged import OTHER, PLAN, charge, counts


@pytest.mark.parametrize("cut", range(1, 250, 7))
def test_a_torn_last_line_stays_charged(path: Path, cut: int) -> None:
    charge(path, PLAN, range(1, 4))
    whole = path.read_bytes()
    torn = whole[:-cut]
    path.write_bytes(torn)
    complete = [json.loads(line) for line in torn.split(b"\n")[:-1]]
    begun = sum("charge" in line for line in complete)
    tail = torn.split(b"\n")[-1]
    assert any("plan" in line for line in complete)
    expected = begun + bool(tail)
    assert counts(path) == {PLAN: expected}
    assert counts(path) == {PLAN: expected}, "opening it again must not change the count"
    # another run, and so other noise: what is left of the torn line counts beside it if it names its run
    charge(path, PLAN, range(10, 12), run="another")
    names_its_run = b'"run": "r' in tail
    assert counts(path) == {PLAN: begun + names_its_run + 2}


@pytest.mark.parametrize("cut", [2, 40, 48, 50, 60, 80, 120, 130])
def test_a_torn_charge_that_is_repeated_counts_once(path: Path, cut: int) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, OTHER, range(1, 2), run="s")
    charge(path, PLAN, range(4, 5))
    path.write_bytes(path.read_bytes()[:-cut])
    assert counts(path)[PLAN] == 4
    with hush.Ledger(path) as ledger:
        assert ledger.last_step("r") == 3
        assert ledger.counts_repeating(PLAN, "r", 4) == {PLAN: 3, OTHER: 1}
    charge(path, PLAN, range(4, 5))
    assert counts(path) == {PLAN: 4, OTHER: 1}
    charge(path, PLAN, range(5, 6))
    assert counts(path) == {PLAN: 5, OTHER: 1}


def test_a_charge_torn_twice_and_then_repeated_counts_once(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    for cut in (30, 60):
        charge(path, PLAN, range(3, 4))
        path.write_bytes(path.read_bytes()[:-cut])
        hush.Ledger(path).close()
    assert counts(path) == {PLAN: 4}, "what is left of both counts, as long as neither is repeated"
    charge(path, PLAN, range(3, 4))
    assert counts(path) == {PLAN: 3}


def test_a_torn_charge_is_not_repeated_with_another_release(path: Path) -> None:
    charge(path, PLAN, range(1, 3))
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=3, release="0123456789abcdef")
    path.write_bytes(path.read_bytes()[:-56])
    assert path.read_bytes().endswith(b'"release": "01234567')
    with hush.Ledger(path) as ledger:
        with pytest.raises(LedgerError, match="already released with another value"):
            ledger.charge(PLAN, run="r", step=3, release="0123456f89abcdef")
        with pytest.raises(LedgerError, match="already released with another value"):
            ledger.charge(OTHER, run="r", step=3, release="0123456789abcdef")
        assert ledger.counts == {PLAN: 3}
        ledger.charge(PLAN, run="reseeded", step=3, release="0123456f89abcdef")
        assert ledger.counts == {PLAN: 4}, "other noise: both were released"


def test_a_line_torn_before_its_plan_is_readable_is_charged_to_every_plan(path: Path) -> None:
    charge(path, PLAN, range(1, 3))
    charge(path, OTHER, range(1, 2), run="s")
    with path.open("ab") as file:
        file.write(b'{"cha')
    assert counts(path) == {PLAN: 3, OTHER: 2}


def test_zeros_after_a_power_failure_are_a_torn_line(path: Path) -> None:
    charge(path, PLAN, range(1, 3))
    with path.open("ab") as file:
        file.write(b"\0" * 64)
    assert counts(path) == {PLAN: 3}


def test_a_torn_note_may_itself_be_torn(path: Path) -> None:
    charge(path, PLAN, range(1, 3))
    with path.open("ab") as file:
        file.write(b'{"charge": "' + PLAN.digest.encode() + b'", "ru\n{"torn": ["')
    assert counts(path) == {PLAN: 3}
    assert counts(path) == {PLAN: 3}


def test_a_torn_charge_of_assumed_arithmetic_stays_one(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        ledger.charge(PLAN, run="r", step=2, release="b", arithmetic="assumed")
    path.write_bytes(path.read_bytes()[:-48])
    assert path.read_bytes().endswith(b'"arithmetic": "assumed", "release": "b')
    assert hush.Ledger(path, read_only=True).epsilon(1e-5).arithmetic == "assumed"


def test_a_torn_charge_still_says_that_it_was_seeded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x")
        ledger.charge(PLAN, run="a", step=2, release="y" * 9, randomness="seeded")
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"yyyy")])
    with hush.Ledger(path) as ledger:
        assert ledger.epsilon(1e-5).randomness == "seeded"
        assert ledger.counts == {PLAN: 2}


def test_a_void_note_cut_short_still_voids(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    with hush.Ledger(path) as ledger:
        ledger.void("moved")
    path.write_bytes(path.read_bytes()[:-45])
    for _ in range(2):
        with (
            hush.Ledger(path) as ledger,
            pytest.raises(LedgerError, match=r"void \(the note that says why"),
        ):
            ledger.epsilon(1e-5)


@pytest.mark.parametrize("keep", range(0, 90, 15))
def test_a_ledger_that_was_emptied_is_refused_and_left_alone(path: Path, keep: int) -> None:
    charge(path, PLAN, range(1, 6))
    emptied = path.read_bytes()[:keep]
    path.write_bytes(emptied)
    for read_only in (False, True):
        with pytest.raises(LedgerError, match="damaged at line 1"):
            hush.Ledger(path, read_only=read_only)
    assert path.read_bytes() == emptied


def damage_middle(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3][:20], *lines[4:]]


def damage_plan(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b'"multiplier": 1.0', b'"multiplier": 9.0'), *lines[2:]]


def lose_plan(lines: list[bytes]) -> list[bytes]:
    return [lines[0], *lines[2:]]


def lose_header(lines: list[bytes]) -> list[bytes]:
    return lines[1:]


def damage_last(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], b"garbage"]


def lose_charge(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], *lines[5:]]


def lose_first_charge(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], *lines[3:]]


def change_release(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[4].replace(b'"release": "3"', b'"release": "9"'), *lines[5:]]


def of_another_ledger(lines: list[bytes]) -> list[bytes]:
    return [hush.Ledger()._state.header.rstrip(), *lines[1:]]


def charge_twice(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[-1].replace(b'"release": "5"', b'"release": "6"')]


def strange_entry(lines: list[bytes]) -> list[bytes]:
    return [*lines, b'{"refund": 1}']


@pytest.mark.parametrize(
    "damage",
    [
        damage_middle,
        damage_plan,
        lose_plan,
        lose_header,
        lose_charge,
        lose_first_charge,
        change_release,
        of_another_ledger,
        charge_twice,
        damage_last,
        strange_entry,
    ],
)
def test_a_damaged_ledger_is_refused(path: Path, damage: object) -> None:
    charge(path, PLAN, range(1, 6))
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(damage(lines)) + b"\n")  # type: ignore[operator]
    with pytest.raises(LedgerError, match=r"damaged at line \d+"):
        hush.Ledger(path)


def test_a_ledger_without_digests_is_refused(path: Path) -> None:
    path.write_text('{"ledger": "hush", "version": 1}\n')
    with pytest.raises(LedgerError, match="version 1, whose lines carry no digest"):
        hush.Ledger(path)
