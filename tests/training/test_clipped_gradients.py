"""Checks before the first draw look at made-up records: a refusal tells nothing of private ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, Unsupported
from hush.training.synthetic import synthetic_records
from tests.training import helpers
from tests.training.helpers import run

RECORDS = 20
TARGETS = torch.arange(RECORDS) % 2


def step_of(model: nn.Module, records: int = RECORDS, **options: Any) -> hush.PrivateStep:
    return helpers.step_of(model, records=records, **options)


def test_they_have_the_shapes_and_types_of_the_records_and_nothing_else() -> None:
    inputs = {"x": torch.full((2, 3, 5), 7.0, dtype=torch.float64), "ids": torch.full((2, 4), 9)}
    targets = torch.tensor([5, 6], dtype=torch.uint8)
    made_up = synthetic_records(inputs, targets)
    of_zeros = synthetic_records({"x": inputs["x"] * 0, "ids": inputs["ids"] * 0}, targets * 0)
    for value, of_zero, original in zip(
        (*made_up[0].values(), made_up[1]),
        (*of_zeros[0].values(), of_zeros[1]),
        (*inputs.values(), targets),
        strict=True,
    ):
        assert (value.shape, value.dtype) == (original.shape, original.dtype)
        assert torch.equal(value, of_zero), "the same whatever the records hold"
        assert (value[0] != value[1]).all()
    assert set(made_up[0]["ids"].flatten().tolist()) == {0, 1}


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
    torch.manual_seed(0)  # one in sixty random layers gives the two made-up records nearly the same loss
    inputs = torch.randn(RECORDS, 3)
    inputs[:2] *= scale
    with pytest.raises(Unsupported, match="depends on the other records"):
        step_of(Compares()).batches((inputs, TARGETS))


def test_the_size_of_a_physical_batch_and_what_is_said_of_rounding_follow_no_record() -> None:
    probes = []
    for first in (torch.zeros(3), torch.full((3,), torch.nan), torch.full((3,), 1e30)):
        inputs = torch.ones(RECORDS, 3)
        inputs[0] = first
        step = step_of(nn.Linear(3, 2))
        probes.append((step.probe((inputs, TARGETS)), step.arithmetic))
    assert len(set(probes)) == 1


def labels(*values: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 0, *values])[-6:]


@pytest.mark.parametrize(("wrong", "place"), [(8191, 0), (-8191, 5), (2, 5)])
def test_a_label_that_is_no_class_is_refused_and_not_shown(
    wrong: int, place: int, tmp_path: Path
) -> None:
    inputs, targets = labels()
    targets[place] = wrong
    with pytest.raises(DataError, match="private and not shown") as raised:
        run(step_of(nn.Linear(3, 2), 6, ledger=tmp_path / "ledger"), (inputs, targets))
    assert "8191" not in f"{raised.value}{raised.value.__cause__}"
    assert not hush.Ledger(tmp_path / "ledger", read_only=True).counts


def test_a_label_to_be_ignored_is_no_mistake() -> None:
    inputs, targets = labels()
    targets[2] = -100
    assert run(step_of(nn.Linear(3, 2), 6), (inputs, targets)).steps == 1


def test_a_token_that_is_not_in_the_embedding_is_not_shown() -> None:
    tokens = torch.zeros(6, 3, dtype=torch.int64)
    tokens[5, 1] = 8191
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(DataError, match="private and not shown"):
        run(step_of(model, 6), (tokens, labels()[1]))


class Sequences(nn.Module):
    """A table that is looked up at a few positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(16, 32).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("per_unit", "bounded"), [(1024, True), (8200, False)])
def test_a_unit_that_is_not_split_is_in_what_is_said_of_rounding(per_unit: int, bounded: bool) -> None:
    """Sums over B records of 4 positions are bounded where 4 B^2 <= 2^28, and B is a whole unit."""
    slots, execution = 8201, hush.Execution(physical_batch=2)
    units = hush.Units(owners=[0] * (slots - 1) + [1], per_unit=per_unit)
    step = helpers.step_of(Sequences(), units=units, execution=execution)
    data = (torch.ones(slots, 4, dtype=torch.long), torch.arange(slots) % 2)
    step.probe(data)
    assert step.rounding_bounded is bounded


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused_before_anything_is_spent(value: float) -> None:
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), last)
    with torch.no_grad():
        last.bias[0] = value
    step = step_of(model)
    with pytest.raises(Unsupported, match=r"1\.bias has a weight that is NaN or infinite"):
        step.batches((torch.randn(RECORDS, 3), TARGETS))
    assert not step.ledger.counts


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x if x.sum() > 0 else -x)
        return output


def test_a_model_that_runs_one_record_at_a_time_is_warned_of() -> None:
    step = step_of(Branching(), 6)
    with pytest.warns(hush.PrivacyWarning, match="one record at a time.*vectorize_attention"):
        run(step, labels())
    assert step.arithmetic == "assumed"
