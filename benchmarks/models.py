"""A private step of models that people train, beside a plain one and those of Opacus and fastDP.

    python -m pip install --no-deps opacus opt_einsum        (the peers, and torchvision; a column of a
    PYTHONPATH=fast-differential-privacy ...                  library that is missing says so)
    python benchmarks/models.py [--models "BERT-base;GPT-2"] [--columns "plain;hush"]
                                [--precision float32,bf16] [--physical 64] [--small]

Every column is timed in rounds of its own beside plain steps, several one after another unless they
take long: the median of the interleaved repeats, and the median of the ratios to the plain steps of the
same round. Peak memory is what torch reserved of
the GPU during two steps before these, for the column's own: weights, gradients, what the step needs
besides, and what a captured CUDA graph keeps. A step whose clipped sum is not that of gradients taken
one by one, on a small network, is marked. A column that runs out of memory is tried once more with a
quarter of the records at a time. "bf16" is torch.autocast around the forward pass, or around hush's
step; TensorFloat-32 is at torch's defaults.
Each model runs in a process of its own; nothing else runs while it is timed.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO

import torch
from torch import nn

from agreement import TOLERANCE, disagreement
from architectures import ARCHITECTURES, Options
from interleaved import ratio, rounds
from model_table import HEADER, Row, summary
from named import names_among
from training_steps import Step, Task, fastdp, opacus, plain, private

COLUMNS: dict[str, Callable[[nn.Module, Task], Step]] = {
    "plain": plain,
    "hush": private,
    "Opacus hooks": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
    "fastDP": fastdp,
}
OWN = ("plain", "hush")
PRECISIONS = ("float32", "bf16")
WARM_UP = 2
SECONDS = 0.5
"""How long plain steps go on one after another."""
OUT_OF_MEMORY = "out of memory"


class Meter:
    """A step, and the most memory of the GPU that it and its model took during one."""

    def __init__(self, step: Step, own: int | None) -> None:
        """`own`: bytes that the step and its model hold between steps; None: there is no GPU."""
        self.step, self.own, self.peak = step, own, 0

    def __call__(self) -> None:
        self.step()

    def measure(self) -> None:
        """Run a step and note its memory: a step of its own, as the next one has to ask for it again."""
        if self.own is None:
            return
        before = reserved()  # of the other steps too
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.peak = max(self.peak, self.own + torch.cuda.max_memory_reserved() - before)
        self.own += reserved() - before

    @property
    def mebibytes(self) -> float | None:
        return None if self.own is None else self.peak / 2**20


def reserved() -> int:
    """Bytes of the GPU that torch holds, without those it could give back.

    What a captured CUDA graph keeps for its replays is held and not allocated.
    """
    gc.collect()  # hooks and models refer to each other
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class Bench:
    """The steps of one model in one precision, and their times and memory."""

    def __init__(self, model: str, precision: str, options: argparse.Namespace) -> None:
        self.model, self.precision, self.options = model, precision, options
        self.architecture = ARCHITECTURES[model]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.logical = options.logical or (8 if options.small else self.architecture.logical)
        self.physical = min(options.physical or self.architecture.physical, self.logical)
        torch.manual_seed(0)
        inputs, targets = self.architecture.batch(self.logical, options.small)
        self.inputs, self.targets = inputs.to(self.device), targets.to(self.device)

    def step(self, column: str, task: Task) -> tuple[nn.Module, Step]:
        """A column's model, and its step."""
        torch.manual_seed(0)
        settings = Options(column not in OWN, self.options.dropout, self.options.small)
        with self.device:
            model = self.architecture.network(settings).to(self.device).train()
        return model, COLUMNS[column](model, task)

    def warm(self, column: str, physical: int) -> tuple[Meter, str]:
        """A column's step after others like it have run, and what is to be said of it."""
        on_gpu = self.device.type == "cuda"
        held = reserved() if on_gpu else 0
        bfloat16 = self.precision == "bf16"
        task = Task(self.inputs, self.targets, self.architecture.loss, physical, bfloat16)
        few = task.first(2 * physical)  # enough to load kernels, where a logical batch takes seconds
        model, step = self.step(column, few)
        before = _sums(model)
        for _ in range(WARM_UP):
            step()
        still = sum(old == new for old, new in zip(before, _sums(model), strict=True))
        if len(few) < len(task):
            del model, step
            step = self.step(column, task)[1]
        meter = Meter(step, reserved() - held if on_gpu else None)
        for _ in range(WARM_UP):  # the first may capture a graph, the next ones need it
            meter.measure()
        return meter, f"{still} of {len(before)} parameters not trained" if still else ""

    @cached_property
    def plain(self) -> Meter:
        """The plain step, which all columns are timed beside."""
        return self.warm("plain", self.physical)[0]

    def rows(self, column: str) -> Iterator[Row]:
        """A column's row; one that ran out of memory is followed by one with fewer records at a time."""
        row = self.row(column, self.physical)
        yield row
        if row.note.startswith(OUT_OF_MEMORY) and self.physical >= 4:
            yield self.row(column, self.physical // 4)

    def row(self, column: str, physical: int) -> Row:
        """A column's measurements, or why there are none."""
        row = Row(self.model, column, self.precision, self.logical, physical)
        try:
            self.measure(row)
        except torch.OutOfMemoryError:
            row.note = OUT_OF_MEMORY
        except Exception as error:  # a peer may raise anything; the other columns go on
            row.note = _first_line(error)
        if self.device.type == "cuda":
            reserved()
        return row

    def measure(self, row: Row) -> None:
        """Fill in the measurements of a column, in rounds with a plain step."""
        steps = {"plain": self.plain}
        if row.column != "plain":
            steps[row.column], row.note = self.warm(row.column, row.physical)
        once = rounds(steps, self.device, 1)["plain"][0]
        calls = max(1, min(5, int(SECONDS / once)))
        times = rounds(steps, self.device, self.options.repeats, calls=calls, limit=self.options.seconds)
        row.milliseconds = 1e3 * statistics.median(times[row.column])
        row.times_plain = ratio(times[row.column], times["plain"])
        row.mebibytes, row.plain_mebibytes = steps[row.column].mebibytes, self.plain.mebibytes


def _sums(model: nn.Module) -> list[float]:
    """A number of each parameter that is to be trained; noise moves it."""
    trained = [p.detach().double().sum() for p in model.parameters() if p.requires_grad]
    return torch.stack(trained).tolist()


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).splitlines()), "").replace("|", "/")
    return f"{type(error).__name__}: {line}"[:160]


