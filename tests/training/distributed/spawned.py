"""Scenarios run in gloo processes: one start of the processes serves many of them."""

import datetime
import fcntl
import functools
import inspect
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests import forked as forked  # decides what forks begin with

Scenario = Callable[[Path], Any]
"""A function of an empty folder, which all ranks share, run by each of them at the same time."""

shared_folder: Path | None = None
"""Where the workers of one test run keep results for each other; None: there is one worker."""


class Raised:
    """Error that a scenario ended with on one rank."""

    def __init__(self, error: Exception) -> None:
        self.kind = type(error).__name__
        self.text = str(error)

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def scenarios(module: str) -> tuple[Scenario, ...]:
    """Functions of a module whose one parameter is `folder`, without those that begin with `_`."""
    values = vars(sys.modules[module]).items()
    return tuple(
        value
        for name, value in values
        if inspect.isfunction(value)
        and value.__module__ == module
        and not name.startswith(("_", "test_"))
        if [*inspect.signature(value).parameters] == ["folder"]
    )


@functools.cache
def run(module: str, ranks: int, timeout: float = 300.0) -> dict[str, list[Any]]:
    """What each scenario of a module returned, or raised, by name and rank.

    Workers of one test run (xdist) share it: the first that asks starts the processes.
    """
    if shared_folder is None:
        return _start(scenarios(module), ranks, timeout)
    shared = shared_folder / f"{module} by {ranks} processes.pt"
    with shared.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not shared.stat().st_size:
            torch.save(_start(scenarios(module), ranks, timeout), shared)
    results: dict[str, list[Any]] = torch.load(shared, weights_only=False)
    return results


def result(module: str, ranks: int, name: str) -> list[Any]:
    """What a scenario of a module returned, or raised, by rank."""
    return run(module, ranks)[name]


def _start(chosen: tuple[Scenario, ...], ranks: int, timeout: float) -> dict[str, list[Any]]:
    """Start the processes, and collect what each of them has to say."""
    with tempfile.TemporaryDirectory() as folder:
        codes = start(chosen, ranks, folder, timeout)
        assert not any(codes), f"processes ended with {codes}"
        results = [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(ranks)]
    return {each.__name__: [result[each.__name__] for result in results] for each in chosen}


def start(chosen: tuple[Scenario, ...], ranks: int, folder: str, timeout: float) -> list[int | None]:
    """Run scenarios one after another in processes of one group; the exit code of each process.

    They work in folders of the scenarios' names. A process that dies leaves the others to themselves.
    """
    context = start_processes(
        _worker, (chosen, ranks, folder, timeout), nprocs=ranks, join=False, start_method="forkserver"
    )
    for process in context.processes:
        process.join()
    return [process.exitcode for process in context.processes]


def _worker(rank: int, chosen: tuple[Scenario, ...], ranks: int, folder: str, timeout: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout),
    )
    results: dict[str, Any] = {}
    for scenario in chosen:
        shared = Path(folder, scenario.__name__)
        shared.mkdir(exist_ok=True)
        try:
            results[scenario.__name__] = scenario(shared)
        except Exception as error:
            results[scenario.__name__] = Raised(error)
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
