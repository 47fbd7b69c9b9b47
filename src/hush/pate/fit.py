"""Plain training of a teacher or a student: nothing here is private."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hush.core.ranges import check_count, number
from hush.core.value import Value


@dataclass(frozen=True, kw_only=True)
class Lesson(Value):
    """How a network is trained: Adam, so many passes over the records in batches."""

    epochs: int = 40
    batch: int = 32
    rate: float = field(
        default=5e-3,
        metadata=number(above=0, at_most=10, why="it is how far a step goes", example=5e-3),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch"):
            whole = check_count(name, getattr(self, name), "it is counted", at_least=1)
            object.__setattr__(self, name, whole)


def fit(model: nn.Module, inputs: Tensor, targets: Tensor, lesson: Lesson, seed: int) -> None:
    """Train the model; without records it stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lesson.rate)
    loss = nn.CrossEntropyLoss()
    model.train()
    for _ in range(lesson.epochs):
        for batch in torch.randperm(len(inputs), generator=generator).split(lesson.batch):
            if len(batch):
                optimizer.zero_grad()
                loss(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
    model.eval()


@torch.no_grad()
def predict(model: nn.Module, inputs: Tensor) -> Tensor:
    """The most likely class of each input."""
    model.eval()
    return torch.cat([model(part).argmax(1) for part in inputs.split(1024)])
