"""The demonstration: the methods of four papers on the bundled digits, at one epsilon."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush import plans
from hush.accounting.calibrate import calibrate, fit_noise
from hush.clipping import Subspaces
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.data import load, tensors
from hush.models import build
from hush.noise import BlockGaussian, Gaussian, GeneralizedGaussian, Truncated
from hush.pate.argmax import NoisyMax, with_noise
from hush.pate.run import pate
from hush.pate.teachers import Lesson
from hush.report.facts import run_facts
from hush.report.page import write_report
from hush.report.text import Table
from hush.training.evaluate import evaluate
from hush.training.loop import Run, train
from hush.training.methods.public_bases import public_thresholds
from hush.training.options import Checkpoints, Logging, Randomness
from hush.training.per_instance import PerInstance
from hush.training.progress import Progress

Pair = tuple[Tensor, Tensor]
BUDGET = Budget(epsilon=3.0, delta=1e-5)
SEEDS = 3
_RATE = 0.25
_LEARNING_RATE = 2.0
_TESTED = 64
"""Expected records of a test of DPSUR."""
_BOUND = 1.5
"""Half-width of the support of truncated noise, in deviations."""
_LARGER_RATE = 3.6
"""Learning rate for truncated noise, which multiplies the mean of an update by 0.55."""
_PUBLIC = 100
"""Training records without protection, for the subspaces."""
_QUERIES, _TEACHERS, _WATCHED = 40, 50, 50
_BETA = 1.75
"""Exponent of the noise on votes: for 40 answers, 1.75 and 2 have the least noise."""
_LESSON = Lesson(rate=0.05)
_PATE = "PATE, GGNMax"
_COMMON = f"--steps 200 --lr {_LEARNING_RATE:g}"
SOURCES = {
    "DP-SGD": (
        "Deep Learning with Differential Privacy, 2016",
        f"hush train --plan dpsgd --rate {_RATE} --clip 1 {_COMMON}",
        "docs/first-steps.md",
    ),
    "DPSUR, summed test": (
        "DPSUR, 2024",
        f"hush train --plan dpsur --rate {_RATE} --clip 1 --test summed --test-batch {_TESTED} "
        f"--test-clip 0.01 --test-noise 8 --test-threshold 0 --steps 150 --lr {_LEARNING_RATE:g}",
        "docs/mechanisms/dpsur.md",
    ),
    "twice sampling, subspaces": (
        "Geometry of Sensitivity, 2023",
        f"hush train --plan subspaces --public-records {_PUBLIC} --rate 0.5 {_COMMON}",
        "docs/mechanisms/twice-sampling.md",
    ),
    "beta-DP-SGD": (
        "Beyond Laplace and Gaussian, 2025",
        f"hush train --plan beta --beta 1.5 --rate {_RATE} --clip 1 {_COMMON}",
        "docs/mechanisms/generalized-gaussian.md",
    ),
    "bounded support (truncated)": (
        "Privacy Amplification via Bounded Support, 2024",
        f"hush train --plan truncated --bound {_BOUND} --steps 60 --lr {_LARGER_RATE}",
        "docs/mechanisms/bounded-support.md",
    ),
    _PATE: (
        "Beyond Laplace and Gaussian, 2025",
        f"hush pate --beta {_BETA:g} --teachers {_TEACHERS} --queries {_QUERIES} "
        f"--epsilon {BUDGET.epsilon:g}",
        "docs/pate.md",
    ),
}
"""Paper, command and page of each method."""


@dataclass(kw_only=True)
class Row:
    accuracies: list[float] = field(default_factory=list)
    epsilon: float = 0.0
    rates: Sequence[float] = (1.0,)
    norms: Sequence[float] = ()
    steps: str = "-"
    noise: Sequence[float] = ()
    unit: str = ""
    own: str = ""


def methods(public: Pair, records: int, steps: int = 200) -> list[tuple[Plan, int]]:
    """Calibrated plans of the methods, and their numbers of steps: `steps` of DP-SGD.

    They are those of the commands in `SOURCES`.
    """
    few, trials = max(1, steps * 3 // 10), max(1, steps * 3 // 4)
    dpsgd = plans.dpsgd(rate=_RATE, clip_norm=1.0)
    tests: dict[str, Any] = {"test_rate": _TESTED / records, "test_clip": 0.01, "test_multiplier": 8.0}
    dpsur = plans.dpsur(rate=_RATE, clip_norm=1.0, threshold=0.0, test="summed", **tests)
    model = _initial_model(0)
    size = sum(parameter.numel() for parameter in model.parameters())
    twice = plans.subspaces(parameters=size, public=_PUBLIC, rate=0.5)
    clipping = twice.clipping
    assert isinstance(clipping, Subspaces)
    assert clipping.bases is not None
    fitted = public_thresholds(
        model, nn.CrossEntropyLoss(), public, ranks=clipping.ranks, norm=1.0, bases=clipping.bases
    )
    beta = plans.beta(beta=1.5, rate=_RATE, clip_norm=1.0)
    return [
        (calibrate(dpsgd, BUDGET, steps=steps), steps),
        (calibrate(dpsur, BUDGET, steps=trials), trials),
        (fit_noise(replace(twice, clipping=fitted), BUDGET, steps=steps), steps),
        (calibrate(beta, BUDGET, steps=steps), steps),
        (calibrate(plans.truncated(bound=_BOUND), BUDGET, steps=few), few),
    ]


def demo(out: Path, *, steps: int = 200, seeds: int = SEEDS) -> None:
    """Train every method, and write a table, a figure and the report of a run.

    Args:
        out: Folder of the results.
        steps: Number of steps of plain DP-SGD; other methods are shortened in proportion.
        seeds: Number of runs of each method.
    """
    out.mkdir(parents=True, exist_ok=True)  # before any work
    x, y, x_test, y_test = tensors(load("digits"))
    test = x_test[_QUERIES:], y_test[_QUERIES:]  # the others are the public inputs of PATE
    chosen = dict(zip(SOURCES, methods((x[:_PUBLIC], y[:_PUBLIC]), len(x), steps), strict=False))
    rows = {name: Row() for name in ("no privacy", *SOURCES)}
    rows["no privacy"].steps = str(steps)
    for name, (plan, count) in chosen.items():
        rows[name].rates, rows[name].norms, rows[name].steps = *_settings(plan), str(count)
    with Progress("training", len(rows) * seeds, unit="runs") as progress:
        for seed in range(seeds):
            rows["no privacy"].accuracies.append(_plain(x, y, test, seed, steps))
            progress.advance()
            for name, (plan, count) in chosen.items():
                folder = out / "dp-sgd" if name == "DP-SGD" and not seed else None
                run = _private(plan, count, (x, y), test, seed, folder)
                row = rows[name]
                row.accuracies.append(run.metrics[-1]["accuracy"])
                row.epsilon, row.noise = run.guarantee.epsilon.upper, _multipliers(plan)
                row.own = row.own or _own_number(plan, run)
                progress.advance()
            _teach(rows[_PATE], (x, y), (x_test[:_QUERIES], y_test[:_QUERIES]), test, seed, out)
            progress.advance()
    facts = run_facts(out / "dp-sgd", baseline=mean(rows["no privacy"].accuracies))
    write_report(out / "report.html", facts)
    _draw(rows, out / "plot.png")
    header, cells = ["method", "epsilon", "accuracy", "rate", "clip", "steps", "noise"], []
    header.append("specific to the method")
    for name, row in rows.items():
        epsilon = f"{row.epsilon:.3f}" if row.epsilon else "infinite"
        rate = " x ".join(f"{number:g}" for number in row.rates) or "-"
        clip, noise = (", ".join(f"{n:.2f}" for n in each) or "-" for each in (row.norms, row.noise))
        cells.append([name, epsilon, f"{mean(row.accuracies):.1%}", rate, clip, row.steps])
        cells[-1] += [f"{noise}{row.unit}", row.own]
    text = (
        f"{Table(header=header, rows=cells).markdown()}\n\nEpsilon at delta {BUDGET.delta:g}, one "
        f"record; accuracy on digits that were not trained on, mean of {seeds} seeds. A linear model, "
        f"SGD with learning rate {_LEARNING_RATE:g} (truncated noise: {_LARGER_RATE}; PATE: Adam with "
        f"{_LESSON.rate:g}). Rate of records, and of coordinates. The clip is an l2 norm, for "
        "beta-DP-SGD an l1.5 norm; subspaces have one norm each. The noise multiplier is in "
        "units of the clip, for PATE in votes. "
        f"DPSUR tests {_TESTED} records with clip 0.01, noise 8 and threshold 0. Truncated noise "
        f"ends {_BOUND:g} deviations from 0. PATE has {_TEACHERS} teachers.\n"
    )
    (out / "table.md").write_text(text)
    print(f"\n{text}\ntable   {out / 'table.md'}\nfigure  {out / 'plot.png'}")
    print(f"report  {out / 'report.html'} (the first of {seeds} runs of DP-SGD, not their mean)\n")
    for name, (paper, command, page) in SOURCES.items():
        print(f"{name} ({paper}): {page}\n    {command}")
    print("\nThe commands have the settings of the table, with other random numbers. `hush plans` lists")
    print("all methods. The runs above were seeded; a private run has no known seed.")


def _private(plan: Plan, steps: int, data: Pair, test: Pair, seed: int, folder: Path | None) -> Run:
    model, (x, y) = _initial_model(seed), data
    checkpoints, options = Checkpoints(), dict[str, Any]()
    if folder is not None:
        rmtree(folder, ignore_errors=True)
        settings = {"data": "digits", "model": "logistic", "learning_rate": _LEARNING_RATE}
        checkpoints = Checkpoints(directory=folder, settings=settings)
    if isinstance(plan.clipping, Subspaces):
        options["public"], x, y = (x[:_PUBLIC], y[:_PUBLIC]), x[_PUBLIC:], y[_PUBLIC:]
    if isinstance(plan.noise, Truncated) and not seed:
        options["per_instance"] = PerInstance([8.0, 10.0], slots=range(_WATCHED), iterations=20)
    learning_rate = _LARGER_RATE if isinstance(plan.noise, Truncated) else _LEARNING_RATE
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return train(
        *(model, nn.CrossEntropyLoss(), optimizer, plan, (x, y)),
        budget=BUDGET,
        steps=steps,
        evaluation=test,
        checkpoints=checkpoints,
        logging=Logging(every=steps if folder is None else 10),
        randomness=Randomness(generator=torch.Generator().manual_seed(seed)),
        **options,
    )


def _teach(row: Row, data: Pair, public: Pair, test: Pair, seed: int, out: Path) -> None:
    """One run of PATE with generalized Gaussian votes."""
    noise = GeneralizedGaussian(beta=_BETA, multiplier=1.0)
    query = with_noise(NoisyMax.of_teachers(noise=noise), BUDGET, _QUERIES, _QUERIES)
    assert isinstance(query, NoisyMax)
    folder = out / "pate"
    rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    run = pate(
        *(partial(build, "logistic", classes=10, shape=(1, 8, 8)), data, public, test),
        query=query,
        teachers=_TEACHERS,
        classes=10,
        delta=BUDGET.delta,
        directory=folder,
        lesson=_LESSON,
        generator=torch.Generator().manual_seed(seed),
    )
    row.accuracies.append(run.student_accuracy)
    row.epsilon, row.noise = run.guarantee.epsilon.upper, _multipliers(query.plan)
    row.rates, row.unit, row.steps = (), " votes", f"{_QUERIES} queries"
    row.own = row.own or f"{_QUERIES} answers, {run.label_accuracy:.0%} right"


def _plain(x: Tensor, y: Tensor, test: Pair, seed: int, steps: int) -> float:
    """Accuracy without privacy, by gradient descent."""
    model, loss = _initial_model(seed), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return float(evaluate(model, loss, test)["accuracy"])


def _initial_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build("logistic", classes=10, shape=(1, 8, 8))


def _multipliers(plan: Plan) -> Sequence[float]:
    """Noise of a plan in units of the clipping norm, one number a block."""
    if isinstance(plan.noise, BlockGaussian):
        return plan.noise.multipliers
    if isinstance(plan.noise, Truncated):
        return [plan.noise.scale / plan.clipping.reference_norm]
    return [plan.noise.to_plain()["multiplier"]]


def _settings(plan: Plan) -> tuple[Sequence[float], Sequence[float]]:
    """Sampling rates of records and of coordinates, and clipping norms of a plan."""
    rates = [value for value in plan.sampling.to_plain().values() if isinstance(value, float)] or [1.0]
    clipping = plan.clipping
    return rates, clipping.l2 if isinstance(clipping, Subspaces) else [clipping.reference_norm]


def _variance_ratio(plan: Plan, steps: int) -> float:
    """Total variance of the plan's noise over that of isotropic noise at the same budget."""
    isotropic = calibrate(replace(plan, noise=Gaussian(1.0)), BUDGET, steps=steps)
    blocks = plan.clipping.sensitivity(None)

    def variance(each: Plan) -> float:
        noises = each.noise.per_block(blocks, each.clipping.reference_norm)
        parts = zip(noises, blocks, strict=True)
        return sum((noise.multiplier * norm) ** 2 * block.dimension for (noise, norm), block in parts)  # type: ignore[attr-defined]

    return variance(plan) / variance(isotropic)


