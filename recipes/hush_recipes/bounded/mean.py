"""Figure 2 of the bounded-support paper: the mean of 900 records of 100 numbers, rectified.

Data from N(mu, 1), clipped to [-1, 1]; the mean is released with noise of deviation sigma, on [-a, a] or
on all numbers; five trials. The larger mu, the farther the mean is from the middle of the support.

The paper leaves sampling open and suggests coordinates: the same mean, each number of each record drawn
with some chance, against the full batch at the same noise on the mean.
"""

from typing import Any

import numpy as np
import torch

import hush
from hush.accounting.per_instance import individual_rdp, unit_law
from hush.report.text import Table
from hush_recipes.bounded.sampled import sampled_rdp
from hush_recipes.figure import Figure

RECORDS, NUMBERS, TRIALS, ORDER = 900, 100, 5, 2.0
MEANS = (0.0, 0.25, 0.5, 0.75, 1.0)
DEVIATIONS = (0.05, 0.1, 0.2, 0.4)
SUPPORTS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
"""a over sigma."""
MOST_WORSE = 0.005
# of the sampled coordinates
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
MEAN, DEVIATION, BOUND = 0.25, 0.2, 0.3
ORDERS = (2.0, 8.0, 32.0)


def bounded_fig2() -> Figure:
    """Ratio of divergences and change of the error for every mu, sigma and a."""
    rows: list[list[object]] = []
    for mean in MEANS:
        for deviation in DEVIATIONS:
            for width in SUPPORTS:
                rows.append([mean, deviation, width, *_trials(mean, deviation, width * deviation)])

    def draw(panels: Any) -> None:
        for k, deviation in enumerate(DEVIATIONS):
            best = [_best(rows, mean, deviation) for mean in MEANS]
            panels[0].plot(
                MEANS,
                [support[1] for support in best],
                "o-",
                color=f"C{k}",
                label=f"sigma {deviation:g}",
            )
            panels[0].plot(MEANS, [support[0] for support in best], "--", color=f"C{k}", linewidth=1)
            panels[1].plot(MEANS, [100 * support[2] for support in best], "o-", color=f"C{k}")
        panels[0].set(xlabel="mu", ylabel="divergence over the Gaussian's (dashed: one way)")
        panels[1].set(xlabel="mu", ylabel="change of the squared error, %")
        panels[0].legend()

    summary = [
        [f"{mean:g}", f"{deviation:g}", *(f"{value:.3f}" for value in _best(rows, mean, deviation))]
        for mean in MEANS
        for deviation in DEVIATIONS
    ]
    return Figure(
        name="bounded-fig2",
        title="The mean of 900 records of 100 numbers: rectified against Gaussian",
        header=["mu", "sigma", "a/sigma", "paper / Gaussian", "charged / Gaussian", "change of error"],
        rows=rows,
        draw=draw,
        panels=2,
        summary=Table(
            header=["mu", "sigma", "paper / Gaussian", "charged / Gaussian", "change of error"],
            rows=summary,
        ),
        notes=[
            f"shown: the support with the lowest charge whose error is at most {MOST_WORSE:.1%} larger",
            "paper: one direction, one sign (Algorithm 1); charged: the worse sign and direction",
            "error: mean squared distance of the release from the mean of the clipped records",
        ],
    )


def _trials(mean: float, deviation: float, bound: float) -> tuple[float, float, float]:
    """Mean ratios of the two divergences to the Gaussian's, and the relative change of the error."""
    noise = hush.Rectified(scale=RECORDS * deviation, bound=RECORDS * bound)
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(norm=1.0), noise=noise)
    plain = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.Linf(norm=1.0),
        noise=hush.Gaussian(multiplier=RECORDS * deviation),
    )
    normal = float(hush.rdp(plain, [ORDER], dimension=NUMBERS)[0])
    support, scale = unit_law(noise, 1.0)
    paper, charged, errors = [], [], np.zeros(2)
    for trial in range(TRIALS):
        data = np.random.default_rng(trial).normal(mean, 1.0, size=(RECORDS, NUMBERS)).clip(-1, 1)
        total = data.sum(0)
        shift = np.full(NUMBERS, 1 / scale)
        paper.append(float(support.divergence(total / scale, shift, ORDER).sum()) / normal)
        charged.append(float(individual_rdp(plan, total, [ORDER])[0]) / normal)
        for k, released_by in enumerate((plan, plain)):
            generator = torch.Generator().manual_seed(trial)  # the same draws for both
            release = hush.mean(data, released_by, delta=1e-5, generator=generator).value
            errors[k] += float(((release - total / RECORDS) ** 2).mean())
    return float(np.mean(paper)), float(np.mean(charged)), float(errors[0] / errors[1] - 1)


def _best(rows: list[list[object]], mean: float, deviation: float) -> tuple[float, float, float]:
    """The support with the lowest charge among those that hardly add to the error."""
    ours = [[float(str(cell)) for cell in row[3:]] for row in rows if row[:2] == [mean, deviation]]
    allowed = [row for row in ours if row[2] <= MOST_WORSE]
    if not allowed:
        return 1.0, 1.0, 0.0  # a support wide enough is the Gaussian itself
    paper, charged, change = min(allowed, key=lambda row: row[1])
    return paper, charged, change


def bounded_sampling() -> Figure:
    """Divergences over the full batch's, and the error of the mean, by rate."""
    rows: list[list[object]] = []
    for rate in RATES:
        ratios, errors = [], []
        for trial in range(TRIALS):
            rng = np.random.default_rng(trial)
            data = rng.normal(MEAN, 1.0, size=(RECORDS, NUMBERS)).clip(-1, 1)
            drawn = data * (rng.random(data.shape) < rate)
            noise = hush.Rectified(scale=rate * RECORDS * DEVIATION, bound=rate * RECORDS * BOUND)
            full = hush.Rectified(scale=RECORDS * DEVIATION, bound=RECORDS * BOUND)
            ratios.append(_cost(rate, noise, drawn.sum(0)) / _cost(1.0, full, data.sum(0)))
            sampling_error = ((drawn.sum(0) / (rate * RECORDS) - data.mean(0)) ** 2).mean()
            errors.append(float(sampling_error))
        rows.append([rate, *map(float, np.mean(ratios, 0)), float(np.mean(errors)) / DEVIATION**2])

    def draw(axes: Any) -> None:
        for k, order in enumerate(ORDERS):
            axes.plot(RATES, [float(str(row[1 + k])) for row in rows], "o-", label=f"order {order:g}")
        axes.set(xscale="log", xlabel="rate of a coordinate", ylabel="divergence over the full batch's")
        axes.legend()

    return Figure(
        name="bounded-sampling",
        title="Sampled coordinates at the same noise on the mean",
        header=["rate", *(f"order {order:g}" for order in ORDERS), "sampling error / noise"],
        rows=rows,
        draw=draw,
        notes=[
            "divergences are given the others' draws, means of five: no guarantee without them",
            "a rate q lowers the price by q^2, and the signal by q: noise q times smaller undoes it",
        ],
    )


def _cost(rate: float, noise: hush.Rectified, location: np.ndarray) -> np.ndarray:
    clipping = hush.Linf(norm=1.0)
    if rate == 1:
        full = hush.Plan(sampling=hush.FullBatch(), clipping=clipping, noise=noise)
        return individual_rdp(full, location, ORDERS)
    sampled = hush.Plan(sampling=hush.Coordinate(rate=rate), clipping=clipping, noise=noise)
    return sampled_rdp(sampled, location, ORDERS)
