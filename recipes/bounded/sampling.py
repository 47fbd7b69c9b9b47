"""Sampled coordinates on a fixed support: does sampling pay without sampled records?

The bounded-support paper leaves sampling open and suggests coordinates. The mean of Figure 2's records,
each number of each record drawn with some chance, against the full batch at the same noise on the mean.
"""

from typing import Any

import numpy as np

import hush
from hush.accounting.per_instance.bounded import individual_rdp
from hush.accounting.per_instance.sampled import sampled_rdp
from hush.report.figure import Figure
from recipes.bounded.fig2 import NUMBERS, RECORDS, TRIALS

RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
MEAN, DEVIATION, BOUND = 0.25, 0.2, 0.3
ORDERS = (2.0, 8.0, 32.0)


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
        axes.legend(frameon=False)

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
