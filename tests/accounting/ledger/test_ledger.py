import copy
import errno
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hush
from hush.core.errors import HushError, LedgerError, Unsupported

PLAN = hush.Plan(
    sampling=hush.Poisson(rate=0.02),
    clipping=hush.L2(norm=1.0),
    noise=hush.Gaussian(multiplier=1.0),
)
OTHER = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=20.0)
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def charge(path: Path, plan: hush.Plan, steps: range, run: str = "r") -> None:
    with hush.Ledger(path) as ledger:
        for step in steps:
            ledger.charge(plan, run=run, step=step, release=f"{step:x}")


def counts(path: Path) -> dict[hush.Plan, int]:
    with hush.Ledger(path) as ledger:
        return dict(ledger.counts)


def test_reopening_continues(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, PLAN, range(4, 6))
    assert counts(path) == {PLAN: 5}
    with hush.Ledger(path) as ledger:
        assert ledger.last_step("r") == 5
        assert ledger.last_step("another") == 0


def test_a_plan_is_stored_once_and_named_by_its_digest(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    charge(path, OTHER, range(1, 3), run="s")
    charge(path, PLAN, range(4, 6))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["plan"] for line in lines if "plan" in line] == [PLAN.digest, OTHER.digest]
    assert [line["charge"] for line in lines if "charge" in line].count(PLAN.digest) == 5


def test_epsilon_adds_up_different_plans(path: Path) -> None:
    charge(path, PLAN, range(1, 101))
    charge(path, OTHER, range(1, 4), run="s")
    with hush.Ledger(path) as ledger:
        together = ledger.epsilon(1e-5).epsilon
    alone = hush.epsilon(PLAN, steps=100, delta=1e-5).epsilon
    apart = alone.upper + hush.epsilon(OTHER, steps=3, delta=1e-5).epsilon.upper
    assert alone.upper < together.lower
    assert together.upper < apart


def test_a_ledger_in_memory_counts_too() -> None:
    ledger = hush.Ledger()
    ledger.charge(PLAN, run="r", step=1, release="a")
    assert ledger.counts == {PLAN: 1}


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


@pytest.mark.parametrize("keep", range(0, 90, 15))
def test_a_ledger_that_was_emptied_is_refused_and_left_alone(path: Path, keep: int) -> None:
    charge(path, PLAN, range(1, 6))
    emptied = path.read_bytes()[:keep]
    path.write_bytes(emptied)
    for read_only in (False, True):
        with pytest.raises(LedgerError, match="damaged at line 1"):
            hush.Ledger(path, read_only=read_only)
    assert path.read_bytes() == emptied


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
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not path.exists() or hush.Ledger(path, read_only=True).counts == {}
    charge(path, PLAN, range(1, 2))
    assert counts(path) == {PLAN: 1}


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


def test_two_processes_cannot_open_it(path: Path) -> None:
    code = f"import hush; hush.Ledger({str(path)!r})"
    with hush.Ledger(path):
        with pytest.raises(LedgerError, match="is open already"):
            hush.Ledger(path)
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "is open already" in result.stderr
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_same_release_is_charged_once_and_another_is_refused(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=3, release="3")
        assert ledger.counts == {PLAN: 3}
        with pytest.raises(LedgerError, match="already released"):
            ledger.charge(PLAN, run="r", step=3, release="4")
        with pytest.raises(LedgerError, match="already released"):
            ledger.charge(OTHER, run="r", step=3, release="3")
        ledger.charge(PLAN, run="another", step=3, release="4")
        assert ledger.counts == {PLAN: 4}


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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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


def test_a_ledger_without_digests_is_refused(path: Path) -> None:
    path.write_text('{"ledger": "hush", "version": 1}\n')
    with pytest.raises(LedgerError, match="version 1, whose lines carry no digest"):
        hush.Ledger(path)


STEEP = hush.Plan(
    sampling=hush.FullBatch(),
    clipping=hush.Lp(p=4.0, norm=1.0),
    noise=hush.GeneralizedGaussian(beta=4.0, multiplier=20.0),
)


