"""A layer rule added as the docstring of `hush.gradients.rules` says."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hush.gradients.recording import Recording, record
from hush.gradients.rules import RULES, Weight
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from tests.gradients.oracle import check_tape, one_at_a_time

LOSS = nn.CrossEntropyLoss(reduction="none")


@dataclass(frozen=True, eq=False)
class PReLU:
    """`max(x, 0) + w min(x, 0)` with one weight."""

    weight: Weight
    shared: bool = False
    """Whether to leave gradients that are summed over the records, as no layer may."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.prelu(x, self.weight.value), (x,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        (x,) = saved
        gradients = (grad * x.clamp(max=0)).flatten(1).sum(1, keepdim=True)
        assert self.weight.terms is not None
        self.weight.terms.append(
            Dense(gradients.sum(0).expand_as(gradients) if self.shared else gradients)
        )
        return (grad * torch.where(x > 0, 1.0, self.weight.value),)


def prelu(recording: Recording, x: Tensor, weight: Tensor, *, shared: bool = False) -> Any:
    weights = recording.as_weights(weight)
    if weights is None or weights[0] is None:
        return NotImplemented
    return recording.run_batched(partial(recording.capture, PReLU(weights[0], shared)), x)


def tape_and_oracle() -> tuple[GradientTape, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.PReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 3, (7,))
    tape = record(model, LOSS, x, y)
    assert isinstance(tape, GradientTape)
    return tape, one_at_a_time(model, LOSS, x, y, 7)


def test_a_rule_of_ones_own_leaves_per_sample_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    general, expected = tape_and_oracle()
    called = []

    def rule(*args: Any) -> Any:
        called.append(args)
        return prelu(*args)

    monkeypatch.setitem(RULES, torch.prelu, rule)
    with_rule, _ = tape_and_oracle()
    assert len(called) == 1
    for tape in (general, with_rule):
        check_tape(tape, expected, 1e-12)


def test_a_rule_that_sums_over_records_is_found_by_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, torch.prelu, partial(prelu, shared=True))
    tape, expected = tape_and_oracle()
    with pytest.raises(AssertionError):
        check_tape(tape, expected, 1e-12)
