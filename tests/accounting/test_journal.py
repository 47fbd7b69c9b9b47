"""Ledger files: torn and damaged lines, compaction, crashes, full disks and other processes."""

import json
import os
import signal
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import hush
from hush.accounting import ledger as module
from hush.accounting.journal import chained, new_header
from hush.core.errors import LedgerError, PrivacyWarning
from tests import forked
from tests.accounting.charged import OTHER, PLAN, STEEP, charge, counts


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


@pytest.mark.parametrize(("kept", "value"), [("arithmetic", "assumed"), ("randomness", "seeded")])
def test_a_torn_charge_keeps_its_assumptions(path: Path, kept: str, value: Any) -> None:
    marked: dict[str, Any] = {kept: value}
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        ledger.charge(PLAN, run="r", step=2, release="b", **marked)
    path.write_bytes(path.read_bytes()[:-48])
    assert path.read_text().endswith(f'"{kept}": "{value}", "release": "b')
    with hush.Ledger(path) as ledger:
        assert getattr(ledger.epsilon(1e-5), kept) == value
        assert ledger.counts == {PLAN: 2}


@pytest.mark.parametrize("left", [b"", b"{", b'{"charge": "', b'{"plan": "', b"\0" * 40])
def test_epsilon_of_a_truncated_file_is_at_least_that(path: Path, left: bytes) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, OTHER, range(1, 3), run="s")
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:4]) + left)  # four of the five charges, and a plan, are lost
    ledger = hush.Ledger(path, read_only=True)
    with pytest.warns(PrivacyWarning, match="the true epsilon is larger") if left else nullcontext():
        assert ledger.epsilon(1e-5).epsilon.lower > 0
    assert ledger.cut_short == bool(left)
    assert path.read_bytes().endswith(left), "reading repairs nothing"
    with hush.Ledger(path) as repaired:
        repaired.epsilon(1e-5)


@pytest.mark.parametrize("keep", [1, 56, 90])
def test_a_torn_first_line_is_damage(path: Path, keep: int) -> None:
    """The file gets its name once its first line is synced, so only lost content leaves less."""
    charge(path, PLAN, range(1, 3))
    path.write_bytes(path.read_bytes()[:keep])
    for read_only in (True, False):
        with pytest.raises(LedgerError, match=r"damaged at line 1: .*Restore it from a copy"):
            hush.Ledger(path, read_only=read_only)


@pytest.mark.parametrize("name", ["", "file/ledger.jsonl", "locked/ledger.jsonl", "missing.jsonl"])
def test_a_path_that_cannot_be_opened_is_an_error_with_a_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked").symlink_to("/proc/self/fdinfo")  # no file can be created there, even by root
    with pytest.raises(LedgerError, match=r"cannot be opened \(.*Pass a path"):
        hush.Ledger(tmp_path / name, read_only=name == "missing.jsonl")


DAMAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "cut in the middle": lambda lines: [*lines[:3], lines[3][:20], *lines[4:]],
    "lost plan": lambda lines: [lines[0], *lines[2:]],
    "lost header": lambda lines: lines[1:],
    "lost charge": lambda lines: [*lines[:4], *lines[5:]],
    "changed": lambda lines: [*lines[:4], lines[4].replace(b'"3"', b'"9"'), *lines[5:]],
    "of another ledger": lambda lines: [new_header().rstrip(), *lines[1:]],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_is_refused(path: Path, damage: str) -> None:
    charge(path, PLAN, range(1, 6))
    path.write_bytes(b"\n".join(DAMAGE[damage](path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(LedgerError, match=r"damaged at line \d+"):
        hush.Ledger(path)


@pytest.mark.few(2)
@pytest.mark.parametrize("call", range(1, 5))
def test_a_crash_at_birth_leaves_no_ledger_or_a_whole_one(path: Path, call: int) -> None:
    code = f"""
import os, signal, hush
calls = 0
def dying(function):
    def call(*arguments):
        global calls
        calls += 1
        if calls == {call}:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
os.write, os.fsync = dying(os.write), dying(os.fsync)
plan = hush.Plan.from_plain({PLAN.to_plain()!r})
hush.Ledger({str(path)!r}).charge(plan, run="r", step=1, release="1")
"""
    assert forked.run(code).returncode == -signal.SIGKILL
    assert not path.exists() or hush.Ledger(path, read_only=True).counts == {}
    charge(path, PLAN, range(1, 2))
    assert counts(path) == {PLAN: 1}


def test_two_processes_cannot_open_it(path: Path) -> None:
    code = f"import hush; hush.Ledger({str(path)!r})"
    with hush.Ledger(path):
        with pytest.raises(LedgerError, match="is open already"):
            hush.Ledger(path)
        assert "is open already" in forked.run(code).stderr
    assert forked.run(code).returncode == 0


def test_a_fork_does_not_keep_the_lock(path: Path) -> None:
    """As a worker that reads data does, which may outlive a run that was killed."""
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b".")
            signal.pause()
        os.read(reading, 1)  # it has begun, and let go of the file
        ledger.charge(PLAN, run="r", step=2, release="b")
        with pytest.raises(LedgerError, match="is open already"):
            hush.Ledger(path)
    try:
        assert counts(path) == {PLAN: 2}
        charge(path, PLAN, range(3, 4))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_charge_is_synced_before_charge_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    with hush.Ledger(path) as ledger:
        real = os.fsync

        def watched(file: int) -> None:
            real(file)
            synced.append(path.read_bytes())

        monkeypatch.setattr(os, "fsync", watched)
        ledger.charge(PLAN, run="r", step=1, release="a")
    assert b'"release": "a"' in synced[-1]


def test_a_full_disk_is_an_error_and_the_ledger_stays_readable(path: Path) -> None:
    code = f"""
import resource, signal, hush
from hush.core.errors import LedgerError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
plan = hush.Plan.from_plain({PLAN.to_plain()!r})
with hush.Ledger({str(path)!r}) as ledger:
    ledger.charge(plan, run="r", step=1, release="a")
    room = ledger.path.stat().st_size + 40
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    for _ in range(2):
        try:
            ledger.charge(plan, run="r", step=2, release="b")
        except LedgerError as error:
            print(error)
    assert ledger.counts == {{plan: 1}}
"""
    result = forked.run(code)
    assert result.returncode == 0, result.stderr
    assert "was not applied" in result.stdout
    assert "Open it again" in result.stdout
    assert counts(path) == {PLAN: 2}, "what was half written counts"


def test_reading_needs_no_lock_and_changes_nothing(path: Path) -> None:
    with hush.Ledger(path) as writing:
        writing.charge(PLAN, run="r", step=1, release="a")
        reading = hush.Ledger(path, read_only=True)
        assert reading.counts == {PLAN: 1}
        with pytest.raises(LedgerError, match="closed or could not be written"):
            reading.charge(PLAN, run="r", step=2, release="b")
    with path.open("ab") as file:
        file.write(b'{"charge": "')
    torn = path.read_bytes()
    path.chmod(0o444)
    assert hush.Ledger(path, read_only=True).counts == {PLAN: 2}
    assert path.read_bytes() == torn


def test_a_fork_does_not_charge(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        child = os.fork()
        if not child:
            try:
                ledger.charge(PLAN, run="r", step=1, release="a")
            except LedgerError as error:
                os._exit(3 if "a fork of it" in str(error) else 4)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        ledger.charge(PLAN, run="r", step=1, release="a")
    assert counts(path) == {PLAN: 1}


@pytest.fixture(autouse=True)
def a_few_lines_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_FOLDED", 5)


def fill(ledger: hush.Ledger, steps: range, run: str = "r") -> None:
    for step in steps:
        ledger.charge(PLAN, run=run, step=step, release=f"{step:x}")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nearly_all_lines_of_a_long_ledger_are_compared_and_not_parsed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing a ledger of a million lines would take most of the time to account for it."""
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 201))
    parsed, loads = [], json.loads

    def counted(text: str) -> Any:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr("hush.accounting.journal.json.loads", counted)
    assert hush.Ledger(path, read_only=True).counts == {PLAN: 200}
    assert len(parsed) < 5


def test_counts_steps_and_digests_are_those_of_the_long_file(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 4), run="other")
        ledger.charge(STEEP, run="steep", step=1, release="x", dimension=10, arithmetic="assumed")
        fill(ledger, range(1, 21))
        digests = {step: ledger.digest_at("r", step) for step in (15, 18, 20)}
        of_other = ledger.digest_at("other", 2)
        before = ledger.epsilon(1e-5)
        ledger.compact("r", 15)
        fill(ledger, range(21, 24))
    assert [next(iter(line)) for line in lines(path)] == [
        *("ledger", "plan", "plan", "folded", "charge", "charge", "charge")
    ]
    for _ in range(2):
        with hush.Ledger(path) as ledger:
            assert ledger.counts == {PLAN: 26, STEEP: 1}
            assert ledger.dimensions == {STEEP: 10}
            assert ledger.last_step("r") == 23
            assert ledger.last_step("other") == 3
            assert {step: ledger.digest_at("r", step) for step in digests} == digests
            assert ledger.digest_at("r", 14) is None
            assert ledger.digest_at("other", 2) == of_other
            assert ledger.epsilon(1e-5).arithmetic == before.arithmetic == "assumed"
    with hush.Ledger(path) as ledger:
        ledger.compact("r", 21)
    assert len(lines(path)) == 4, "the second time nothing but the header, the plans and the sum is left"


def test_a_repeated_step_is_recognised_after_the_fold_and_refused_before_it(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        ledger.compact("r", 15)
    with hush.Ledger(path) as ledger:
        fill(ledger, range(16, 21))
        assert ledger.counts == {PLAN: 20}, "the same releases again cost nothing"
        with pytest.raises(LedgerError, match="already released with another value"):
            ledger.charge(PLAN, run="r", step=17, release="other")
        with pytest.raises(
            LedgerError, match=r"step 15 of run r.*no longer on the ledger.*newest checkpoint"
        ):
            ledger.charge(PLAN, run="r", step=15, release="f")
        with pytest.raises(LedgerError, match="does not follow the last charge, step 20"):
            ledger.charge(PLAN, run="r", step=22, release="16")
        assert ledger.counts == {PLAN: 20}


def test_a_fold_keeps_what_the_guarantee_says_of_its_assumptions(path: Path) -> None:
    stated: dict[str, Any] = {"randomness": "seeded", "arithmetic": "assumed", "records": 30}
    with hush.Ledger(path) as ledger:
        for step in range(1, 8):
            ledger.charge(PLAN, run="r", step=step, release="x", **stated)
        before = str(ledger.epsilon(0.1))
        ledger.compact("r", 6)
    assert "folded" in lines(path)[-1]
    with hush.Ledger(path) as ledger:
        assert str(ledger.epsilon(0.1)) == before
        assert "arithmetic: assumed, randomness: seeded, delta: above 1/30" in before


def test_a_torn_charge_is_settled_over_a_fold(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
    path.write_bytes(path.read_bytes()[:-60])
    with hush.Ledger(path) as ledger:
        ledger.compact("r", 19)
    with hush.Ledger(path) as ledger:
        assert ledger.counts == {PLAN: 20}
        assert ledger.counts_repeating(PLAN, "r", 20) == {PLAN: 19}
        fill(ledger, range(20, 21))
        assert ledger.counts == {PLAN: 20}


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_compacted_ledger_that_lost_a_line_is_refused(path: Path, lost: int) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        ledger.compact("r", 20)
        fill(ledger, range(21, 24))
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:lost] + whole[lost + 1 :]))
    with pytest.raises(LedgerError, match=r"damaged at line \d"):
        hush.Ledger(path)


@pytest.mark.few(3)
@pytest.mark.parametrize("moment", range(1, 9))
def test_a_crash_while_compacting_loses_no_charge(path: Path, moment: int) -> None:
    """Killed before or after each call that changes something on disk, and while charging on."""
    code = f"""
import os, pathlib, signal, hush
from hush.accounting import ledger as module
from hush.accounting.journal import new_header
module._MIN_FOLDED = 5
plan = hush.Plan.from_plain({PLAN.to_plain()!r})
ledger = hush.Ledger({str(path)!r})
for step in range(1, 21):
    ledger.charge(plan, run="r", step=step, release=f"{{step:x}}")
events = 0
def event():
    global events
    events += 1
    if events == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
def watched(function):
    def call(*arguments):
        event()
        result = function(*arguments)
        event()
        return result
    return call
os.write, os.fsync = watched(os.write), watched(os.fsync)
pathlib.Path.replace = watched(pathlib.Path.replace)
ledger.compact("r", 18)
ledger.charge(plan, run="r", step=21, release="15")
"""
    result = forked.run(code)
    assert result.returncode == -signal.SIGKILL, result.stderr
    with hush.Ledger(path) as ledger:
        assert ledger.counts == {PLAN: 20}
        fill(ledger, range(19, 23))
        assert ledger.counts == {PLAN: 22}
        ledger.compact("r", 21)
    with hush.Ledger(path) as ledger:
        assert ledger.counts == {PLAN: 22}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_charge_of_a_long_ledger_takes_less_memory_than_its_line(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 3))
        head = ledger.head
    with path.open("ab") as file:
        for step in range(3, 10_001):
            entry = {"charge": PLAN.digest, "run": "r", "step": step, "release": f"{step:016x}"}
            line, head = chained(entry, head)
            file.write(line)
    tracemalloc.start()
    ledger = hush.Ledger(path, read_only=True)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 0.9 * path.stat().st_size
    assert (ledger.counts, ledger.head) == ({PLAN: 10_000}, head)
    assert ledger.releases[-1] == f"{10_000:016x}"


def test_a_void_ledger_stays_void(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        ledger.void("moved")
        ledger.compact("r", 20)
    assert hush.Ledger(path, read_only=True).voided == "moved"
