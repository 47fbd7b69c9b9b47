"""Ranks of a run that can be killed or stopped at a named place, and that log what they release."""

import datetime
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hush
from hush.accounting.ledger import Ledger
from hush.training.distributed.process_group import ProcessGroup
from hush.training.distributed.processes import Processes
from hush.training.fingerprint import fingerprint
from hush.training.step import PrivateStep
from tests.training.distributed import spawned as spawned  # decides what forks begin with
from tests.training.distributed.problems import train

PLACES = ("draw", "gradients", "reduction", "noise", "charge", "written", "charged", "applied")
"""Places of a step, in order; "written" is where the charge is on the disk of rank 0."""
EVERY = 4
"""Steps between two checkpoints."""
_FORKS = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Fate:
    """What becomes of one rank: a signal that it gets at a place of the program, the n-th time."""

    rank: int
    place: str
    times: int = 1
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Job:
    """One start of all ranks of a run."""

    folder: Path
    """Holds the run, and what the ranks write about it."""
    steps: int
    ranks: int = 2
    timeout: float = 60.0
    """Of the process group, in seconds."""
    fate: Fate | None = None
    resume: bool = False
    hasty: bool = False
    """Whether rank 0 lets the others go on before a charge is on disk: a broken run, to be found."""
    number: int = field(default_factory=time.time_ns)

    def said(self, rank: int) -> str:
        """What a rank printed, its error at the end."""
        return self._said(rank).read_text()

    def run(self) -> list[int | None]:
        """Exit status of each rank, once all have ended."""
        return ended(self.start())

    def start(self) -> list[ForkServerProcess]:
        self.folder.mkdir(exist_ok=True)
        started = [_FORKS.Process(target=work, args=(self, rank)) for rank in range(self.ranks)]
        for process in started:
            process.start()
        return started

    def _said(self, rank: int) -> Path:
        return self.folder / f"said-{self.number}-{rank}.txt"


def ended(ranks: list[ForkServerProcess], within: float = 60.0) -> list[int | None]:
    """Exit status of each rank; None of one that is still there after so many seconds."""
    last = time.monotonic() + within
    for process in ranks:
        process.join(max(0.0, last - time.monotonic()))
    return [process.exitcode for process in ranks]


def work(job: Job, rank: int) -> None:
    """Train as one rank of a job."""
    with job._said(rank).open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/meeting-{job.number}",
        rank=rank,
        world_size=job.ranks,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    _watch(job, rank)
    checkpoints = hush.Checkpoints(directory=job.folder / "run", resume=job.resume)
    train(job.steps, checkpoints=checkpoints, logging=hush.Logging(every=EVERY))


def _watch(job: Job, rank: int) -> None:
    """Have the rank meet its fate, and write each release down before it is used."""
    met: Counter[str] = Counter()
    fate = job.fate if job.fate is not None and job.fate.rank == rank else None

    def reach(place: str) -> None:
        met[place] += 1
        if fate is not None and (fate.place, fate.times) == (place, met[place]):
            os.kill(os.getpid(), fate.signal)

    def watched(function: Callable[..., Any], before: str, after: str | None = None) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            reach(before)
            result = function(*arguments, **named)
            if after is not None:
                reach(after)
            return result

        return call

    apply = PrivateStep.apply
    releases = (job.folder / f"releases-{rank}.jsonl").open("a", buffering=1)

    def released(self: PrivateStep, update: torch.Tensor) -> None:
        releases.write(json.dumps([self.steps, fingerprint([update])]) + "\n")
        apply(self, update)

    patched: list[tuple[Any, str, Any]] = [
        (PrivateStep, "draw", watched(PrivateStep.draw, "draw")),
        (PrivateStep, "clip_physical_batch", watched(PrivateStep.clip_physical_batch, "gradients")),
        (Processes, "sum_slices", watched(Processes.sum_slices, "reduction")),
        (Processes, "gather_slices", watched(Processes.gather_slices, "noise")),
        (PrivateStep, "charge", watched(PrivateStep.charge, "charge")),
        (Ledger, "charge", watched(Ledger.charge, "writing", "written")),
        (PrivateStep, "apply", watched(released, "charged", "applied")),
    ]
    if job.hasty:
        patched.append((ProcessGroup, "charge", _charge_hastily))
    for owner, name, function in patched:
        mock.patch.object(owner, name, function).start()


def _charge_hastily(self: ProcessGroup, ledger: Ledger, plan: hush.Plan, **details: Any) -> None:
    self.exchange("the charge")
    (ledger.follow if self.rank else ledger.charge)(plan, **details)


def released_by(folder: Path, rank: int) -> list[tuple[int, str]]:
    """Step and fingerprint of every release of a rank, over all starts of the run."""
    path = folder / f"releases-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(step, release) for step, release in map(json.loads, lines)]


def charged_in(folder: Path) -> list[tuple[int, str]]:
    """Step and fingerprint of every charge on the ledger's file."""
    lines = (folder / "run" / "ledger.jsonl").read_bytes().splitlines()
    entries = map(json.loads, lines)
    return [(entry["step"], entry["release"]) for entry in entries if "charge" in entry]
