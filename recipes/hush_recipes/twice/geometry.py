"""Figures 2 and 3 of the twice-sampling paper: how records and gradients of high dimension lie in space.

Figure 2: the paper takes 800 gene expression profiles of 20,531 numbers, half of them as public. Those
are not among the data sets here: the pixels of Fashion-MNIST images, 784 numbers, take their place.
Figure 3: 100 steps of gradient descent on one half of 2,000 images, then the gradients of that half in
the principal directions of the other half's. The paper's network is ResNet22 on CIFAR-10; the default
here is a small one on Fashion-MNIST, to run on a CPU. With --model, a network for CIFAR-10 gets those
images.
"""

import torch
from torch import nn

from hush.data import load, tensors
from hush.gradients.geometry import geometry
from hush.models import build
from hush.report.figure import Figure
from hush.report.geometry import geometry_figure
from hush.training.methods.public_bases import probe

RAW_RECORDS = 400
MODEL = "mnist-cnn"
RECORDS, STEPS, LEARNING_RATE = 1000, 100, 0.05


def twice_fig2(data: str = "fashion-mnist", records: int = RAW_RECORDS) -> Figure:
    """Geometry of raw records: the first ones as public, the next as private."""
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
