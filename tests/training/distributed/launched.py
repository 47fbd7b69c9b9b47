"""Runs scripts by two processes each, as torchrun would: `python launched.py SCRIPT...`.

What a rank prints goes to RANK.out beside the script, in whose folder it runs.
"""

import importlib
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path

RANKS = 2
IMPORTED = ("hush.training.loop", "hush.data", "accelerate", "lightning.pytorch", "transformers.trainer")
"""Before the processes are forked: importing takes longer than the scripts."""


def run_rank(script: Path, rank: int, port: int) -> None:
    """Run a script as one of its processes, in the environment that torchrun makes."""
    os.chdir(script.parent)
    printed = os.open(f"{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    numbers |= {"GROUP_RANK": 0, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "ACCELERATE_USE_CPU": "1"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = [script.name]
    runpy.run_path(script.name, run_name="__main__")


def run(script: Path) -> list[int | None]:
    """Exit codes of a script's processes, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(script, rank, port)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    for script in map(Path, sys.argv[1:]):
        codes = run(script)
        if any(codes):
            sys.exit(f"{script.name} ended with {codes}")