def test_a_cost_that_grows_with_the_dimension_is_kept_with_its_dimension(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        ledger.charge(STEEP, run="a", step=1, release="x", dimension=10)
        ledger.charge(STEEP, run="a", step=2, release="y", dimension=10)
        assert ledger.epsilon(1e-5) == hush.epsilon(STEEP, steps=2, delta=1e-5, dimension=10)
    assert sum('"dimension": 10' in line for line in path.read_text().splitlines()) == 1
    with hush.Ledger(path) as ledger:
        assert ledger.dimensions == {STEEP: 10}
        assert ledger.epsilon(1e-5) == hush.epsilon(STEEP, steps=2, delta=1e-5, dimension=10)
        # a larger model under the same plan: all its steps are charged for the larger one
        ledger.charge(STEEP, run="b", step=1, release="z", dimension=1000)
        ledger.charge(STEEP, run="c", step=1, release="z", dimension=10)
    read = hush.Ledger(path, read_only=True)
    assert read.dimensions == {STEEP: 1000}
    three = hush.epsilon(STEEP, steps=4, delta=1e-5, dimension=1000)
    assert read.epsilon(1e-5) == three
    assert three.epsilon.upper > 1.5 * hush.epsilon(STEEP, 4, 1e-5, dimension=10).epsilon.upper


def test_without_the_dimension_such_a_step_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with (
        hush.Ledger(path) as ledger,
        pytest.raises(LedgerError, match=r"dimension=None.*a guess.*Pass dim"),
    ):
        ledger.charge(STEEP, run="a", step=1, release="x")
    assert len(path.read_text().splitlines()) == 1
    with hush.Ledger(path) as ledger:
        ledger.charge(STEEP, run="a", step=1, release="x", dimension=10)
    lost = path.read_text().replace(', "dimension": 10', "")
    path.write_text(lost)
    with pytest.raises(LedgerError, match="damaged at line 2"):
        hush.Ledger(path)


def test_a_dimension_says_nothing_about_other_plans(tmp_path: Path) -> None:
    gentle = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.Lp(p=1.5, norm=1.0),
        noise=hush.GeneralizedGaussian(beta=1.5, multiplier=20.0),
    )
    with hush.Ledger() as ledger:
        ledger.charge(gentle, run="a", step=1, release="x", dimension=3)
        assert ledger.dimensions == {}
        assert ledger.epsilon(1e-5) == hush.epsilon(gentle, steps=1, delta=1e-5)
        ledger.charge(STEEP, run="b", step=1, release="y", dimension=5)
        assert ledger.dimensions == {STEEP: 5}


def test_a_charge_that_would_read_as_damage_is_refused(tmp_path: Path) -> None:
    with hush.Ledger(tmp_path / "ledger") as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x")
        for wrong in (0, 3, 1.5, True, "2"):
            with pytest.raises(HushError):
                ledger.charge(PLAN, run="a", step=wrong, release="y")  # type: ignore[arg-type]
        ledger.charge(PLAN, run="a", step=2, release="y")
    assert hush.Ledger(tmp_path / "ledger", read_only=True).counts == {PLAN: 2}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_would_close_the_file_of_the_original(
    path: Path, duplicate: Callable[[Any], Any]
) -> None:
    with hush.Ledger(path) as ledger:
        with pytest.raises(Unsupported, match=r"a Ledger cannot be copied or pickled.*state_dict"):
            duplicate(ledger)
        gc.collect()
        with (path.parent / "log").open("w"):  # would get the number of a file that was closed
            ledger.charge(PLAN, run="r", step=1, release="a")
        assert not (path.parent / "log").read_bytes()
    assert counts(path) == {PLAN: 1}


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


