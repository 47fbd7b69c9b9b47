"""Figure 3 of the twice-sampling paper: how the gradients of a network lie in space.

100 steps of gradient descent on one half of 2,000 CIFAR-10 images, then the gradients of that half in
the principal directions of the other half's. The paper's network is ResNet22; a smaller one is the
default here, to run on a CPU.
"""

import torch
from torch import nn

from hush.data import load, tensors
from hush.models import build
from hush.reproduce.figure import Figure
from hush.reproduce.geometry_figure import geometry_figure
from hush.training.probe import probe

MODEL = "cifar-cnn"
RECORDS, STEPS, LEARNING_RATE = 1000, 100, 0.05


def twice_fig3(
    model: str = MODEL, data: str = "cifar10", records: int = RECORDS, steps: int = STEPS
) -> Figure:
    """Geometry of a network's gradients after some steps."""
    torch.manual_seed(0)
    dataset = load(data)
    x, y, _, _ = tensors(dataset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build(model, classes=dataset.classes, shape=dataset.shape).to(device)
    first, second = (
        (x[part].to(device), y[part].to(device))
        for part in (slice(records), slice(records, 2 * records))
    )
    found = probe(
        network, nn.CrossEntropyLoss(), first, second, steps=steps, learning_rate=LEARNING_RATE
    )
    return geometry_figure(
        "twice-fig3",
        f"gradients of {model} on {data}: {records} + {records} records, {found.dimension} parameters",
        found,
        [
            f"after {steps} steps of gradient descent, rate {LEARNING_RATE:g}, momentum 0.9",
            "the paper sees (ResNet22) a principal norm that deviates by about 0.08, and entries mostly "
            "below 0.1",
        ],
    )
