"""What Assumption K2 of docs/guarantees/tape.md hides: a model whose gradient hangs on a record's place.

    python -m benchmarks.places

A first layer whose activation for one record is zero up to rounding, so that a ReLU opens or not by the
record's place in the batch. Prints delta of one step by integration, beside what is charged.
"""

import dataclasses
import itertools
import math

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn

import hush
from hush.accounting.epsilon import delta

WIDTH, RATE, MULTIPLIER, TRIES = 100, 0.5, 1.0, 30_000


def network() -> nn.Sequential:
    """Two layers, of which the first unit decides; only the first layer's weights are trained."""
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, 4), nn.Linear(4, 2)
    with torch.no_grad():
        first.bias.zero_()
        second.bias.zero_()
        first.weight[1:].zero_()
        first.weight[1:, 0] = -1.0
    model = nn.Sequential(first, nn.ReLU(), second).requires_grad_(False)
    first.weight.requires_grad_(True)
    return model


def record_on_the_kink(model: nn.Sequential) -> Tensor | None:
    """A record whose activation is positive in a batch of its own and not behind another one."""
    first, seed = model[0], torch.Generator().manual_seed(1)
    weight = first.weight[0].detach().double()
    largest = int(weight.abs().argmax())
    for _ in range(TRIES):
        x = torch.randn(WIDTH, generator=seed)
        x[0] = x[0].abs() + 0.5
        x[largest] = 0.0
        x[largest] = float(-(x.double() @ weight) / weight[largest])
        alone, behind = first(x[None]), first(torch.stack([1.7 * x, x]))
        if alone[0, 0] > 0 >= behind[1, 0]:
            return 16 * x
    return None


def main() -> None:
    """Print delta of one step on neighbours, and what is charged."""
    model = network()
    x = record_on_the_kink(model)
    if x is None:
        print(f"no such record in {TRIES} tries: kernels here do not round by place at this size")
        return
    weight = model[0].weight[0].detach()
    data = torch.stack([x + 0.5 * weight / weight.norm(), x]), torch.tensor([1, 0])
    plan = hush.Plan(
        sampling=hush.Poisson(rate=RATE),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=MULTIPLIER),
    )
    grid = np.linspace(-15, 15, 60_001)
    densities = []
    for present in (None, torch.tensor([False, True])):
        optimizer = torch.optim.SGD([model[0].weight], lr=1.0)
        step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=2)
        batch = next(step.batches(data, present=present))
        density = np.zeros_like(grid)
        for coins in itertools.product([0, 1], repeat=2):
            drawn = dataclasses.replace(batch, indices=torch.tensor(coins).nonzero().flatten())
            total = step.clipped_sum(drawn).view(4, WIDTH)[0]
            place = float(total @ (x / x.norm()).double())
            density += norm.pdf(grid, place, MULTIPLIER) / 4
        densities.append(density)
    for epsilon in (0.25, 0.5, 1.0, 2.0):
        pairs = itertools.permutations(densities)
        width = grid[1] - grid[0]
        true = max(np.maximum(p - math.exp(epsilon) * q, 0).sum() * width for p, q in pairs)
        charged = delta({plan: 1}, epsilon).upper
        print(f"epsilon {epsilon:g}: delta {true:.6f}, charged {charged:.6f}")


if __name__ == "__main__":
    main()
