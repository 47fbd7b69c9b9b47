"""Figure 3 of the generalized Gaussian paper: label accuracy of GGNMax against the noise's shape.

Noise of 20 shapes beta in [1, 4], each with just enough of it for one answer at a given epsilon, on the
votes of 250 teachers. The paper prints no numbers and no epsilons for this figure; what it states is
that beta in [1, 2.5] does about equally well, and larger ones slightly worse. It charges one count
(its Theorem 2), where a replaced vote moves two: "published" has that much noise, "sound" enough.
"""

import io
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hush.accounting.calibrate import calibrate
from hush.core.guarantee import Budget, Neighbours
from hush.data import load
from hush.noise import GeneralizedGaussian
from hush.pate.argmax import NoisyMax, noisy
from hush.report.text import Table
from hush_recipes.data.published import find_directory, read_published
from hush_recipes.figure import Figure

BETAS = tuple(float(beta) for beta in np.linspace(1, 4, 20))
EPSILONS = (0.1, 0.3, 1.0)
DELTA = 1e-5
TEACHERS, TRIALS = 250, 25
SEED = 0
# What the noise is chosen for: a vote that is replaced, or, as Theorem 2 does, one count.
CHARGES = {"sound": Neighbours.REPLACE, "published": Neighbours.ADD_REMOVE}


@dataclass(frozen=True, kw_only=True)
class Point:
    """The answers under one noise."""

    data: str
    accounting: str
    epsilon: float
    beta: float
    scale: float
    accuracy: float
    deviation: float
    """Between the trials."""
    true_epsilon: float
    """Epsilon of one answer when a vote is replaced."""


def gg_fig3(data_dir: Path | None = None) -> Figure:
    """The accuracy of noisy votes, by the shape of the noise."""
    mnist, svhn = (torch.from_numpy(votes) for votes in read_votes(data_dir))
    # The images and labels of SVHN are not to be had; the votes' own plurality stands in.
    panels = {
        "MNIST": (mnist, torch.from_numpy(load("mnist", data_dir).y_test[: len(mnist)])),
        "SVHN": (svhn, svhn.argmax(1)),
    }
    points = []
    for beta in BETAS:
        for data, (votes, labels) in panels.items():
            points += accuracies(data, votes, labels, beta)
    ceilings = {
        data: float((votes.argmax(1) == labels).double().mean())
        for data, (votes, labels) in panels.items()
    }
    rows = [asdict(point) for point in points]
    return Figure(
        name="gg-fig3",
        title="answers of noisy votes at equal privacy, 250 teachers",
        header=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        draw=partial(plot, points, ceilings),
        panels=len(panels),
        summary=table(points, ceilings),
        notes=[
            f"accuracy is the mean of {TRIALS} trials; for SVHN, whose labels are not among the data, "
            "the share of answers that are as without noise",
            f"epsilon is that of one answer at delta {DELTA:g}",
            "the paper prints no numbers here: it states that beta in [1, 2.5] does about equally well "
            "and larger ones slightly worse",
            "'published' noise is for comparison: what it truly costs is in the last column",
        ],
    )


def read_votes(directory: str | Path | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Counts of the teachers' votes (Papernot et al. 2017), ten classes, a row an image.

    9,000 MNIST and 26,032 SVHN test images; the MNIST rows are the first 9,000 test images in
    order. The files are read without pickle.
    """
    folder = find_directory("pate-votes", directory)
    mnist, svhn = (
        np.load(io.BytesIO(content), allow_pickle=False)
        for content in read_published("pate-votes", folder)
    )
    return mnist, svhn


def accuracies(data: str, votes: torch.Tensor, labels: torch.Tensor, beta: float) -> list[Point]:
    """All points of one shape: the same draws for all of them, which differ by their size only."""
    unit = GeneralizedGaussian(beta=beta, multiplier=1.0)
    settings = [(accounting, epsilon) for accounting in CHARGES for epsilon in EPSILONS]
    scales = []
    for accounting, epsilon in settings:
        plan = NoisyMax.of_votes(noise=unit, neighbours=CHARGES[accounting]).plan
        enough = calibrate(plan, Budget(epsilon=epsilon, delta=DELTA), steps=1).noise
        scales.append(enough.to_plain()["multiplier"])
    generator = torch.Generator().manual_seed(SEED)
    right = np.zeros((TRIALS, len(settings)))
    for trial in range(TRIALS):
        noise = noisy(NoisyMax.of_votes(noise=unit).plan, torch.zeros_like(votes), generator)
        for column, scale in enumerate(scales):
            answers = (votes + scale * noise).argmax(1)
            right[trial, column] = float((answers == labels).double().mean())
    return [
        Point(
            data=data,
            accounting=accounting,
            epsilon=epsilon,
            beta=beta,
            scale=scales[column],
            accuracy=float(right[:, column].mean()),
            deviation=float(right[:, column].std(ddof=1)),
            true_epsilon=NoisyMax.of_votes(
                noise=GeneralizedGaussian(beta=beta, multiplier=scales[column])
            )
            .guarantee(queries=1, delta=DELTA)
            .epsilon.upper,
        )
        for column, (accounting, epsilon) in enumerate(settings)
    ]


def _curve(points: list[Point], data: str, accounting: str, epsilon: float) -> list[Point]:
    """The points of one data set, accounting and epsilon, in the order of their shapes."""
    setting = (data, accounting, epsilon)
    return [point for point in points if (point.data, point.accounting, point.epsilon) == setting]


def table(points: list[Point], ceilings: dict[str, float]) -> Table:
    """A row for each data set, accounting and epsilon: how the shapes compare."""
    rows = []
    for data, ceiling in ceilings.items():
        for accounting in CHARGES:
            for epsilon in EPSILONS:
                curve = _curve(points, data, accounting, epsilon)
                low = [point.accuracy for point in curve if point.beta <= 2.5]
                high = [point.accuracy for point in curve if point.beta > 2.5]
                best = max(curve, key=lambda point: point.accuracy)
                costs = [point.true_epsilon for point in curve]
                rows.append(
                    [
                        data,
                        accounting,
                        f"{epsilon:g}",
                        f"{np.mean(low):.2%}",
                        f"{np.mean(high):.2%}",
                        f"{best.accuracy:.2%} ({best.beta:.2f})",
                        f"{ceiling:.2%}",
                        f"{min(costs):.3g} to {max(costs):.3g}",
                    ]
                )
    header = [
        *("votes", "noise", "epsilon", "beta to 2.5", "beta above", "best (beta)"),
        *("no noise", "true epsilon"),
    ]
    return Table(header=header, rows=rows)


def plot(points: list[Point], ceilings: dict[str, float], panels: list[Any]) -> None:
    """Accuracy against beta, a panel a data set, a colour an epsilon."""
    for axes, (data, ceiling) in zip(panels, ceilings.items(), strict=True):
        axes.axhline(ceiling, color="0.6", linewidth=1, label="no noise")
        for color, epsilon in enumerate(EPSILONS):
            for accounting, style in (("sound", "-o"), ("published", "--")):
                curve = _curve(points, data, accounting, epsilon)
                axes.plot(
                    [point.beta for point in curve],
                    [point.accuracy for point in curve],
                    style,
                    color=f"C{color}",
                    label=f"epsilon {epsilon:g}" if accounting == "sound" else None,
                )
        measure = "label accuracy" if data == "MNIST" else "answers as without noise"
        axes.set(xlabel="beta (published dashed)", ylabel=measure, title=data)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    panels[-1].legend(fontsize=8)
