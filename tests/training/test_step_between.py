"""Changes of a model between steps, after steps in which it stayed as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import LedgerError, Unsupported
from tests.training.helpers import step_of


class Network(nn.Module):
    """A layer of each kind that a step looks at one by one, all of them as they are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4).eval()
        self.scores = nn.Linear(4, 3)
        self.register_buffer("offset", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.long))
        self.register_buffer("positions", torch.arange(5000))
        self.factor = 1

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.first(self.words(words).mean(1)) * self.factor
        shifted = self.norm(hidden) if self.offset is None else self.norm(hidden) + self.offset
        scores: Tensor = self.scores(shifted.to(hidden.dtype))
        return scores


def after_steps() -> tuple[Any, hush.PrivateStep, Any]:
    torch.manual_seed(0)
    model = Network()
    step = step_of(model, records=8)
    batches = step.batches((torch.randint(0, 10, (8, 5)), torch.randint(0, 3, (8,))))
    for _ in range(3):
        step(next(batches))
    return model, step, batches


REFUSED: list[tuple[str, Callable[[Any], object]]] = [
    ("mixes the records", lambda model: model.norm.train()),
    ("before this one changed", lambda model: setattr(model, "first", nn.Linear(4, 4))),
    ("does not hold extra", lambda model: setattr(model, "extra", nn.Parameter(torch.ones(2)))),
    ("no trainable parameter", lambda model: model.requires_grad_(False)),
]


@pytest.mark.parametrize(("reason", "change"), REFUSED)
def test_a_change_that_is_refused_at_first_is_refused_between_steps(
    reason: str, change: Callable[[Any], object]
) -> None:
    model, step, batches = after_steps()
    batch = next(batches)
    change(model)
    with pytest.raises(Unsupported, match=reason):
        step(batch)
    assert step.steps == 3


def write(model: Any) -> None:
    with torch.no_grad():
        model.first.weight.mul_(1.0)


def other_memory(model: Any) -> None:
    model.first.weight.data = model.first.weight.data.clone()


@pytest.mark.parametrize("change", [write, other_memory])
def test_weights_that_were_moved_are_neither_charged_for_nor_trained(
    change: Callable[[Any], object],
) -> None:
    model, step, batches = after_steps()
    batch = next(batches)
    change(model)
    before = model.first.weight.detach().clone()
    with pytest.raises(LedgerError, match="changed outside of the private step"):
        step(batch)
    assert step.steps == 3
    assert step.update is None
    assert model.first.weight.grad is None
    assert torch.equal(model.first.weight, before)
    with pytest.raises(LedgerError):  # the ledger is void
        step.ledger.epsilon(1e-5)


def run_in_training_mode(model: Any) -> None:
    model.norm.train()
    with torch.no_grad():
        model(torch.randint(0, 10, (8, 5)))
    model.norm.eval()


BUFFERS: list[tuple[str, Callable[[Any], object]]] = [
    ("norm.num_batches_tracked", run_in_training_mode),
    ("offset", lambda model: setattr(model, "offset", torch.ones(4))),
    ("offset", lambda model: setattr(model, "offset", torch.full((4,), torch.nan))),
    # of the norm that it had, of ones
    ("norm.running_var", lambda model: model.norm.running_var.copy_(torch.tensor([2.0, 0, 0, 0]))),
    ("norm.running_var", lambda model: model.norm.running_var.neg_()),
    ("counts", lambda model: model.counts.add_(1)),
    ("positions", lambda model: model.positions.__setitem__(slice(0, 2), torch.tensor([1, 0]))),
    ("extra", lambda model: model.register_buffer("extra", torch.ones(2) * 1j)),
]


@pytest.mark.parametrize(("names", "change"), BUFFERS)
def test_buffers_that_were_changed_are_neither_trained_with_nor_vouched_for(
    names: str, change: Callable[[Any], object]
) -> None:
    model, step, batches = after_steps()
    batch = next(batches)
    change(model)
    for ask in (lambda: step(batch), lambda: step.spent(1e-5)):
        with pytest.raises(LedgerError, match=f"buffers {names} were changed outside"):
            ask()
    assert step.steps == 3
    assert step.update is None
    step.adopt_weights()
    assert step(batch)
    assert step.spent(1e-5).epsilon.upper > 0
