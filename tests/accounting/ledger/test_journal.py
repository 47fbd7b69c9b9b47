"""Ledger files: crashes, full disks, and other processes."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush.core.errors import LedgerError
from tests import forked
from tests.accounting.ledger.charged import PLAN, charge, counts


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


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_ledger_that_cannot_be_created_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match=f"No space left.*{path.name}"):
        hush.Ledger(path)
    assert not list(path.parent.iterdir())


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


def test_a_ledger_that_lives_until_python_ends_says_nothing_then(path: Path) -> None:
    code = f"""
import hush, torch
plan = hush.Plan.from_plain({PLAN.to_plain()!r})
model, loss = torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = hush.PrivateStep(model, loss, optimizer, plan, records=4, ledger={str(path)!r})
for batch in step.batches((torch.zeros(4, 2), torch.zeros(4).long()), steps=1):
    step(batch)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stderr == ""
