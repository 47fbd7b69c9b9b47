"""Training with twice sampling and hybrid clipping: cells of Tables 1 and 2 of the twice-sampling paper.

At one epsilon, for each pair of rates: plain DP-SGD at the rate q1 q2 and at q1 (which computes as many
gradients as twice sampling does), twice sampling at (q1, q2), and the latter two with public subspaces
and noise shaped to them: of least total variance, half-way to isotropic, isotropic. All noise is sound
and as little as the accountant allows. Every way has the learning rate that is best for it on held-out
training images. The paper's network is ResNet22 on CIFAR-10 (--model resnet22); the default is a small
one on Fashion-MNIST, to run on a CPU. 2,000 training images are the public set, as ImageNet is not to be
had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

from hush.clipping import Subspaces
from hush.core.guarantee import Budget
from hush.data import flips_and_shifts
from hush.sampling import Twice
from hush.training.loop import train
from hush.training.options import Logging, Randomness
from hush_recipes.figure import Figure
from hush_recipes.selection import select
from hush_recipes.twice.ways import (
    DELTA,
    NAMES,
    STEPS,
    Setting,
    Way,
    inputs_on,
    new_model,
    rows_of,
    setting_of,
    variance_of_mean,
    ways_of,
)
from hush_recipes.workers import workers

HELD_OUT = 5000
# What the paper prints for ResNet22 at these epsilons, by method and rates.
PRINTED = {
    ("plain", 0.02): (59.5, 61.5, 67.3, 73.8),
    ("plain", 0.01): (55.4, 60.0, 64.3, 70.2),
    ("twice", 0.06): (61.1, 65.0, 71.4, 77.5),
    ("twice", 0.03): (59.9, 64.7, 70.8, 76.7),
    ("twice", 0.02): (59.3, 64.4, 70.1, 76.4),
    ("subspaces, twice", 0.06): (68.6, 71.6, 76.1, 80.8),
    ("subspaces, twice", 0.03): (67.6, 70.3, 74.7, 80.2),
    ("subspaces, twice", 0.02): (67.8, 70.2, 74.8, 79.8),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    setting: Setting
    way: Way
    steps: int
    lr: float
    seed: int
    held_out: int
    """Training images that are scored in place of the test images, and not trained on."""


def twice_training(
    *,
    model: str = "mnist-cnn",
    device: str = "cpu",
    epsilons: Sequence[float] = (2.0,),
    seeds: int = 1,
    steps: int | None = None,
    learning_rates: Sequence[float] | None = None,
    only: str = "",
    processes: int = 1,
) -> Figure:
    """Test accuracy and noise of each way at the same epsilon."""
    named = select(dict.fromkeys(NAMES), only)
    setting = replace(setting_of(model), device=device)
    if learning_rates:
        setting = replace(setting, learning_rates=tuple(learning_rates))
    ways = ways_of(setting, epsilons, steps, {"plain", *named})  # the noise of others is relative to it
    start = new_model(setting, seed=0)
    first = {
        way.epsilon: variance_of_mean(way.plan, start) for way in reversed(ways) if way.name == "plain"
    }
    ways = [way for way in ways if way.name in named]
    rows: list[list[Any]] = []
    with workers(processes, device) as over:
        chosen = _learning_rates(setting, ways, over)
        runs = over(
            _accuracy,
            [
                Run(setting=setting, way=way, steps=way.steps, lr=lr, seed=1 + seed, held_out=0)
                for way, lr in zip(ways, chosen, strict=True)
                for seed in range(seeds)
            ],
        )
        for way, lr in zip(ways, chosen, strict=True):
            scores = [100 * next(runs) for _ in range(seeds)]
            sampling = way.plan.sampling
            rate = float(sampling.to_plain()["rate"])
            inner = sampling.coordinate_participation if isinstance(sampling, Twice) else None
            known = model == "resnet22" and way.epsilon in STEPS
            printed = PRINTED.get((way.name, rate)) if known else None
            noise = 100 * variance_of_mean(way.plan, start) / first[way.epsilon]
            spread = stdev(scores) if seeds > 1 else None
            row = [way.epsilon, way.steps, way.name, rate, inner, noise, mean(scores), spread, lr]
            rows.append([*row, printed[list(STEPS).index(way.epsilon)] if printed else None])
            print(f"  {way.name} at {rate:g}, {way.epsilon:g}: {mean(scores):.2f}%", flush=True)

    def draw(axes: Any) -> None:
        for level in epsilons:
            at_level = [row for row in rows if row[0] == level]
            axes.plot(
                [row[5] for row in at_level],
                [row[6] for row in at_level],
                "o",
                label=f"epsilon {level:g}",
            )
            for row in at_level:
                name = f"{row[2]}, {row[3]:g}"
                axes.annotate(name, (row[5], row[6]), textcoords="offset points", xytext=(4, 4))
        axes.set(xscale="log", xlabel="noise variance, % of the first", ylabel="test accuracy, %")
        axes.legend()

    return Figure(
        name="twice-training",
        title=f"{model} on {setting.data}, delta {DELTA:g}",
        header=[
            *("epsilon", "steps", "way", "rate", "coordinate rate", "noise variance %"),
            *("accuracy %", "spread", "learning rate", "printed %"),
        ],
        rows=rows,
        draw=draw,
        notes=[
            f"mean of {seeds} seed(s), {setting.views} view(s) a record; the learning rate is the best "
            f"of {setting.learning_rates} on {HELD_OUT:,} held-out training images (with one view, "
            f"in {setting.searched:.0%} of the steps), which no epsilon here accounts for",
            "noise on the mean, relative to the first row, plain DP-SGD at q1 q2 under tight accounting",
            "the printed ones are with six views, ImageNet as the public set, and their own accounting",
        ],
    )


def _learning_rates(setting: Setting, ways: Sequence[Way], over: Any) -> list[float]:
    """The best learning rate of each way, by held-out training images; a single one is taken."""
    if len(setting.learning_rates) == 1:
        return [setting.learning_rates[0] for _ in ways]
    runs = over(
        _accuracy,
        [
            Run(
                setting=setting,
                way=way,
                steps=max(1, round(way.steps * setting.searched)),
                lr=lr,
                seed=0,
                held_out=HELD_OUT,
            )
            for way in ways
            for lr in setting.learning_rates
        ],
    )
    chosen = []
    for way in ways:
        scores = {lr: next(runs) for lr in setting.learning_rates}
        chosen.append(max(scores, key=lambda lr: scores[lr]))
        found = ", ".join(f"{100 * score:.2f}% at {lr:g}" for lr, score in scores.items())
        print(f"  held out, {way.name}, {way.epsilon:g}: {found}", flush=True)
    return chosen


def _accuracy(run: Run) -> float:
    """Of one training run: SGD with momentum, the rate divided by 10 half-way.

    One that is shorter than its way spends less than the budget, with the same noise.
    """
    setting, way = run.setting, run.way
    private, public, scored = inputs_on(setting)
    views = setting.views
    if run.held_out:
        scored, private = rows_of(private, 0, run.held_out), rows_of(private, run.held_out, None)
        views = 1  # six take six times as long
    model = new_model(setting, run.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr, momentum=0.9, weight_decay=2e-4)
    result = train(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        way.plan,
        private,
        budget=Budget(epsilon=way.epsilon, delta=DELTA),
        steps=run.steps,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [run.steps // 2], gamma=0.1),
        evaluation=scored,
        logging=Logging(every=run.steps),
        randomness=Randomness(generator=torch.Generator(setting.device).manual_seed(run.seed)),
        public=public if isinstance(way.plan.clipping, Subspaces) else None,
        views=flips_and_shifts(views) if views > 1 else None,
    )
    return float(result.metrics[-1]["accuracy"])
