"""Figures 2 and 3 of the twice-sampling paper: how records and gradients of high dimension lie in space.

Figure 2: the paper takes 800 gene expression profiles of 20,531 numbers, half of them as public. Those
are not among the data sets here: the pixels of Fashion-MNIST images, 784 numbers, take their place.
Figure 3: 100 steps of gradient descent on one half of 2,000 images, then the gradients of that half in
the principal directions of the other half's. The paper's network is ResNet22 on CIFAR-10; the default
here is a small one on Fashion-MNIST, to run on a CPU. With --model, a network for CIFAR-10 gets those
images.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hush.data import load, tensors
from hush.models import build
from hush_recipes.figure import Figure
from hush_recipes.twice.measured import Geometry, advice, geometry, probe, summary_table

RAW_RECORDS = 400
MODEL = "mnist-cnn"
RECORDS, STEPS, LEARNING_RATE = 1000, 100, 0.05
_POINTS = 200


def twice_fig2(data: str = "fashion-mnist", records: int = RAW_RECORDS) -> Figure:
    """Geometry of raw records in the principal directions of public ones."""
    rows = torch.from_numpy(load(data).x_train[: 2 * records]).flatten(1).clone()
    measured = geometry(rows[:records], rows[records:])
    return geometry_figure(
        "twice-fig2",
        f"{data}: {records} + {records} records of {measured.dimension} pixels",
        measured,
        [
            f"other data than the paper's (gene expression, 400 + 400 records of 20,531): {data} pixels",
            "the paper sees principal norms that deviate by about 0.015, and entries mostly below 0.02",
        ],
    )


def twice_fig3(
    model: str = MODEL, data: str | None = None, records: int = RECORDS, steps: int = STEPS
) -> Figure:
    """Geometry of a network's gradients after some steps."""
    torch.manual_seed(0)
    data = data or ("fashion-mnist" if model == "mnist-cnn" else "cifar10")
    dataset = load(data)
    x, y, _, _ = tensors(dataset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build(model, classes=dataset.classes, shape=dataset.shape).to(device)
    first, second = (
        (x[part].to(device), y[part].to(device))
        for part in (slice(records), slice(records, 2 * records))
    )
    shape = probe(
        network, nn.CrossEntropyLoss(), first, second, steps=steps, learning_rate=LEARNING_RATE
    )
    return geometry_figure(
        "twice-fig3",
        f"gradients of {model} on {data}: {records} + {records} records, {shape.dimension} parameters",
        shape,
        [
            f"after {steps} steps of gradient descent, rate {LEARNING_RATE:g}, momentum 0.9",
            "the paper sees (ResNet22 on CIFAR-10, 291,898 parameters) principal norms that deviate by "
            "about 0.08, and entries mostly below 0.1",
        ],
    )


def geometry_figure(name: str, title: str, geometry: Geometry, notes: Sequence[str]) -> Figure:
    """Variation, sparsification, rank, principal norms and largest entries: a panel each."""
    ranks = np.unique(np.geomspace(1, geometry.principal.shape[1], _POINTS).round().astype(int))
    means, spread = geometry.principal.mean(0)[ranks - 1], geometry.principal.std(0)[ranks - 1]
    residual = geometry.residual.mean(0)[ranks - 1]
    levels = np.linspace(0, 1, _POINTS + 1)
    finite = geometry.variation[np.isfinite(geometry.variation)]
    variation = np.quantile(finite, levels) if len(finite) else np.full(len(levels), np.inf)
    largest = np.quantile(geometry.largest, levels)

    def draw(panels: Any) -> None:
        variation_axes, sparse_axes, residual_axes, norm_axes, entry_axes = panels
        variation_axes.semilogy(levels, variation)
        variation_axes.set(title="(a) coefficient of variation", xlabel="quantile over the coordinates")
        sparse_axes.plot(100 * geometry.shares, geometry.dropped)
        sparse_axes.set(
            title="(b) residual after sparsification", xlabel="% of coordinates kept", ylim=(0, 1.05)
        )
        residual_axes.plot(ranks, residual)
        residual_axes.set(title="(c) residual after projection", xlabel="rank", ylim=(0, 1.05))
        (line,) = norm_axes.plot(ranks, means)
        norm_axes.fill_between(ranks, means - spread, means + spread, alpha=0.3, color=line.get_color())
        norm_axes.set(title="(d) principal norm, mean ± deviation", xlabel="rank", ylim=(0, 1.05))
        entry_axes.plot(levels, largest)
        entry_axes.axhline(geometry.cap, color="0.6", linewidth=1, label=f"99% below {geometry.cap:.3g}")
        entry_axes.legend()
        entry_axes.set(title="(e) largest entry", xlabel="quantile over the records", ylim=(0, None))

    rows: list[list[object]] = [
        *(["variation", *pair, None] for pair in zip(levels, variation, strict=True)),
        *(
            ["sparse residual", *pair, None]
            for pair in zip(geometry.shares, geometry.dropped, strict=True)
        ),
        *(["residual", *pair, None] for pair in zip(ranks, residual, strict=True)),
        *(["principal", *point] for point in zip(ranks, means, spread, strict=True)),
        *(["largest entry", *pair, None] for pair in zip(levels, largest, strict=True)),
    ]
    return Figure(
        name=name,
        title=title,
        header=["panel", "x", "value", "deviation"],
        rows=rows,
        draw=draw,
        panels=5,
        across=3,
        summary=summary_table(geometry),
        notes=[*notes, *advice(geometry)],
    )
