"""Accuracy with correlated and with independent noise: a linear layer on Fashion-MNIST.

Run: HUSH_DATA=folder .venv/bin/python -m benchmarks.correlated [--epochs 1] [--seeds 3]
     .venv/bin/python -m benchmarks.correlated --noise
     .venv/bin/python -m benchmarks.correlated --time

Both methods have the same batches, steps and budget. Learning rate and momentum are the best of one
grid by the test accuracy of seed 0, which is not charged; the other seeds are reported. The number of
bands is the one with the least noise in the weights, which is known without records. `--noise` prints
this noise alone, relative to independent noise; `--time` prints time and memory of the noise.
"""

import argparse
import time
from itertools import product
from statistics import mean, stdev

import torch
from torch import Tensor, nn

import hush
from hush.core.randomness import source_for
from hush.data import load, tensors
from hush.report.text import Table
from hush.training.noisy_mean import Layout, NoisyMean, PastNoise

RECORDS, BATCH, DELTA, CLIP = 60_000, 500, 1e-5, 1.0
EPSILONS = (1.0, 3.0, 8.0)
LEARNING_RATES, MOMENTA = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0), (0.0, 0.9)
BANDS = (2, 4, 8, 16, 32, 64)


def noise_table() -> Table:
    """Noise in the weights relative to DP-SGD, and the best number of bands."""
    rows = []
    for batch, epochs in product((500, 2000), (1, 5, 20)):
        rate, steps, row = batch / RECORDS, epochs * RECORDS // batch, [str(batch), str(epochs)]
        for epsilon in EPSILONS:
            plain, best = (
                calibrated(name, rate, steps, epsilon, 0.0) for name in ("independent", "correlated")
            )
            ratio = error_of(best, steps) / error_of(plain, steps)
            row.append(f"{ratio:.2f} ({len(best.noise.correlation)})")
        rows.append(row)
    header = ["batch", "epochs", *(f"epsilon {epsilon:g} (bands)" for epsilon in EPSILONS)]
    return Table(header=header, rows=rows)


def time_table() -> Table:
    """Time of the noise of a step relative to independent noise, and memory, by number of bands."""
    sizes, rounds, times = 11_700_000, 5, dict[int, list[float]]()
    total, source = torch.zeros(sizes, dtype=torch.float64), source_for(torch.device("cpu"))
    ball = hush.L2(CLIP).sensitivity(sizes)
    kept = {bands: PastNoise([2.0**-lag for lag in range(bands)]) for bands in (1, 2, 8, 32)}
    for step, (bands, past) in product(range(rounds), kept.items()):
        plan = hush.plans.dpsgd(multiplier=1.0)
        layout = Layout({}, ball, [sizes], 0.0, [(plan.noise, CLIP)])
        began = time.perf_counter()
        NoisyMean(plan, layout, None, 1.0, source, past if bands > 1 else None, step)(total.zero_())
        times.setdefault(bands, []).append(time.perf_counter() - began)
    plain = min(times[1])
    rows = [
        [str(bands), f"{min(taken) / plain:.2f}", f"{bands * sizes * 8 / 2**20 * (bands > 1):.0f} MiB"]
        for bands, taken in times.items()
    ]
    return Table(header=["bands", "time of the noise", "memory"], rows=rows)


def error_of(plan: hush.Plan, steps: int) -> float:
    """Noise in the weights of a run, up to a factor."""
    return float(plan.noise.to_plain()["multiplier"] * plan.noise.relative_error(steps))


def calibrated(name: str, rate: float, steps: int, epsilon: float, momentum: float) -> hush.Plan:
    """The plan of a method within the budget."""
    budget = hush.Budget(epsilon=epsilon, delta=DELTA)
    if name == "independent":
        plan = hush.plans.dpsgd(rate=rate, clip_norm=CLIP)
        return hush.calibrate(plan, budget, steps)
    found = {}
    for bands in BANDS:
        if bands * rate <= 1 and bands <= steps:
            start = hush.plans.banded(rate=rate, bands=bands, steps=steps, momentum=momentum)
            plan = hush.calibrate(start, budget, steps)
            assert isinstance(plan.noise, hush.Banded)
            found[plan.noise.multiplier * plan.noise.relative_error(steps, momentum)] = plan
    return found[min(found)]


def accuracy(
    plan: hush.Plan, data: list[Tensor], steps: int, rate: float, momentum: float, seed: int
) -> float:
    """Test accuracy in percent after a run; the learning rate is that of an update without momentum."""
    x, y, test_x, test_y = data
    torch.manual_seed(seed)
    model = nn.Linear(x.shape[1], 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * (1 - momentum), momentum=momentum)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=len(x))
    for batch in step.batches((x, y), steps=steps):
        step(batch)
    return 100 * float((model(test_x).argmax(1) == test_y).float().mean())


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    arguments.add_argument("--epsilon", type=float, nargs="+", default=EPSILONS)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--noise", action="store_true", help="print the noise alone")
    arguments.add_argument("--time", action="store_true", help="print time and memory alone")
    asked = arguments.parse_args()
    if asked.noise or asked.time:
        print((noise_table() if asked.noise else time_table()).markdown())
        return
    x, y, test_x, test_y = tensors(load("fashion-mnist"))
    centre, spread = 0.286, 0.353  # published statistics of the pixels
    data = [(x.flatten(1) - centre) / spread, y, (test_x.flatten(1) - centre) / spread, test_y]
    # inputs of norm about 1: gradients are seldom clipped to less
    data[0], data[2] = data[0] / 28, data[2] / 28
    rate, rows = BATCH / len(x), []
    for epochs, epsilon, name in product(asked.epochs, asked.epsilon, ("independent", "correlated")):
        steps = epochs * len(x) // BATCH
        plans = {momentum: calibrated(name, rate, steps, epsilon, momentum) for momentum in MOMENTA}
        grid = {
            choice: accuracy(plans[choice[1]], data, steps, *choice, seed=0)
            for choice in product(LEARNING_RATES, MOMENTA)
        }
        best = max(grid, key=lambda choice: grid[choice])
        plan = plans[best[1]]
        scores = [accuracy(plan, data, steps, *best, seed=seed) for seed in range(1, asked.seeds + 1)]
        noise = plan.noise.to_plain()["multiplier"]
        row = [str(epochs), f"{epsilon:g}", name, str(len(plan.noise.correlation)), f"{noise:.3g}"]
        spread = stdev(scores) if len(scores) > 1 else 0.0
        rows.append([*row, f"{best[0]:g}", f"{best[1]:g}", f"{mean(scores):.2f} ± {spread:.2f}"])
        print("; ".join(rows[-1]), flush=True)
    header = ["epochs", "epsilon", "noise", "bands", "multiplier", "learning rate", "momentum"]
    print(Table(header=[*header, "test accuracy, %"], rows=rows).markdown())


if __name__ == "__main__":
    main()
