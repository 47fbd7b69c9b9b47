"""A private step by several processes of this machine: throughput, traffic, and what overlap could save.

    .venv/bin/python benchmarks/distributed.py [--models mlp,cifar] [--processes 1,2] [--batch 256]

Every figure is a ratio. *Speed* is the time that one process takes for a step over the time that n take
for the same logical batch, the median over rounds in which all take turns: by the wall, and, for a
machine that is busy with other work, by the CPU time of the rank that uses most, which is what the wall
would show if every rank had a core of its own and never waited. *Sent* is what a rank gives to vectors'
collectives over what it gives to a ring all-reduce of one gradient of the same precision; messages are
counted apart. *Overlap* is the time of a local sum and the reduction of another vector of the same
length at the same time, over one after the other: no schedule of the reduction can save more.

With CUDA all processes share the GPU through gloo, which shows that it works and not how fast it is.
"""

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

import hush
from networks import MODELS
from training_steps import EVERYONE, LEARNING_RATE, Step, Task, private

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MESSAGE = 4096


class Sent(TorchDispatchMode):
    """Bytes that this rank sends to others of its group, by vectors and by messages, and collectives."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.vectors, self.messages, self.collectives = ranks, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given: Tensor = args[1]
            others = self.ranks - 1
            sent = given.nbytes * others
            if "alltoall" in func._opname:  # to each its part
                sent //= self.ranks
            if given.dtype == torch.uint8 and given.nbytes == MESSAGE:
                self.messages += sent
            else:
                self.vectors += sent
                self.collectives += 1
        return func(*args, **(kwargs or {}))


def task_of(model: str, batch: int) -> tuple[torch.nn.Module, Task]:
    torch.manual_seed(0)
    network, inputs = MODELS[model]
    x, y = inputs(batch).to(DEVICE), torch.randint(0, 10, (batch,)).to(DEVICE)
    return network(False).to(DEVICE), Task(x, y)


def timed(step: Step) -> tuple[float, float]:
    """Wall and CPU seconds of a step, the larger of all ranks: they begin together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1])


def nothing() -> None:
    """A step of a rank that is not in the group."""


def speeds(model: str, settings: argparse.Namespace, groups: dict[int, Any]) -> list[str]:
    """A row for each number of processes."""
    steps: dict[int, Step] = {}
    rows, traffic = [], {}
    for ranks, group in groups.items():
        steps[ranks] = nothing
        if dist.get_rank() < ranks:
            network, task = task_of(model, settings.batch)
            steps[ranks] = private(network, task, processes=group if ranks > 1 else False)
            steps[ranks]()
            with Sent(ranks) as sent:
                steps[ranks]()
            size = sum(value.numel() for value in network.parameters())
            whole = 2 * (ranks - 1) / ranks * size * torch.float64.itemsize
            traffic[ranks] = sent, sent.vectors / whole if ranks > 1 else 0.0
    times: dict[int, list[tuple[float, float]]] = {ranks: [] for ranks in steps}
    for _ in range(settings.repeats):
        for ranks, step in steps.items():
            times[ranks].append(timed(step))
    alone = next(iter(times))
    for ranks, spent in times.items():
        wall, cpu = (
            statistics.median(one[k] / many[k] for one, many in zip(times[alone], spent, strict=True))
            for k in (0, 1)
        )
        if dist.get_rank() == 0:
            sent, ratio = traffic[ranks]
            share = f"{ratio:.2f}" if ranks > 1 else "-"
            messages = f"{sent.messages / 1024:.0f} KiB"
            rows.append(
                f"| {model} | {ranks} | {wall:.2f} | {cpu:.2f} | {sent.collectives} | {share} "
                f"| {messages} |"
            )
    return rows


def overlap(model: str, settings: argparse.Namespace) -> list[str]:
    """A row: time of sum and reduction together over one after the other, and the reduction's share."""
    ranks = dist.get_world_size()
    network, task = task_of(model, settings.batch // ranks)
    step = hush.PrivateStep(
        network,
        task.loss,
        torch.optim.SGD(network.parameters(), lr=LEARNING_RATE),
        hush.Plan(sampling=EVERYONE, clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)),
        records=len(task),
        distributed=hush.Distributed(processes=False),
    )
    batch = next(step.batches((task.inputs, task.targets)))
    size = -(-sum(value.numel() for value in network.parameters()) // ranks) * ranks
    sent, received = torch.randn(size, dtype=torch.float64), torch.empty(size, dtype=torch.float64)

    def summed() -> None:
        step.clipped_sum(batch)

    def reduced() -> None:
        dist.all_to_all_single(received, sent)

    def in_turn() -> None:
        summed()
        reduced()

    def at_once() -> None:
        work = dist.all_to_all_single(received, sent, async_op=True)
        summed()
        work.wait()

    variants: dict[str, Callable[[], None]] = {
        "in turn": in_turn,
        "at once": at_once,
        "reduced": reduced,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(settings.repeats + 1):
        for name, variant in variants.items():
            times[name].append(timed(variant))

    def over(name: str, k: int) -> float:
        pairs = list(zip(times[name], times["in turn"], strict=True))[1:]  # the first warms up
        return statistics.median(one[k] / other[k] for one, other in pairs)

    if dist.get_rank():
        return []
    cells = " | ".join(f"{over(name, k):.2f}" for name in ("at once", "reduced") for k in (0, 1))
    return [f"| {model} | {size:,} | {ranks} | {cells} |"]


def work(rank: int, ranks: int, folder: str, settings: argparse.Namespace) -> None:
    """One rank: everything is measured by all of them, in turns."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=10),
    )
    groups = {each: dist.new_group(list(range(each))) for each in settings.processes}
    tables = (
        [row for model in settings.models for row in speeds(model, settings, groups)],
        [row for model in settings.models for row in overlap(model, settings)],
    )
    if rank == 0:
        Path(folder, "rows.txt").write_text("\n".join(_tables(*tables)))
    dist.barrier()
    dist.destroy_process_group()


def _tables(speed: list[str], overlapped: list[str]) -> list[str]:
    return [
        "| model | processes | speed, wall | speed, CPU | vector collectives a step | sent | messages |",
        "|---|---|---|---|---|---|---|",
        *speed,
        "",
        "| model | numbers | processes | at once, wall | CPU | reduction alone, wall | CPU |",
        "|---|---|---|---|---|---|---|",
        *overlapped,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mnist,mlp,cifar", type=lambda text: text.split(","))
    parser.add_argument(
        "--processes",
        default=[1, 2, 4] if DEVICE.type == "cuda" else [1, 2],
        type=lambda text: [int(each) for each in text.split(",")],
    )
    parser.add_argument("--batch", default=256, type=int)
    parser.add_argument("--repeats", default=11, type=int)
    settings = parser.parse_args()
    ranks = max(settings.processes)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (ranks, folder, settings), nprocs=ranks, start_method="spawn")
        print(Path(folder, "rows.txt").read_text())


if __name__ == "__main__":
    main()
