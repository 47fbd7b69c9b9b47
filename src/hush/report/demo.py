"""The demonstration: the bundled digits without privacy and with epsilon 1, 3 and 8."""

from pathlib import Path
from shutil import rmtree

import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.clipping import L2
from hush.core.guarantee import Budget, Guarantee
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.models import build
from hush.noise import Gaussian
from hush.report.page import write_page
from hush.report.plots import plot_accuracy
from hush.report.table import Table
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.loop import train

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 8.0)
RATE = 0.25
STEPS = 200
LEARNING_RATE = 2.0
CLIP = 1.0
SEED = 0

NOTES = (
    "docs/guarantees/ says what epsilon promises here and why it holds.",
    "hush train --help: your own run; add --data mnist --data-dir DIR for real data.",
    "hush account and hush calibrate: what a plan costs, and the noise a budget asks for.",
    "The seed is fixed so that this page comes out the same again; a private run has no known seed.",
)


def demo(out: Path) -> None:
    """Run everything, print the table, and leave table, plot and page in `out`."""
    dataset = load("digits")
    x_train, y_train, x_test, y_test = tensors(dataset)
    loss = nn.CrossEntropyLoss()

    print("training without privacy ...")
    model = fresh_model(dataset.classes, x_train)
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
        model = fresh_model(dataset.classes, x_train)
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
            generator=torch.Generator().manual_seed(SEED),
        )
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
    (out / "table.md").write_text(table.markdown() + "\n")
    plot_accuracy(out / "plot.png", curves, ceiling=("no privacy", baseline), title=title)
    write_page(
        out / "report.html",
        title=title,
        lead="A linear classifier on scikit-learn's digits, trained with and without privacy.",
        table=table,
        plot=out / "plot.png",
        settings=_settings(len(x_train), run.guarantee),
        notes=NOTES,
    )
    print(f"\n{table.markdown()}\n\nreport: {out / 'report.html'}\n\nwhere to look next:")
    for note in NOTES:
        print(f"  {note}")


def _settings(records: int, promised: Guarantee) -> Table:
    """What the private runs have in common: what it takes to run them again, and to read epsilon."""
    rows = {
        "steps": f"{STEPS}",
        "sampling": f"Poisson, rate {RATE:g}: {RATE * records:g} of {records} records expected a step",
        "clipping": f"Euclidean norm {CLIP:g} of each record's gradient",
        "learning rate": f"{LEARNING_RATE:g} (SGD)",
        "neighbours": f"{promised.neighbours}, {promised.unit}",
        "delta": f"{promised.delta:g}",
        "randomness": promised.randomness,
    }
    return Table(header=["setting", "value"], rows=[[name, value] for name, value in rows.items()])


def fresh_model(classes: int, inputs: torch.Tensor) -> nn.Module:
    """The same starting point for every run."""
    torch.manual_seed(SEED)
    return build("logistic", classes=classes, shape=inputs.shape[1:])
