"""A private step beside a plain one and beside its neighbours: time, and peak memory.

    .venv/bin/pip install --no-deps opacus opt_einsum     (the peers; without them they are left out)
    .venv/bin/python benchmarks/step.py [--batch 256] [--threads 1] [--models mlp,bilstm]

The overhead of a step, on models whose plain step takes a tenth of a millisecond:

    .venv/bin/python benchmarks/step.py --batch 64 --models linear,small-mlp,deep --no-memory

Times are medians of interleaved repeats, each as its ratio to the plain step of the same round. Memory
is the peak over a few steps in a process of its own, less what that process held before the first.
With CUDA everything runs on the GPU. glibc gives large blocks back as they are freed, and every step
that allocates pays for it; to time without that, raise MALLOC_TRIM_THRESHOLD_ and
MALLOC_MMAP_THRESHOLD_ to 100000000000 (memory is measured without them). On a machine that is busy
with other work `--clock cpu` counts the time that the process itself was given, on all its threads.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import hush
from interleaved import CALLS, ratio, rounds
from named import names_among
from networks import MODELS
from training_steps import Step, Task, opacus, plain, private, sgd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOSS = nn.CrossEntropyLoss(reduction="none")
# Something of nearly every record is cut off; of few, as in the twice-sampling paper.
CLAMPED: dict[str, Any] = {"clipping": hush.Linf(norm=1e-3)}
CAPPED: dict[str, Any] = {"clipping": hush.L2Linf(l2=1.0, linf=0.1)}
COORDINATES: dict[str, Any] = {**CAPPED, "sampling": hush.Coordinate(rate=0.5)}


def by_hand(model: nn.Module, task: Task) -> Step:
    """Per-sample gradients as people write them without a library."""
    optimizer, x, y = sgd(model), task.inputs, task.targets
    names = [name for name, _ in model.named_parameters()]

    def record_loss(values: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return LOSS(functional_call(model, values, (a[None],)), b[None])[0]

    gradients = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # vmap takes none
            losses = (LOSS(model(a[None]), b[None])[0] for a, b in zip(x, y, strict=True))
            rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
            per_sample = dict(zip(names, map(torch.stack, zip(*rows, strict=True)), strict=True))
        else:
            values = {name: value.detach() for name, value in model.named_parameters()}
            per_sample = gradients(values, x, y)
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in per_sample.values()]).norm(dim=0)
        weights = (task.clip_norm / norms).clamp(max=1)
        for name, value in model.named_parameters():
            total = torch.tensordot(weights, per_sample[name], dims=1)
            value.grad = (total + task.noise_multiplier * torch.randn_like(total)) / len(x)
        optimizer.step()

    return step


STEPS: dict[str, Callable[[nn.Module, Task], Step]] = {
    "plain": plain,
    "hush": private,
    "hush, launched": partial(private, replay=False),
    "hush, replayed": partial(private, replay=True),
    "hush, clamped": partial(private, **CLAMPED),
    "hush, clamped, replayed": partial(private, **CLAMPED, replay=True),
    "hush, capped": partial(private, **CAPPED),
    "hush, coordinates": partial(private, **COORDINATES),
    "vmap by hand": by_hand,
    "Opacus hooks": opacus("hooks"),
    "Opacus functorch": opacus("functorch"),
    "Opacus ghost": opacus("ghost"),
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PEER = ("Opacus hooks", "Opacus functorch", "Opacus ghost")


def ready(model: str, method: str, batch: int) -> Step:
    """A step that has run once already, to be timed."""
    torch.manual_seed(0)
    network, inputs = MODELS[model]
    x, y = inputs(batch).to(DEVICE), torch.randint(0, 10, (batch,)).to(DEVICE)
    return STEPS[method](network(method in PEER).to(DEVICE), Task(x, y))


def peak(model: str, method: str, batch: int) -> float:
    """The peak memory of a few steps, in MiB; call it once in a process."""
    ready(model, method, 2)()  # what is loaded once is not counted
    step = ready(model, method, batch)
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """Peak resident memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 2**10


def missing(method: str) -> str | None:
    """What a method would need that is not here; None: nothing."""
    if method in PEER and not find_spec("opacus"):
        return "Opacus is not installed"
    if DEVICE.type == "cpu" and method.endswith(("replayed", "launched")):
        return "there is no GPU"
    return None


def elsewhere(model: str, method: str, options: argparse.Namespace) -> float:
    """`peak` in a fresh process."""
    arguments = [
        "--batch", str(options.batch), "--threads", str(options.threads), "--peak", model, method,
    ]  # fmt: skip
    ordinary = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True, env=ordinary
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256, help="records of a step")
    parser.add_argument("--threads", type=int, default=1, help="torch's, on the CPU")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, of which a median is taken")
    parser.add_argument(
        "--models", type=names_among(MODELS, ","), default=list(MODELS), help="with , between them"
    )
    parser.add_argument(
        "--methods",
        type=names_among(STEPS),
        default=list(STEPS),
        help='columns, with ; between them; "plain" is always run',
    )
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is timed by")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.peak:
        print(json.dumps(peak(*options.peak, options.batch)))
        return
    if options.batch < 1:
        parser.error(f"--batch {options.batch}: a step is of one record at least")
    asked = list(dict.fromkeys(["plain", *options.methods]))
    methods = [method for method in asked if missing(method) is None]
    print(
        f"batch {options.batch}, {options.threads} thread(s), {DEVICE.type}, torch {torch.__version__}\n"
    )
    for method in asked:
        if method not in methods:
            print(f"{method}: left out, {missing(method)}")
    header = ["model", "step", "ms", "times plain"]
    header += [] if options.no_memory else ["peak MiB", "times plain"]
    print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for model in options.models:
        steps = {method: ready(model, method, options.batch) for method in methods}
        for step in steps.values():
            step()
        times = rounds(steps, DEVICE, options.repeats, CLOCKS[options.clock], calls=CALLS[DEVICE.type])
        del steps
        memory = {
            method: elsewhere(model, method, options) for method in methods if not options.no_memory
        }
        for method in methods:
            slower = ratio(times[method], times["plain"])
            row = f"| {model} | {method} | {1e3 * statistics.median(times[method]):.2f} | {slower:.2f} |"
            if memory:
                row += f" {memory[method]:.0f} | {memory[method] / memory['plain']:.2f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
