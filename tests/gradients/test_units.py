"""Gradients of units of privacy against the mean of gradients computed one record at a time."""

import warnings
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from hush.clipping import L2, L2Linf
from hush.gradients.losses import per_sample_loss
from hush.gradients.recording import record
from hush.gradients.tape import unit_tape
from tests.gradients.oracle import check_tape, one_at_a_time
from tests.gradients.test_layers import LAYERS

COUNTS = torch.tensor([1, 1, 2, 3, 3])
OWNERS = torch.arange(len(COUNTS)).repeat_interleave(COUNTS)
PRESENT = torch.tensor([True, False, True, False, True, True, True, False, False, False])


def of_owners(
    gradients: Tensor, reduction: str, present: Tensor | None = None, owners: Tensor = OWNERS
) -> Tensor:
    """The mean or sum over each owner's records that are present, a loop over owners."""
    rows = []
    for owner in range(int(owners.max()) + 1):
        own = owners == owner if present is None else (owners == owner) & present
        total = gradients[own].double().sum(0)
        rows.append(total / max(1, int(own.sum())) if reduction == "mean" else total)
    return torch.stack(rows).to(gradients.dtype)


def example(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(len(name))
    make, shape = LAYERS[name]
    model = nn.Sequential(make(), nn.Flatten()).to(dtype)
    records = len(OWNERS)
    inputs = torch.randn(records, *shape).to(dtype) if shape else torch.randint(0, 11, (records, 6))
    return model, inputs, torch.randint(0, model(inputs).shape[1], (records,))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_the_mean_of_its_records(
    name: str, reduction: Literal["mean", "sum"]
) -> None:
    loss = nn.CrossEntropyLoss(reduction="none")
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces that padding="same" may copy
            model, inputs, targets = example(name, dtype)
            single = one_at_a_time(model, loss, inputs, targets, len(inputs))
            tape = record(model, per_sample_loss(loss), inputs, targets)
        expected = of_owners(single, reduction)
        check_tape(unit_tape(tape, COUNTS, reduction, None), expected, tolerance)


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d, many weights", "language model, tied"])
def test_absent_records_count_for_nothing_in_a_mean(name: str) -> None:
    loss = nn.CrossEntropyLoss(reduction="none")
    model, inputs, targets = example(name, torch.float64)
    single = one_at_a_time(model, loss, inputs, targets, len(inputs))
    if inputs.is_floating_point():
        inputs[~PRESENT] = torch.nan
    tape = record(model, per_sample_loss(loss), inputs, targets)
    units = unit_tape(tape, COUNTS, "mean", PRESENT)
    check_tape(units, of_owners(single, "mean", PRESENT), 1e-10)


@pytest.mark.parametrize("clipping", [L2(0.01), L2Linf(l2=0.01, linf=0.001)])
def test_a_unit_moves_the_clipped_sum_by_the_norm_at_most(clipping: L2 | L2Linf) -> None:
    model, inputs, targets = example("linear", torch.float64)
    loss = per_sample_loss(nn.CrossEntropyLoss(reduction="none"))
    everyone = torch.ones(10, dtype=torch.bool)

    def clipped(present: Tensor) -> Tensor:
        tape = unit_tape(record(model, loss, inputs, targets), COUNTS, "sum", present)
        total = clipping.clip(tape).total
        return torch.cat([part.reshape(-1) for part in total.values()])

    whole = clipped(everyone)
    for owner in range(len(COUNTS)):
        moved = whole - clipped(everyone & (owner != OWNERS))
        assert moved.norm() <= 0.01 * (1 + 1e-9)
        assert moved.norm() >= 0.001  # and not by nothing
    # records clipped one by one, and a unit's added up, would let it move the sum by more
    by_record = clipping.clip(record(model, loss, inputs, targets)).total
    assert torch.cat([part.reshape(-1) for part in by_record.values()]).norm() > 0.01


def test_records_that_cancel_within_a_unit_leave_no_rounding_in_other_units() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 200, bias=False)
    inputs = torch.randn(8, 8)
    inputs[7] = inputs[6]
    scale = torch.cat([torch.ones(6), torch.tensor([1e6, -1e6])])
    counts = torch.tensor([2, 2, 2, 2])

    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1) * targets

    def clipped(present: Tensor) -> Tensor:
        tape = unit_tape(record(model, scaled, inputs, scale), counts, "mean", present)
        assert tape.rounding_bounded(8)
        return L2(1.0).clip(tape).total["weight"].reshape(-1)

    last = torch.arange(8) >= 6
    single = one_at_a_time(model, scaled, inputs, scale, 8).double()
    exact = of_owners(single, "mean", owners=torch.arange(4).repeat_interleave(2))[:3]
    expected = (1 / exact.norm(dim=1)).clamp(max=1) @ exact
    # fused multiply-add leaves the unit itself a rounding error, which its norm counts
    own = clipped(last)
    assert own.norm() <= 1
    torch.testing.assert_close(clipped(~last), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(clipped(torch.ones_like(last)) - own, expected, rtol=0, atol=1e-5)


def test_a_unit_with_a_record_that_is_not_finite_adds_nothing() -> None:
    model, inputs, targets = example("linear", torch.float64)
    inputs[5] = torch.inf  # of the fourth owner
    loss = per_sample_loss(nn.CrossEntropyLoss(reduction="none"))
    clipped = L2(1.0).clip(unit_tape(record(model, loss, inputs, targets), COUNTS, "mean", None))
    assert int(clipped.skipped) == 1
    without = L2(1.0).clip(
        unit_tape(record(model, loss, inputs.nan_to_num(0), targets), COUNTS, "mean", OWNERS != 3)
    )
    for name, part in clipped.total.items():
        torch.testing.assert_close(part, without.total[name])