def doubt(model: str, column: str) -> str:
    """What is wrong with the sum of a column's step, if anything is, on a small network on the CPU."""
    architecture = ARCHITECTURES[model]
    task = Task(*architecture.batch(4, small=True), architecture.loss, physical=2)

    def network(peer: bool) -> nn.Module:
        return architecture.network(Options(peer=peer, small=True))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model before is being timed
    try:
        distance = disagreement(COLUMNS[column], network, task, column not in OWN)
    except Exception as error:
        return f"its clipped sum was not checked: {_first_line(error)}"
    finally:
        torch.set_num_threads(threads)
    return f"its clipped sum is off by {distance:.0%}" if distance > TOLERANCE else ""


def work(model: str, precision: str, options: argparse.Namespace) -> None:
    """Print the rows of one model as lines of JSON, once a line on standard input says to begin."""
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # fastDP prints
        doubts = {column: doubt(model, column) for column in options.columns if column != "plain"}
        print("loaded", file=output, flush=True)
        input()
        bench = Bench(model, precision, options)
        for column in options.columns:
            for row in bench.rows(column):
                if row.milliseconds is not None:
                    row.note = "; ".join(filter(None, (row.note, doubts.get(column))))
                print(json.dumps(asdict(row)), file=output, flush=True)


@dataclass(frozen=True)
class Worker:
    """A process that measures one model; it loads its libraries and checks sums, and waits to begin."""

    process: "subprocess.Popen[str]"
    errors: IO[str]

    @classmethod
    def start(cls, model: str, precision: str) -> "Worker":
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is read when the process has ended
        arguments = [sys.executable, __file__, *sys.argv[1:], "--work", model, precision]
        process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        return cls(process, errors)

    def wait(self) -> None:
        """Return when the process has nothing more to do before it begins."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def rows(self) -> Iterator[Row]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            yield Row(**json.loads(line))
        if self.process.wait():
            self.errors.seek(0)
            print(f"\nended with {self.process.returncode}: {self.errors.read()[-2000:]}\n", flush=True)


def workers(planned: list[tuple[str, str]]) -> Iterator[Worker]:
    """A worker for each model and precision, one after another, none of which does anything meanwhile.

    On a GPU all are loaded first, at the same time; on a CPU one after another, as they take memory.
    """
    together = len(planned) if torch.cuda.is_available() else 1
    for first in range(0, len(planned), together):
        started = [Worker.start(*job) for job in planned[first : first + together]]
        for worker in started:
            worker.wait()
        yield from started


def jobs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Models in the precisions they are to be measured in."""
    return [
        (model, precision)
        for precision in options.precision
        for model in options.models
        if precision == "bf16" or not ARCHITECTURES[model].bfloat16_only
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=names_among(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--columns", type=names_among(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--precision", type=names_among(PRECISIONS, ","), default=list(PRECISIONS))
    parser.add_argument("--logical", type=int, help="records a step")
    parser.add_argument("--physical", type=int, help="records at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="no new round of a column after these"
    )
    parser.add_argument("--dropout", action="store_true", help="keep the models' dropout")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the benchmark")
    parser.add_argument("--out", type=Path, help="JSON file of the rows; default: models.json in $OUT")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.work:
        work(*options.work, options)
        return
    folder = os.environ.get("OUT")
    out = options.out or (Path(folder) / "models.json" if folder else None)
    rows: list[Row] = []
    for precision, planned in groupby(jobs(options), key=itemgetter(1)):
        print(f"\n{precision}, torch {torch.__version__}\n\n{HEADER}\n{'|---' * 8}|", flush=True)
        before = len(rows)
        for worker in workers(list(planned)):
            for row in worker.rows():
                print(row, flush=True)
                rows.append(row)
                if out is not None:
                    out.write_text(json.dumps([asdict(each) for each in rows], indent=1))
        print(summary(rows[before:], options.columns), flush=True)


if __name__ == "__main__":
    main()
