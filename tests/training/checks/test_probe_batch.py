"""Checks before the first draw look at made-up records: a refusal tells nothing of private ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.training.checks.probe_batch import stand_ins

RECORDS = 20
PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
)
TARGETS = torch.arange(RECORDS) % 2


def step_of(model: nn.Module, **options: Any) -> hush.PrivateStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, PLAN, records=RECORDS, **options)


def test_they_have_the_shapes_and_types_of_the_records_and_nothing_else() -> None:
    inputs = {"x": torch.full((2, 3, 5), 7.0, dtype=torch.float64), "ids": torch.full((2, 4), 9)}
    targets = torch.tensor([5, 6], dtype=torch.uint8)
    made = stand_ins(inputs, targets)
    other = stand_ins({"x": inputs["x"] * 0, "ids": inputs["ids"] * 0}, targets * 0)
    for value, again, given in zip(
        (*made[0].values(), made[1]),
        (*other[0].values(), other[1]),
        (*inputs.values(), targets),
        strict=True,
    ):
        assert (value.shape, value.dtype) == (given.shape, given.dtype)
        assert torch.equal(value, again), "the same whatever the records hold"
        assert (value[0] != value[1]).all()
    assert set(made[0]["ids"].flatten().tolist()) == {0, 1}


class Compares(nn.Module):
    """Gives each record's distance to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0, keepdim=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_whether_records_are_compared_is_found_whatever_the_first_two_hold(scale: float) -> None:
    """Two records that are alike have the same loss together and alone: they showed nothing."""
    inputs = torch.randn(RECORDS, 3)
    inputs[:2] *= scale
    with pytest.raises(Unsupported, match="who else is in the batch"):
        step_of(Compares()).batches((inputs, TARGETS))


def test_the_size_of_a_physical_batch_and_what_is_said_of_rounding_follow_no_record() -> None:
    found = []
    for first in (torch.zeros(3), torch.full((3,), torch.nan), torch.full((3,), 1e30)):
        inputs = torch.ones(RECORDS, 3)
        inputs[0] = first
        step = step_of(nn.Linear(3, 2))
        found.append((step.probe((inputs, TARGETS)), step.arithmetic))
    assert len(set(found)) == 1


class Picky(nn.Module):
    """Takes lengths of at least 2, as packed sequences do: no made-up input is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, lengths: Tensor) -> Tensor:
        if bool((lengths < 2).any()):
            raise ValueError("too short")
        return self.layer(lengths.float())  # type: ignore[no-any-return]


class Branches(nn.Module):
    """Uses one of its layers for large inputs alone, which no made-up one is."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        small: Tensor = self.small(x)
        return small + self.large(x) if x.max() > 100 else small


def test_a_branch_that_they_do_not_take_is_looked_for_with_records() -> None:
    inputs = torch.zeros(RECORDS, 3)
    with pytest.raises(Unsupported, match=r"does not depend on large\.weight"):
        step_of(Branches()).batches((inputs, TARGETS))
    step_of(Branches()).batches((inputs + 1e3, TARGETS))


def test_a_model_that_does_not_take_them_is_tried_with_records() -> None:
    lengths = torch.randint(2, 9, (RECORDS, 1))
    step = step_of(Picky())
    for batch in step.batches((lengths, TARGETS), steps=2):
        step(batch)
    assert step.steps == 2
    with pytest.raises(ValueError, match="too short"):
        step_of(Picky()).batches((lengths * 0, TARGETS))
