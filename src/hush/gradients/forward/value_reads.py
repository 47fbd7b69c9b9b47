"""Rules for calls that read values of a record, also where no gradient is recorded.

Where truth values differ, the batch is computed once for each branch, and a record that is read as a
number is computed alone (`run_by_branch`), as is one whose values decide on a shape (`general`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

if TYPE_CHECKING:
    from hush.gradients.forward.interception import Recording


def truth_value(recording: "Recording", value: Tensor) -> Any:
    """The rule for `if value:`."""
    if not is_batchedtensor(value):
        return NotImplemented
    return recording.path.truth_value(recording.by_record(value))


def number(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule for a function that turns a tensor into numbers."""

    def rule(recording: "Recording", value: Tensor) -> Any:
        if not is_batchedtensor(value):
            return NotImplemented
        recording.path.check_alone(recording.records)
        return function(recording.by_record(value)[0])

    return rule


def set_item(recording: "Recording", values: Tensor, index: Any, new: Any) -> Any:
    """The rule for `values[mask] = new` where `new` is the same at every entry of the mask."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not is_batchedtensor(index):
        return NotImplemented
    trailing = values.dim() - index.dim()
    if isinstance(new, Tensor) and new.dim() > trailing:
        return NotImplemented
    with recording:
        values.copy_(torch.where(index.reshape(*index.shape, *[1] * trailing), new, values))
    return None


def reduce_per_record(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The rule for a reduction that torch's batching rule takes over all records together."""

    def rule(recording: "Recording", value: Tensor) -> Any:
        if not is_batchedtensor(value):
            return NotImplemented
        with recording:
            return function(value)

    return rule


_ALL_TRUE, _ANY_TRUE = (
    (getattr(torch, name), getattr(Tensor, name), operator, operator.default)
    for name, operator in (
        ("_is_all_true", torch.ops.aten._is_all_true),
        ("_is_any_true", torch.ops.aten._is_any_true),
    )
)
_NUMBERS = (Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist)
VALUE_READS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero), truth_value),
    **{function: number(function) for function in _NUMBERS},
    **dict.fromkeys(_ALL_TRUE, reduce_per_record(torch.all)),
    **dict.fromkeys(_ANY_TRUE, reduce_per_record(torch.any)),
    Tensor.__setitem__: set_item,
}
"""Torch function to rule; one that returns NotImplemented leaves the call to the general way."""
