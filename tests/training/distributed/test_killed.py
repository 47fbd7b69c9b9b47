"""Kill or stop one rank: nothing is released uncharged, the others stop, and the run resumes."""

import os
import random
import signal
import time
from itertools import product
from pathlib import Path

import pytest

import hush
from tests.training.distributed.killable import PLACES, Fate, Job, charged_in, ended, released_by

WHOLE = 40
"""Steps of the run that nobody disturbs."""
Releases = list[tuple[int, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """What a run that nobody disturbs releases."""
    job = Job(tmp_path_factory.mktemp("whole"), WHOLE)
    assert job.run() == [0, 0], job.said(0) + job.said(1)
    charges = charged_in(job.folder)
    assert released_by(job.folder, 0) == released_by(job.folder, 1) == charges
    return charges


def check_paid(folder: Path, ranks: int = 2) -> Releases:
    """The charges, after comparing them with what every rank released."""
    charges = charged_in(folder) if (folder / "run" / "ledger.jsonl").exists() else []
    for rank in range(ranks):
        assert set(released_by(folder, rank)) <= set(charges)
    return charges


def check_stopped(job: Job, status: list[int | None], victim: int) -> None:
    """The victim was killed, and the other rank ended with a text that says what to do."""
    assert status[victim] == -signal.SIGKILL, job.said(victim)
    assert status[1 - victim] == 1, job.said(1 - victim)
    said = job.said(1 - victim).splitlines()[-1]
    assert "ProcessFailed: " in said
    assert "another rank was killed" in said
    assert "resume from the last checkpoint" in said


def check_resumes(folder: Path, whole: Releases, ranks: int = 2) -> None:
    """The run goes on for a few steps, and its ledger holds every release of all its ranks, ever."""
    before = check_paid(folder)
    end = (before[-1][0] if before else 0) + 3
    job = Job(folder, end, ranks, resume=(folder / "run").exists())
    assert job.run() == [0] * ranks, [job.said(rank) for rank in range(ranks)]
    charges = check_paid(folder, max(2, ranks))
    last = {released_by(folder, rank)[-1] for rank in range(ranks)}
    assert last == {charges[-1]}
    assert charges[-1][0] == end
    if ranks == 2:  # repeated bit for bit, and not paid again
        assert charges == whole[:end]
    else:
        assert charges[: len(before)] == before == whole[: len(before)]
        assert ("2 processes charged" in job.said(0)) == (len(charges) > end)
    with hush.Ledger(folder / "run" / "ledger.jsonl", read_only=True) as ledger:
        assert sum(ledger.counts.values()) == len(charges)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("victim", "place", "ranks"),
    [
        (0, "charged", 2),
        slow(1, "charged", 1),
        *(slow(*each, 2) for each in product((0, 1), PLACES) if each != (0, "charged")),
        *(slow(*each, 3) for each in product((0, 1), ("charge", "written"))),
    ],
)
def test_a_rank_that_is_killed_at_a_place_of_the_step(
    tmp_path: Path, whole: Releases, victim: int, place: str, ranks: int
) -> None:
    """Six steps are done, a checkpoint of the fourth; how many are charged depends on the place."""
    times = 7 if place != "gradients" else 14  # two physical batches or more a step, tried before
    job = Job(tmp_path, WHOLE, fate=Fate(victim, place, times))
    check_stopped(job, job.run(), victim)
    charges = check_paid(tmp_path)
    if place != "gradients":
        on_disk = PLACES.index(place) >= PLACES.index("written")
        assert len(charges) == 6 + on_disk
        known = "Step 7 is on the ledger" if place in ("charged", "applied") else "Step"
        assert known in job.said(1 - victim)
    check_resumes(tmp_path, whole, ranks)


def test_a_release_that_is_not_on_the_ledger_is_found(tmp_path: Path) -> None:
    """The comparison itself: rank 1 goes on, and rank 0 is killed before it writes."""
    job = Job(tmp_path, WHOLE, fate=Fate(0, "writing", 7), hasty=True)
    check_stopped(job, job.run(), 0)
    with pytest.raises(AssertionError):
        check_paid(tmp_path)


@pytest.mark.parametrize("victim", [slow(0), 1])
@pytest.mark.parametrize("point", [0, *map(slow, range(1, 10))])
def test_a_rank_that_is_killed_at_a_random_moment(
    tmp_path: Path, whole: Releases, victim: int, point: int
) -> None:
    """A random time, of about a step's length, after a random number of its releases."""
    chance = random.Random(10 * point + victim)
    job = Job(tmp_path, WHOLE)
    started = job.start()
    done = chance.randrange(1, WHOLE - 10)
    last = time.monotonic() + 60
    while len(released_by(tmp_path, victim)) < done and time.monotonic() < last:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02))
    os.kill(started[victim].pid or 0, signal.SIGKILL)
    check_stopped(job, ended(started), victim)
    check_resumes(tmp_path, whole, ranks=1 + point % 3)


def check_hung(job: Job, other: int) -> None:
    said = job.said(other).splitlines()[-1]
    assert "ProcessFailed: " in said
    assert "exceeded the timeout" in said
    assert "pass a longer timeout to init_process_group" in said


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        *(slow(rank, "charge") for rank in (0, 1)),
        *(slow(*each) for each in product((0, 1), ("gradients", "written", "applied"))),
    ],
)
def test_a_rank_that_hangs(tmp_path: Path, whole: Releases, victim: int, place: str) -> None:
    """And wakes up when the other has given up: it may use what was charged, and nothing else."""
    job = Job(tmp_path, WHOLE, timeout=6, fate=Fate(victim, place, 7, signal.SIGSTOP))
    started = job.start()
    assert ended(started[1 - victim : 2 - victim]) == [1]
    assert started[victim].is_alive()
    check_hung(job, 1 - victim)
    check_paid(tmp_path)
    os.kill(started[victim].pid or 0, signal.SIGCONT)
    assert ended(started) == [1, 1]
    assert "ProcessFailed: " in job.said(victim).splitlines()[-1]
    check_resumes(tmp_path, whole)
