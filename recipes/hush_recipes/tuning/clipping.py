"""What clipping needs to be tuned: digits, a network of two layers, SGD with momentum.

The learning rate of every row is the best of a grid by test accuracy at seed 0, except in rows with
the "same rate" as the tuned norm. The norm of "tuned" is chosen in the same way. These choices are not
charged. Accuracies are of other seeds.
"""

from itertools import product
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.clipping import L2, Normalized, Quantile, Subspaces
from hush.core.guarantee import Budget
from hush.core.parts import Clipping
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.loop import train
from hush.training.options import Randomness
from hush_recipes.figure import Figure

RATE, STEPS, DELTA = 0.25, 100, 1e-5
EPSILONS = (1.0, 3.0)
LEARNING_RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
NORMS = (0.1, 0.3, 1.0, 3.0)


def tuning_clipping(*, seeds: int = 3, steps: int = STEPS) -> Figure:
    """Accuracy of clipping rules with a tuned norm, a bad norm and without a norm to tune."""
    data = tensors(load("digits"))
    rows: list[list[Any]] = []
    for epsilon in EPSILONS:

        def accuracy(clipping: Clipping, rate: float, seed: int, epsilon: float = epsilon) -> float:
            return _accuracy(data, clipping, rate, Budget(epsilon=epsilon, delta=DELTA), steps, seed)

        pairs = list(product(NORMS, LEARNING_RATES))
        best, tuned = max(pairs, key=lambda pair: accuracy(L2(norm=pair[0]), pair[1], 0))
        for name, clipping in _rules(best).items():
            rate = tuned
            if "same rate" not in name:
                rate = max(LEARNING_RATES, key=lambda rate: accuracy(clipping, rate, 0))
            scores = [accuracy(clipping, rate, seed) for seed in range(1, seeds + 1)]
            spread = stdev(scores) if seeds > 1 else 0.0
            norm = clipping.reference_norm
            rows.append([name, epsilon, f"{norm:.3g}", rate, round(mean(scores), 1), round(spread, 1)])
            print("  " + "; ".join(map(str, rows[-1])), flush=True)

    def draw(axes: Any) -> None:
        for epsilon in EPSILONS:
            chosen = [row for row in rows if row[1] == epsilon]
            axes.plot([r[4] for r in chosen], [r[0] for r in chosen], "o", label=f"epsilon {epsilon:g}")
        axes.set(xlabel="test accuracy, %")
        axes.legend()

    return Figure(
        name="tuning-clipping",
        title="Digits, two layers: clipping with a tuned, a bad and no norm",
        header=["clipping", "epsilon", "norm", "learning rate", "accuracy %", "deviation"],
        rows=rows,
        draw=draw,
    )


def _rules(best: float) -> dict[str, Clipping]:
    return {
        "L2, tuned norm": L2(norm=best),
        "L2, a tenth of it": L2(norm=best / 10),
        "L2, a tenth, same rate": L2(norm=best / 10),
        "L2, ten times it": L2(norm=10 * best),
        "L2, ten times, same rate": L2(norm=10 * best),
        "per layer, tuned norm": Subspaces.per_layer(_model(0), best),
        "Normalized": Normalized(),
        "Quantile from 1": Quantile(),
        "Quantile from 10": Quantile(norm=10.0),
        "Quantile from 0.01": Quantile(norm=0.01),
    }


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def _accuracy(
    data: tuple[Tensor, ...], clipping: Clipping, rate: float, budget: Budget, steps: int, seed: int
) -> float:
    x, y, x_test, y_test = data
    plan = Plan(sampling=Poisson(rate=RATE), clipping=clipping, noise=Gaussian(multiplier=1.0))
    plan = calibrate(plan, budget, steps)
    model, loss = _model(seed), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    randomness = Randomness(generator=torch.Generator().manual_seed(seed))
    train(model, loss, optimizer, plan, (x, y), budget=budget, steps=steps, randomness=randomness)
    return 100 * evaluate(model, loss, (x_test, y_test))["accuracy"]
