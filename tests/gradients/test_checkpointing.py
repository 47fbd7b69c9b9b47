"""Gradient checkpointing on the tape, against the tape of the same model without it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from hush.gradients.recording import record

RECORDS = 5
recomputed = partial(checkpoint, use_reentrant=False)
Checkpoint = Callable[..., Any]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def gradients(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, one_by_one: bool = False
) -> list[Tensor]:
    """All per-sample gradients, in the order in which the tape has them."""
    chunks = record(model, cross_entropy, inputs, targets, one_by_one=one_by_one).chunks()
    return [part.clone() for _, parts in chunks for part in parts.values()]


class Parts(nn.Module):
    """Layers that the segments below are made of."""

    def __init__(self, segment: "Segment", through: Checkpoint) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.segment, self.through = segment, through
        self.weight = nn.Parameter(torch.randn(4))
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.segment(self, x))
        return scores


Segment = Callable[[Parts, Tensor], Tensor]


def derived_value(parts: Parts, x: Tensor) -> Any:
    """Saves nothing for the records' own graph: it is recomputed for the derived value alone."""
    return parts.second(parts.through(lambda x: x + parts.weight.tanh(), parts.first(x)))


def parameters_alone(parts: Parts, x: Tensor) -> Any:
    value = parts.through(lambda: parts.weight.tanh().exp())
    return parts.second(parts.first(x) * value) + value


def nested(parts: Parts, x: Tensor) -> Any:
    """Tuples, None, dictionaries, keywords, and a segment that is used twice in another one."""

    def inner(x: Tensor) -> Any:
        return parts.dropout(torch.tanh(parts.first(x))) * parts.weight.exp()

    def outer(x: Tensor, factor: Tensor) -> Any:
        again = parts.dropout(parts.through(inner, parts.second(x * factor)))
        return parts.through(inner, x) + again, None, {"sine": x.sin()}

    total, _, named = parts.through(outer, x, factor=x.cos())
    return total * named["sine"]


def closure(parts: Parts, x: Tensor) -> Any:
    hidden = parts.second(x).tanh()
    return parts.through(lambda x: parts.dropout(parts.first(x) * hidden.sin()), x) + hidden


def low_precision(parts: Parts, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        return parts.through(lambda x: parts.second(parts.first(x).sin()), x).float()


def sequential(parts: Parts, x: Tensor) -> Any:
    layers = nn.Sequential(parts.first, nn.Tanh(), parts.dropout, parts.second)
    if parts.through is plain:
        return layers(x)
    return checkpoint_sequential(layers, 2, x, use_reentrant=False)


@pytest.mark.parametrize(
    "segment", [derived_value, parameters_alone, nested, closure, low_precision, sequential]
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_gradients_are_the_same_bit_for_bit(segment: Segment, one_by_one: bool) -> None:
    inputs, targets = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    results = []
    for through in (plain, recomputed):
        torch.manual_seed(1)
        model = Parts(segment, through)
        results.append(gradients(model, inputs, targets, one_by_one=one_by_one))
    assert all(map(torch.equal, *results))
