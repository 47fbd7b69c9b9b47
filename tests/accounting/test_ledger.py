import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush.core.errors import HushError, LedgerError

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


@pytest.mark.parametrize("cut", range(1, 200, 7))
def test_a_torn_last_line_stays_charged(path: Path, cut: int) -> None:
    charge(path, PLAN, range(1, 4))
    whole = path.read_bytes()
    torn = whole[:-cut]
    path.write_bytes(torn)
    complete = [json.loads(line) for line in torn.split(b"\n")[:-1]]
    begun = sum("charge" in line for line in complete)
    tail = torn.split(b"\n")[-1]
    stored = any("plan" in line for line in complete)
    expected = begun + (stored and (b'"charge'.startswith(tail[1:9]) or b"charge" in tail))
    if not tail:
        expected = begun
    assert counts(path).get(PLAN, 0) == expected
    assert counts(path).get(PLAN, 0) == expected, "opening it again must not change the count"
    charge(path, PLAN, range(10, 12), run="another")
    assert counts(path)[PLAN] == expected + 2


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


@pytest.mark.parametrize("keep", range(0, 32, 5))
def test_a_crash_at_birth_leaves_a_ledger_that_opens(path: Path, keep: int) -> None:
    with hush.Ledger(path):
        header = path.read_bytes()
    path.write_bytes(header[:keep])
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


def test_an_empty_file_is_no_ledger_to_read(path: Path) -> None:
    path.touch()
    with pytest.raises(LedgerError, match="damaged at line 1"):
        hush.Ledger(path, read_only=True)


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
