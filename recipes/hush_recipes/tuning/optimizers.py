"""Which optimizer pays: SGD, Adam, AdamW, AdamBC and scale-then-privatize at one epsilon.

A network of two layers on the digits and on Adult, and a linear model on the presence of 1,000 words in
film reviews. The learning rate of every row, and the floor of AdamBC, is the best of a grid by test
accuracy at seed 0; these choices are not charged. Accuracies are of other seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.options import Randomness
from hush.training.step import PrivateStep
from hush_recipes.figure import Figure
from hush_recipes.tuning.scaled import AdamBC, ScaledStep

DELTA, CLIP, WORDS = 1e-5, 0.3, 1000
OF_SGD, OF_ADAM = (0.3, 1.0, 3.0, 10.0, 30.0), (0.003, 0.01, 0.03, 0.1, 0.3)
FLOORS = (1e-8, 1e-6, 1e-4)


@dataclass(frozen=True, eq=False)
class Task:
    """Data, a model by its seed, and the sampling of a run."""

    data: tuple[Tensor, ...]
    model: Callable[[], nn.Module]
    rate: float
    steps: int


def tuning_optimizers(
    *, seeds: int = 5, epsilon: float = 1.0, steps: int | None = None, only: str = ""
) -> Figure:
    """Accuracy of private optimizers: SGD, Adam, AdamW, AdamBC, scale-then-privatize."""
    rows: list[list[Any]] = []
    for name in [only] if only else ["digits", "adult", "imdb"]:
        task = _task(name)
        for method in ("SGD", "Adam", "AdamW", "AdamBC", "scale-then-privatize"):
            rates = OF_SGD if method == "SGD" else OF_ADAM
            floors = FLOORS if method == "AdamBC" else FLOORS[:1]
            run = partial(_accuracy, task, method, Budget(epsilon=epsilon, delta=DELTA), steps)
            pairs = [(rate, floor) for rate in rates for floor in floors]
            rate, floor = max(pairs, key=lambda pair: run(pair[0], pair[1], 0))
            scores = [run(rate, floor, seed) for seed in range(1, seeds + 1)]
            spread = stdev(scores) if seeds > 1 else 0.0
            rows.append([name, method, rate, round(mean(scores), 2), round(spread, 2)])
            print("  " + "; ".join(map(str, rows[-1])), flush=True)

    def draw(axes: Any) -> None:
        for name in dict.fromkeys(row[0] for row in rows):
            chosen = [row for row in rows if row[0] == name]
            axes.plot([r[3] for r in chosen], [r[1] for r in chosen], "o", label=name)
        axes.set(xlabel="test accuracy, %")
        axes.legend()

    return Figure(
        name="tuning-optimizers",
        title=f"Private optimizers at epsilon {epsilon:g}",
        header=["data", "optimizer", "learning rate", "accuracy %", "deviation"],
        rows=rows,
        draw=draw,
    )


def _task(name: str) -> Task:
    x, y, x_test, y_test = tensors(load(name))
    if name == "imdb":
        x, x_test = _words(x), _words(x_test)
        return Task((x, y, x_test, y_test), lambda: nn.Linear(WORDS, 2), 0.04, 100)
    size, classes = x[0].numel(), int(y.max()) + 1

    def network() -> nn.Module:
        hidden = nn.Sequential(nn.Linear(size, 32), nn.Tanh())
        return nn.Sequential(nn.Flatten(), hidden, nn.Linear(32, classes))

    rate, steps = (0.25, 100) if name == "digits" else (0.03, 150)
    return Task((x, y, x_test, y_test), network, rate, steps)


def _words(texts: Tensor) -> Tensor:
    """Presence of the most frequent words, a public list, scaled to length 1."""
    present = torch.zeros(len(texts), WORDS + 1)
    present.scatter_(1, texts.long().where(texts <= WORDS, 0), 1.0)
    return nn.functional.normalize(present[:, 1:])


def _accuracy(
    task: Task, method: str, budget: Budget, steps: int | None, lr: float, floor: float, seed: int
) -> float:
    x, y, x_test, y_test = task.data
    steps = steps or task.steps
    plan = Plan(sampling=Poisson(rate=task.rate), clipping=L2(norm=CLIP), noise=Gaussian(multiplier=1.0))
    plan = calibrate(plan, budget, steps)
    torch.manual_seed(seed)
    model, loss = task.model(), nn.CrossEntropyLoss()
    noise: Any = plan.noise
    deviation = noise.multiplier * CLIP / (task.rate * len(x))
    make: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": partial(torch.optim.SGD, momentum=0.9),
        "Adam": torch.optim.Adam,
        "AdamW": torch.optim.AdamW,
        "AdamBC": partial(AdamBC, deviation=deviation, floor=floor),
        "scale-then-privatize": torch.optim.Adam,
    }
    optimizer = make[method](model.parameters(), lr=lr)
    kind = ScaledStep if method == "scale-then-privatize" else PrivateStep
    randomness = Randomness(generator=torch.Generator().manual_seed(seed))
    step = kind(model, loss, optimizer, plan, records=len(x), randomness=randomness)
    for batch in step.batches((x, y), steps=steps):
        step(batch)
    return 100 * evaluate(model, loss, (x_test, y_test))["accuracy"]
