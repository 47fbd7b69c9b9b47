"""Models that would let one record touch another, or slip past clipping, if they were let."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hush.gradients.recording import record
from hush.gradients.rules.linear import OuterFactors


class Made(nn.Module):
    """A module of one function and its parameters."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.work = work
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    return flat.square().sum(1) + flat.sum(1)


def test_long_sums_that_cancel_do_not_understate_a_norm() -> None:
    """Two positions of 50,000 equal entries that cancel to one part in thirty."""
    value = 1.0721975564956665
    left = torch.tensor([[[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7]])
    right = torch.stack([torch.full((50_000,), value), torch.full((50_000,), value * (1 - 1 / 30))])[
        None
    ]
    term = OuterFactors(left, right, torch.Size((8, 50_000)))
    exact = (left.double().mT @ right.double()).norm()
    assert -1e-7 < term.norms(2.0)[0].double() / exact - 1 < 2e-5


def checkpointed(self: Any, x: Tensor) -> Tensor:
    """The term of the last product holds the graph of the segment before it."""
    hidden = checkpoint(lambda x: x * self.w.tanh(), x, use_reentrant=False)
    return functional.linear(hidden, self.v)


@pytest.mark.few(1)
@pytest.mark.parametrize("forward", [lambda self, x: x * self.w, checkpointed])
def test_memory_does_not_grow_with_the_steps(forward: Callable[..., Tensor]) -> None:
    model = Made(forward, w=torch.ones(5), v=torch.ones(5, 5))
    for _ in range(3):
        record(model, loss, torch.randn(4, 5), torch.zeros(4))
    gc.collect()
    before = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    for _ in range(20):
        record(model, loss, torch.randn(4, 5), torch.zeros(4))
    gc.collect()
    assert sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()) <= before + 2


def test_a_recurrent_layer_under_autocast_keeps_its_precision() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.lstm(x)[0]
            return outputs[:, -1]

    model, inputs = Last(), torch.randn(3, 6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = record(model, loss, inputs, torch.zeros(3))
    full = record(model, loss, inputs, torch.zeros(3))
    torch.testing.assert_close(low.norms(2.0), full.norms(2.0), rtol=0.02, atol=0)
