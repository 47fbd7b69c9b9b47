"""The demonstration: the bundled digits without privacy and with epsilon 1, 3 and 8, with reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree

import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.models import build
from hush.noise import Gaussian
from hush.report.facts import run_facts
from hush.report.page import write_report
from hush.report.text import Table
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.loop import train
from hush.training.options import Randomness

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 8.0)
RATE = 0.25
STEPS = 200
LEARNING_RATE = 2.0
CLIP = 1.0
SEED = 0

NOTES = (
    "docs/guarantees/ says what epsilon promises here and why it holds.",
    "hush train --help: your own run; --data mnist for real data (pip install ./recipes).",
    "hush account and hush calibrate: what a plan costs, and the noise a budget asks for.",
    "hush report RUN_DIR: such a report of any run.",
    "The seed is fixed so that the reports come out the same again; a private run has no known seed.",
)


def demo(out: Path) -> None:
    """Train all runs, print the table, and write table, plot and a report of each run to `out`."""
    out.mkdir(parents=True, exist_ok=True)  # before any work
    dataset = load("digits")
    x_train, y_train, x_test, y_test = tensors(dataset)
    loss = nn.CrossEntropyLoss()

    print("training without privacy ...")
    model = initial_model(dataset.classes, x_train)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(x_train), y_train).backward()
        optimizer.step()
    baseline = evaluate(model, loss, (x_test, y_test))["accuracy"]
    rows = [["none", "infinite", "-", f"{baseline:.1%}"]]

    curves = {}
    for epsilon in EPSILONS:
        print(f"training with epsilon {epsilon:g} ...")
        budget = Budget(epsilon=epsilon, delta=DELTA)
        plan = Plan(sampling=Poisson(rate=RATE), clipping=L2(norm=CLIP), noise=Gaussian(multiplier=1.0))
        plan = calibrate(plan, budget, steps=STEPS)
        model = initial_model(dataset.classes, x_train)
        folder = out / f"epsilon-{epsilon:g}"
        rmtree(folder, ignore_errors=True)
        run = train(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
            plan,
            (x_train, y_train),
            budget=budget,
            steps=STEPS,
            evaluation=(x_test, y_test),
            directory=folder,
            settings={"data": "digits", "model": "logistic", "learning_rate": LEARNING_RATE},
            randomness=Randomness(generator=torch.Generator().manual_seed(SEED)),
        )
        write_report(folder / "report.html", run_facts(folder, baseline=baseline))
        curves[f"epsilon {epsilon:g}"] = [(m["epsilon"], m["accuracy"]) for m in run.metrics]
        rows.append(
            [
                "DP-SGD",
                f"{run.guarantee.epsilon.upper:.3f}",
                f"{plan.noise.to_plain()['multiplier']:.3f}",
                f"{run.metrics[-1]['accuracy']:.1%}",
            ]
        )

    table = Table(header=["mechanism", "epsilon", "noise multiplier", "test accuracy"], rows=rows)
    title = f"{len(x_train)} handwritten digits, delta {DELTA:g}"
    meaning = f"epsilon at delta {DELTA:g}, {run.guarantee.neighbours} {run.guarantee.unit}"
    (out / "table.md").write_text(f"{table.markdown()}\n\n{meaning}\n")
    plot_accuracy(
        out / "plot.png", curves, baseline=("no privacy", baseline), title=title, spent=meaning
    )
    print(f"\n{table.markdown()}\n\n{meaning}\nin {out / 'table.md'}, drawn in {out / 'plot.png'}")
    print("\nreports, to open in a browser:")
    for epsilon in EPSILONS:
        print(f"  {out / f'epsilon-{epsilon:g}' / 'report.html'}")
    print("\nwhere to look next:")
    for note in NOTES:
        print(f"  {note}")


def initial_model(classes: int, inputs: torch.Tensor) -> nn.Module:
    """The classifier, with the same initial weights for every run."""
    torch.manual_seed(SEED)
    return build("logistic", classes=classes, shape=inputs.shape[1:])


def plot_accuracy(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    baseline: tuple[str, float],
    title: str,
    spent: str,
) -> None:
    """Plot accuracy against the epsilon spent so far, one curve a run, under a non-private baseline."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    label, level = baseline
    axes.axhline(level, color="0.4", linestyle="--", linewidth=1, label=label)
    for name, points in curves.items():
        epsilons, accuracy = zip(*points, strict=True)
        (line,) = axes.plot(epsilons, accuracy, linewidth=1.5, label=name)
        axes.plot(epsilons[-1], accuracy[-1], "o", color=line.get_color())
    axes.set(xscale="log", xlabel=f"{spent}, spent so far", ylabel="test accuracy", title=title)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