def _own_number(plan: Plan, run: Run) -> str:
    """A number of a method's run for the table; the digits are public."""
    if isinstance(plan.release, Selective):
        return f"{run.accepted} of {run.steps} updates accepted"
    if isinstance(plan.noise, BlockGaussian):
        assert isinstance(plan.clipping, Subspaces)
        ranks = ", ".join(map(str, plan.clipping.ranks))
        return f"ranks {ranks}; variance {_variance_ratio(plan, run.steps):.0%} of isotropic"
    if isinstance(plan.noise, GeneralizedGaussian):
        return f"beta {plan.noise.beta:g}"
    if run.per_instance is None:
        return ""
    median, largest = np.quantile(run.per_instance.epsilons(BUDGET.delta), [0.5, 1.0])
    loss = run.per_instance.losses().max()
    return f"per-instance epsilon {median:.2f} (median), {largest:.2f} (largest); Fisher loss {loss:.2f}"


def _draw(rows: dict[str, Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, row in rows.items():
        axes.barh(name, mean(row.accuracies), color="#9fbfe0", height=0.6)
        axes.plot(row.accuracies, [name] * len(row.accuracies), "o", color="#0b5fb0", markersize=4)
        label = f"{mean(row.accuracies):.1%}"
        axes.text(max(row.accuracies) + 0.015, name, label, fontsize=8, va="center")  # type: ignore[arg-type]
    axes.invert_yaxis()
    privacy = f"private methods: epsilon {BUDGET.epsilon:g} at delta {BUDGET.delta:g}"
    label = f"accuracy on digits; {privacy}\na dot for each seed, a bar for the mean"
    axes.set(xlim=(0, 1.08), xlabel=label)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    figure.savefig(path, dpi=150)
