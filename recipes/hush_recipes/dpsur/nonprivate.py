"""The last column of the DPSUR paper's Table 2: its networks trained without privacy, 20 epochs.

The paper states the epochs, and Adam with batches of 32 for IMDB. The other hyperparameters are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import InvalidValue
from hush.training.evaluate import evaluate
from hush_recipes.dpsur.inputs import inputs_on, network
from hush_recipes.figure import Figure
from hush_recipes.workers import workers


@dataclass(frozen=True, kw_only=True)
class Column:
    """One data set's network and the accuracy that the paper prints, in percent."""

    model: str
    printed: float
    batch: int = 256
    adam: bool = False


COLUMNS = {
    "mnist": Column(model="scattering-mnist", printed=99.11),
    "fashion-mnist": Column(model="scattering-mnist", printed=90.98),
    "cifar10": Column(model="scattering-cifar", printed=71.12),
    "imdb": Column(model="imdb-lstm", printed=79.97, batch=32, adam=True),
}
_SHORT = ("mnist", "fashion-mnist")


def dpsur_nonprivate(
    *,
    device: str = "cpu",
    data: str | None = None,
    seeds: int = 1,
    epochs: int = 20,
    processes: int = 1,
) -> Figure:
    """Accuracy of the networks of Table 2 without privacy. CPU: MNIST and Fashion-MNIST."""
    if data is not None and data not in COLUMNS:
        raise InvalidValue(f"--data {data} is not in Table 2: choose from {', '.join(COLUMNS)}.")
    names: Sequence[str] = [data] if data else _SHORT if device == "cpu" else list(COLUMNS)
    cells = [(name, seed, device, epochs) for name in names for seed in range(seeds)]
    with workers(processes, device) as over:
        scores = list(over(_accuracy, cells))
    rows = []
    for place, name in enumerate(names):
        of_data = scores[place * seeds : (place + 1) * seeds]
        spread = stdev(of_data) if seeds > 1 else None
        rows.append([name, COLUMNS[name].model, mean(of_data), spread, COLUMNS[name].printed])

    def draw(axes: Any) -> None:
        axes.plot(names, [row[2] for row in rows], "o", label="ours")
        axes.plot(names, [row[4] for row in rows], "x", label="printed")
        axes.set(ylabel="test accuracy, %")
        axes.legend()

    return Figure(
        name="dpsur-nonprivate",
        title=f"Without privacy, {epochs} epochs",
        header=["data", "network", "accuracy %", "spread", "printed %"],
        rows=rows,
        draw=draw,
        notes=[f"mean and standard deviation of {seeds} seed(s)"],
    )


def without_privacy(
    model: nn.Module, records: tuple[Tensor, Tensor], *, epochs: int, batch: int, adam: bool = False
) -> nn.Module:
    """Train without privacy: SGD with momentum .9 and a one-cycle rate of at most .1, or Adam."""
    x, y = records
    loss = nn.CrossEntropyLoss()
    steps = -(-len(y) // batch) * epochs
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule: Any = None
    if adam:
        optimizer = torch.optim.Adam(model.parameters())
    else:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)
    for _ in range(epochs):
        for rows in torch.randperm(len(y), device=y.device).split(batch):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if schedule:
                schedule.step()
    return model


def _accuracy(cell: tuple[str, int, str, int]) -> float:
    """Test accuracy in percent after one run."""
    data, seed, device, epochs = cell
    column = COLUMNS[data]
    inputs = inputs_on(data, column.model.startswith("scattering"), device)
    torch.manual_seed(seed)
    model = network(column.model, inputs).to(device)
    without_privacy(model, inputs.train, epochs=epochs, batch=column.batch, adam=column.adam)
    return 100 * evaluate(model, nn.CrossEntropyLoss(), inputs.test)["accuracy"]
