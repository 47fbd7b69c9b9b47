"""Figure 9 of the DPSUR paper: accuracy by learning rate and settings of the test, epsilon 3.

On a GPU: CIFAR-10 on scattering features. The learning rate of the other studies is 8; `--learning-rates
4` is the paper's. On a CPU: a linear layer on features of Fashion-MNIST, two values per study, 3 epochs,
and the least noise that the budget allows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hush_recipes.dpsur.methods import METHODS
from hush_recipes.dpsur.runs import Method, four, outcomes
from hush_recipes.figure import Figure
from hush_recipes.selection import one_rate, select
from hush_recipes.workers import workers

_LEVEL = 3.0
_SHORT = 3
_RATE, _RATE_SHORT = 8.0, 16.0
# What is varied, over which values, and what the text says of some of them.
STUDIES: dict[str, tuple[Sequence[float], dict[float, float]]] = {
    "learning rate": ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0), {4.0: 70.83, 7.0: 70.02}),
    "test noise": ((0.8, 0.9, 1.0, 1.1, 1.2, 1.3), {1.1: 70.83}),
    "test clip": ((1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0), {1e-3: 70.83}),
    "threshold": ((-3.0, -2.0, -1.0, 0.0, 1.0), {-1.0: 70.83}),
    "test batch": (
        (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0),
        {32.0: 69.10, 256.0: 70.83, 1024.0: 68.36},
    ),
}
_QUICK = {
    "learning rate": (8.0, 16.0),
    "test noise": (0.8, 1.3),
    "test clip": (1e-3, 1.0),
    "threshold": (-1.0, 0.0),
    "test batch": (64.0, 256.0),
}


def dpsur_fig9(
    *,
    device: str = "cpu",
    seeds: int = 1,
    epochs: int | None = None,
    learning_rates: Sequence[float] | None = None,
    only: str = "",
    processes: int = 1,
) -> Figure:
    """Test accuracy by each of five settings. CPU: Fashion-MNIST, linear, two values each, 3 epochs."""
    short = device == "cpu"
    data = "fashion-mnist" if short else "cifar10"
    length = epochs or (_SHORT if short else None)
    rate = one_rate(learning_rates, _RATE_SHORT if short else _RATE)
    studies = select(STUDIES, only)
    cells = [
        (study, value, printed.get(value))
        for study, (values, printed) in studies.items()
        for value in (_QUICK[study] if short else values)
    ]
    methods = [varied(start(data, short, rate), study, value) for study, value, _ in cells]
    rows: list[list[Any]] = []
    with workers(processes, device) as over:
        runs = over(outcomes, [(method, data, _LEVEL, seeds, device, length) for method in methods])
        for (study, value, printed), outcomes_of_cell in zip(cells, runs, strict=True):
            accepted, trials = (
                sum(getattr(outcome, name) or 0 for outcome in outcomes_of_cell)
                for name in ("accepted", "trials")
            )
            accuracy = 100 * sum(outcome.accuracy for outcome in outcomes_of_cell) / seeds
            printed_value = None if short else printed
            rows.append([study, value, accuracy, printed_value, trials // seeds, accepted / trials])
            print(f"  {study} {value:g}: {accuracy:.2f}%", flush=True)

    def draw(axes_or_panels: Any) -> None:
        panels = [axes_or_panels] if len(studies) == 1 else axes_or_panels
        for axes, study in zip(panels, studies, strict=True):
            curve = [row for row in rows if row[0] == study]
            axes.plot([row[1] for row in curve], [row[2] for row in curve], "o-", ms=3, label="ours")
            printed_points = [row for row in curve if row[3] is not None]
            axes.plot(
                [row[1] for row in printed_points],
                [row[3] for row in printed_points],
                "x",
                label="printed",
            )
            logarithmic = study in ("test clip", "test batch")
            axes.set(xlabel=study, ylabel="test accuracy, %", xscale="log" if logarithmic else "linear")
        panels[0].legend(fontsize=8)

    return Figure(
        name="dpsur-fig9",
        title=f"{data}: settings of selective release, sound epsilon {_LEVEL:g}",
        header=["varied", "value", "accuracy %", "printed %", "trials", "accepted"],
        rows=rows,
        draw=draw,
        panels=len(studies),
        notes=[
            f"learning rate {rate:g} unless it is varied; mean of {seeds} seed(s)",
            "every trial is charged, so a setting that accepts fewer trials has more trials only if a "
            "trial costs less; the printed accuracies are under the paper's accounting",
        ],
    )


def start(data: str, short: bool, rate: float) -> Method:
    """The method whose settings are varied one at a time: the mean test, every trial charged."""
    by_name = {method.name: method for method in METHODS[data]}
    paper = replace(by_name["DPSUR"], rates=four(rate), test_batch=128)
    if not short:
        return paper
    return replace(paper, model="scattering-linear", batch=8192, noise=None)


def varied(method: Method, study: str, value: float) -> Method:
    """The method with one setting changed."""
    match study:
        case "learning rate":
            return replace(method, rates=four(value))
        case "test noise":
            return replace(method, test_noise=four(value))
        case "test clip":
            return replace(method, test_clip=value)
        case "threshold":
            return replace(method, threshold=value)
    return replace(method, test_batch=round(value))
