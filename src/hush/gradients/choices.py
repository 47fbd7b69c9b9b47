"""Models that decide by a value: records that decide alike can still be worked out together."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CHOICES = {
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.item,
    Tensor.is_nonzero,
    torch.is_nonzero,
}
"""Calls that turn a tensor into a number, on which Python may then decide."""


class Watching(TorchFunctionMode):
    """Notes whether a tensor was turned into a number: with several records, all would decide as one."""

    decided = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.decided = self.decided or func in CHOICES
        return func(*args, **(kwargs or {}))


class Undecided(BaseException):
    """Raised where records would go different ways; no error, so that no model takes it for one."""

    def __init__(self, values: list[object], device: torch.device) -> None:
        super().__init__("records decide differently")
        self._values = list(map(repr, values))
        self._device = device

    def groups(self) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """The records with the same value, by their numbers, and how to take them from a batch."""
        for value in dict.fromkeys(self._values):
            rows = [i for i, other in enumerate(self._values) if other == value]
            index = torch.tensor(rows, device=self._device)
            yield index, partial(_taken, index)


def agreed(each: Tensor) -> Tensor:
    """The value that all records have; raises if they do not have the same one."""
    if each[0].numel() != 1:
        raise RuntimeError("the value of a tensor with more than one element is ambiguous")
    values = each.flatten().tolist()
    if len(set(map(repr, values))) > 1:
        raise Undecided(values, each.device)
    return each.flatten()[0]


def random_state() -> list[bytes]:
    """Where torch's shared generators are."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state())
    return [state.numpy().tobytes() for state in states]


def _taken(index: Tensor, rows: Tensor) -> Tensor:
    return rows[index.to(rows.device)]
