"""Figure 2 of the twice-sampling paper: how records of high dimension lie in space.

The paper takes 800 gene expression profiles of 20,531 numbers, half of them as public. Those are not
among the data sets here: the pixels of Fashion-MNIST images, 784 numbers, take their place.
"""

import torch

from hush.data import load
from hush.gradients.geometry import geometry
from hush.report.figure import Figure
from hush.report.geometry import geometry_figure

RECORDS = 400


def twice_fig2(data: str = "fashion-mnist", records: int = RECORDS) -> Figure:
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
