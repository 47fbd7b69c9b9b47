"""Compaction: a short file that counts, refuses and chains like the long one."""

import json
import os
import signal
from pathlib import Path

import pytest

import hush
from hush.accounting.ledger import ledger as module
from hush.core.errors import LedgerError
from tests import forked
from tests.accounting.ledger.charged import PLAN, STEEP


@pytest.fixture(autouse=True)
def a_few_lines_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_FOLDED", 5)


def fill(ledger: hush.Ledger, steps: range, run: str = "r") -> None:
    for step in steps:
        ledger.charge(PLAN, run=run, step=step, release=f"{step:x}")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
            LedgerError, match=r"step 15 of run r.*no longer on record.*newest checkpoint"
        ):
            ledger.charge(PLAN, run="r", step=15, release="f")
        with pytest.raises(LedgerError, match="does not follow step 20"):
            ledger.charge(PLAN, run="r", step=22, release="16")
        assert ledger.counts == {PLAN: 20}


def test_a_fold_keeps_what_the_guarantee_says_of_its_assumptions(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        for step in range(1, 8):
            ledger.charge(
                PLAN,
                run="r",
                step=step,
                release="x",
                randomness="seeded",
                records=30,
                arithmetic="assumed",
            )
        before = str(ledger.epsilon(0.1))
        ledger.compact("r", 6)
    assert "folded" in lines(path)[-1]
    with hush.Ledger(path) as ledger:
        assert str(ledger.epsilon(0.1)) == before
        assert "arithmetic: assumed, randomness: seeded, delta: above 1/30" in before


def test_other_runs_keep_all_their_releases(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 9), run="answers")
        fill(ledger, range(1, 21))
        ledger.compact("r", 20)
    with hush.Ledger(path) as ledger:
        assert list(ledger.releases) == [f"{step:x}" for step in range(1, 9)]


def test_nothing_is_folded_unless_asked_for_or_worth_it(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        long = path.read_bytes()
        for run, step in (("r", 4), ("r", 21), ("unknown", 10)):
            ledger.compact(run, step)
            assert path.read_bytes() == long


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


def test_the_compacted_file_is_locked_too(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        ledger.compact("r", 20)
        with pytest.raises(LedgerError, match="is open already"):
            hush.Ledger(path)
        fill(ledger, range(21, 22))
    with hush.Ledger(path) as ledger:
        assert ledger.counts == {PLAN: 21}


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


def test_compaction_in_memory_forgets_releases_alone() -> None:
    ledger = hush.Ledger()
    fill(ledger, range(1, 21))
    ledger.compact("r", 18)
    assert ledger.counts == {PLAN: 20}
    assert list(ledger.releases) == ["13", "14"]


@pytest.mark.few(3)
@pytest.mark.parametrize("moment", range(1, 9))
def test_a_crash_while_compacting_loses_no_charge(path: Path, moment: int) -> None:
    """Killed before or after each call that changes something on disk, and while charging on."""
    code = f"""
import os, pathlib, signal, hush
from hush.accounting.ledger import ledger as module
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


def test_a_full_disk_while_compacting_is_named_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        long = path.read_bytes()

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match=rf"No space left on device.*no charge was lost.*{path}"):
                ledger.compact("r", 20)
        assert path.read_bytes() == long
        with pytest.raises(LedgerError, match="Open it again"):
            fill(ledger, range(21, 22))
    with hush.Ledger(path) as ledger:
        assert ledger.counts == {PLAN: 20}


def test_a_void_ledger_stays_void(path: Path) -> None:
    with hush.Ledger(path) as ledger:
        fill(ledger, range(1, 21))
        ledger.void("moved")
        ledger.compact("r", 20)
    assert hush.Ledger(path, read_only=True).voided == "moved"


def test_a_link_to_the_file_and_its_permissions_stay(tmp_path: Path) -> None:
    link, real = tmp_path / "link.jsonl", tmp_path / "elsewhere" / "real.jsonl"
    link.symlink_to(real)
    with hush.Ledger(link) as ledger:
        real.chmod(0o640)
        fill(ledger, range(1, 21))
        ledger.compact("r", 20)
        fill(ledger, range(21, 22))
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert hush.Ledger(real, read_only=True).counts == {PLAN: 21}