def test_one_charge_of_assumed_arithmetic_marks_the_guarantee(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        assert ledger.epsilon(1e-5).arithmetic == "proved"
        ledger.charge(PLAN, run="r", step=2, release="b", arithmetic="assumed")
        ledger.charge(PLAN, run="r", step=3, release="c")
        with pytest.raises(HushError, match="arithmetic='exact' must be"):
            ledger.charge(PLAN, run="r", step=4, release="d", arithmetic="exact")  # type: ignore[arg-type]
    read = hush.Ledger(path, read_only=True).epsilon(1e-5)
    assert read.arithmetic == "assumed"
    assert read.epsilon == hush.epsilon(PLAN, steps=3, delta=1e-5).epsilon


def test_a_torn_charge_of_assumed_arithmetic_stays_one(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        ledger.charge(PLAN, run="r", step=2, release="b", arithmetic="assumed")
    path.write_bytes(path.read_bytes()[:-48])
    assert path.read_bytes().endswith(b'"arithmetic": "assumed", "release": "b')
    assert hush.Ledger(path, read_only=True).epsilon(1e-5).arithmetic == "assumed"


def test_a_void_ledger_gives_no_epsilon_and_takes_no_charge(path: Path) -> None:
    charge(path, PLAN, range(1, 4))
    with hush.Ledger(path) as ledger:
        assert ledger.voided is None
        ledger.void("the model was moved outside of a private step")
        with pytest.raises(LedgerError, match=r"void \(the model was moved .*new model on a new ledger"):
            ledger.charge(PLAN, run="r", step=4, release="4")
    with hush.Ledger(path) as ledger:
        assert ledger.voided == "the model was moved outside of a private step"
        assert ledger.counts == {PLAN: 3}
        for refused in (
            lambda: ledger.epsilon(1e-5),
            lambda: ledger.charge(PLAN, run="r", step=4, release="4"),
            lambda: ledger.counts_repeating(PLAN, "r", 4),
        ):
            with pytest.raises(LedgerError, match="is void"):
                refused()
        ledger.void("and once more")
        assert ledger.voided == "the model was moved outside of a private step"


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


def test_a_void_note_that_cannot_be_written_holds_for_this_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="r", step=1, release="a")
        monkeypatch.setattr(os, "write", full_disk)
        with pytest.raises(LedgerError, match=f"{path}.*No space left"):
            ledger.void("moved")
        with pytest.raises(LedgerError, match="is void"):
            ledger.epsilon(1e-5)


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_ledger_that_cannot_be_created_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match=f"No space left.*{path.name}"):
        hush.Ledger(path)
    assert not list(path.parent.iterdir())


def test_it_keeps_that_noise_was_seeded_and_how_many_slots_there_are(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with hush.Ledger(path) as ledger:
        ledger.charge(PLAN, run="a", step=1, release="x")
        assert (ledger.epsilon(1e-3).randomness, ledger.epsilon(1e-3).records) == ("secret", None)
        ledger.charge(PLAN, run="a", step=2, release="y", randomness="seeded", records=900)
        ledger.charge(PLAN, run="a", step=3, release="z", records=2000)
        ledger.charge(PLAN, run="a", step=4, release="z", records=1000)
    for held in (hush.Ledger(path, read_only=True), ledger):
        said = held.epsilon(1e-3)
        assert (said.randomness, said.records, held.counts) == ("seeded", 2000, {PLAN: 4})
        assert "randomness: seeded, delta: above 1/2000" in str(said)


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


@pytest.mark.parametrize(
    ("wrong", "said"), [({"randomness": "known"}, "secret"), ({"records": 0}, "records=0")]
)
def test_a_charge_that_says_nonsense_is_refused(wrong: Any, said: str) -> None:
    ledger = hush.Ledger()
    with pytest.raises(HushError, match=said):
        ledger.charge(PLAN, run="a", step=1, release="x", **wrong)
    assert not ledger.counts


def test_streams_of_a_ledger_have_labels_of_their_own(tmp_path: Path) -> None:
    path, used = tmp_path / "ledger.jsonl", set()
    for opened in range(3):
        with hush.Ledger(path) as ledger:
            labels = [ledger.stream_label() for _ in range(3)]
            assert (labels[0] == b"") == (opened == 0)
            # the second of the three is used, and the others are not: they may come again
            ledger.charge(PLAN, run=f"run {opened}", step=1, release="x")
            assert len(set(labels)) == 3
            assert labels[1] not in used
            used |= {labels[1]}
            assert not used & {ledger.stream_label()}
    memory = hush.Ledger()
    assert memory.stream_label() == b"", "a run in memory draws what one on disk does"
