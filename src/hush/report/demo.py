"""The demonstration: the bundled digits without privacy and with epsilon 1, 3 and 8, with reports."""

from pathlib import Path
from shutil import rmtree

import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.clipping import L2
from hush.core.atomic_files import check_folder
from hush.core.guarantee import Budget, at_most
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.models import build
from hush.noise import Gaussian
from hush.report.facts import run_facts
from hush.report.page import Chart, write_report
from hush.report.text import Table
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.loop import train
from hush.training.options import Checkpoints, Randomness

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 8.0)
RATE = 0.25
STEPS = 200
LEARNING_RATE = 2.0
CLIP = 1.0
SEED = 0

NOTES = (
    "docs/guarantees/: the statement and proof of every guarantee.",
    "hush train --help: your own run; --data mnist for real data (pip install ./recipes).",
    "hush account and hush calibrate: the cost of a plan, and the noise for a budget.",
    "hush report RUN_DIR: such a report of any run.",
    "The fixed seed makes the reports reproducible. A private run has no known seed.",
)


def demo(out: Path) -> None:
    """Train all runs, print the table, and write table, plot and a report of each run to `out`."""
    check_folder("--out", out)
    dataset = load("digits")
    x_train, y_train, x_test, y_test = tensors(dataset)
    loss = nn.CrossEntropyLoss()

    print("training without privacy ...")
    model = _initial_model(dataset.classes, x_train)
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
        model = _initial_model(dataset.classes, x_train)
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
            checkpoints=Checkpoints(
                directory=folder,
                settings={"data": "digits", "model": "logistic", "learning_rate": LEARNING_RATE},
            ),
            randomness=Randomness(generator=torch.Generator().manual_seed(SEED)),
        )
        write_report(folder / "report.html", run_facts(folder, baseline=baseline))
        curves[f"epsilon {epsilon:g}"] = [(m["epsilon"], m["accuracy"]) for m in run.metrics]
        rows.append(
            [
                "DP-SGD",
                at_most(run.guarantee.epsilon.upper),
                f"{plan.noise.to_plain()['multiplier']:.3f}",
                f"{run.metrics[-1]['accuracy']:.1%}",
            ]
        )

    table = Table(header=["mechanism", "epsilon", "noise multiplier", "test accuracy"], rows=rows)
    meaning = f"epsilon at delta {DELTA:g}, {run.guarantee.neighbours} {run.guarantee.unit}"
    (out / "table.md").write_text(f"{table.markdown()}\n\n{meaning}\n")
    longest = max(spent for points in curves.values() for spent, _ in points)
    styles = zip(curves.items(), ("bound", "gaussian", "holds"), strict=False)
    chart = Chart(
        title="Accuracy",
        axes=(f"{meaning}, spent so far", "test accuracy"),
        curves=[
            ("no privacy", "ideal", [(0.1, baseline), (longest, baseline)]),
            *((name, style, points) for (name, points), style in styles),
        ],
        log=True,
        percent="y",
    )
    chart.draw().savefig(out / "plot.png", dpi=150)
    print(f"\n{table.markdown()}\n\n{meaning}\nin {out / 'table.md'}, drawn in {out / 'plot.png'}")
    print("\nreports, to open in a browser:")
    for epsilon in EPSILONS:
        print(f"  {out / f'epsilon-{epsilon:g}' / 'report.html'}")
    print("\nwhere to look next:")
    for note in NOTES:
        print(f"  {note}")


def _initial_model(classes: int, inputs: torch.Tensor) -> nn.Module:
    """The classifier, with the same initial weights for every run."""
    torch.manual_seed(SEED)
    return build("logistic", classes=classes, shape=inputs.shape[1:])
