"""Time and memory to account for a ledger, to open it for a resumed run, and to charge and compact it.

Run: .venv/bin/python benchmarks/ledger.py [steps ...]

Without arguments: 1e4, 1e6 and 1e7 steps. `compacted` is what `hush.train` leaves: all lines up to a
checkpoint are folded, every 1000 steps here, and 1000 steps follow the last one. `lines` is a ledger
on which nobody ever called `compact`; above 1e6 lines it is left out. Each is read in a process of its
own.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hush

PLAN = hush.Plan(
    sampling=hush.Poisson(rate=0.001),
    clipping=hush.L2(norm=1.0),
    noise=hush.Gaussian(multiplier=1.0),
)
PERIOD = 1000
MOST_LINES = 10**6

# VmHWM, not ru_maxrss: the latter is inherited from the process that wrote the ledger
READ = """
import re, sys, time
from pathlib import Path
import hush
from hush.accounting.ledger import Ledger

def most_memory():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

base, began = most_memory(), time.perf_counter()
ledger = Ledger(sys.argv[1], read_only=sys.argv[2] == "account")
opened = time.perf_counter() - began
if sys.argv[2] == "account":
    ledger.epsilon(1e-5)
print(opened, time.perf_counter() - began, most_memory() - base)
"""


def write(path: Path, steps: int, *, compact: bool) -> None:
    """A ledger of so many steps; without `fsync`, which is what takes the time."""
    sync, os.fsync = os.fsync, lambda _: None
    with hush.Ledger(path) as ledger:
        for step in range(1, steps + 1):
            ledger.charge(PLAN, run="r", step=step, release=f"{step:016x}")
            if compact and not step % PERIOD and step < steps:
                ledger.compact("r", step)
    os.fsync = sync


def read(path: Path, how: str) -> tuple[float, float, float]:
    """Seconds to open the ledger, seconds in all, and MiB that it took."""
    command = [sys.executable, "-c", READ, str(path), how]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(answer[0]), float(answer[1]), float(answer[2])


def charging(folder: Path) -> tuple[float, float]:
    """Milliseconds of one charge, and of one compaction of 1000, both on disk."""
    with hush.Ledger(folder / "charging.jsonl") as ledger:
        began = time.perf_counter()
        for step in range(1, PERIOD + 1):
            ledger.charge(PLAN, run="r", step=step, release=f"{step:016x}")
        charged = time.perf_counter()
        ledger.compact("r", PERIOD)
        return (charged - began), (time.perf_counter() - charged) * 1000


def main() -> None:
    print("| steps | ledger | file, MB | account: s | of it reading: s | MiB | resume: s | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for steps in [int(float(word)) for word in sys.argv[1:]] or [10**4, 10**6, 10**7]:
            for compact in (True, False):
                if not compact and steps > MOST_LINES:
                    continue
                path = folder / f"{steps}-{compact}.jsonl"
                write(path, steps, compact=compact)
                reading, account, memory = read(path, "account")
                _, resume, more = read(path, "resume")
                size = path.stat().st_size / 1e6
                kind = "compacted" if compact else "lines"
                print(
                    f"| {steps:.0e} | {kind} | {size:.2f} | {account:.2f} | {reading:.3f} "
                    f"| {memory:.0f} | {resume:.3f} | {more:.0f} |",
                    flush=True,
                )
                path.unlink()
        single, fold = charging(folder)
    print(f"\none charge: {single:.2f} ms; folding 1000 of them: {fold:.1f} ms")


if __name__ == "__main__":
    main()
