"""Models that decide by a value: each record decides for itself, in a batch of the same shape."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hush.core.errors import Unsupported
from hush.gradients.tree import tree_leaves, tree_map

CONDITIONS = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}
"""Calls that turn a tensor into true or false, on which Python may then decide."""

NUMBERS = {Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item}
"""Calls that turn a tensor into a number, which Python may then compute with."""

T = TypeVar("T")


class Watching(TorchFunctionMode):
    """Notes whether a tensor was turned into a truth value or a number."""

    decided = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.decided = self.decided or func in CONDITIONS or func in NUMBERS
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Some records of a batch that were worked out together, and where they were."""

    rows: Tensor
    """Which records of the batch."""
    places: Tensor
    """Which places of the batch that was worked out; the others held copies and count for nothing."""

    def spread(self, values: Tensor, size: int) -> Tensor:
        """Values of the whole batch at these places of a batch of `size`, zero elsewhere."""
        return values.new_zeros(size).index_put((self.places,), values[self.rows])


class DataDependentBranch(BaseException):
    """Raised where records would go different ways; no error, so that no model takes it for one.

    `values` are what each record decides by, None if every record is to be worked out alone.
    """

    def __init__(self, values: list[bool] | None) -> None:
        super().__init__("records decide differently")
        self.values = values


def by_decision(
    run: Callable[[Any, Any], T], inputs: Any, targets: Any, copied: Tensor | None = None
) -> "list[tuple[SubBatch, T]]":
    """Results of `run` for parts of a batch whose records decide alike, every record in one part.

    **Guarantee.** What is computed for a record is a function of that record, its place and the size of
    the batch: others are replaced by copies of one that decides alike, not taken out, because a
    kernel rounds by place and shape. A record whose decision is a number is worked out alone.

    Args:
        run: computes something for a batch; raises `Undecided` where its records decide differently.
        inputs: of the batch.
        targets: of the batch.
        copied: which record each place holds a copy of, where some were replaced.
    """
    first = next(tree_leaves(inputs))
    everyone = torch.arange(len(first), device=first.device)
    before = random_state()
    try:
        return [(SubBatch(everyone, everyone), run(inputs, targets))]
    except DataDependentBranch as choice:
        values = choice.values
    if values is not None and copied is not None:
        _check_not_by_chance(values, copied)
    found = []
    for rows, source in _groups(values, everyone):
        if values is not None:
            _set_random_state(before)  # whichever way a record goes, it draws what its place would
        taken = tree_map((inputs, targets), partial(_taken, source))
        for part, result in by_decision(run, taken[0], taken[1], source):
            if values is None:  # the only record of its batch
                found.append((SubBatch(rows, part.places), result))
                continue
            kept = torch.isin(part.rows, rows)
            if bool(kept.any()):
                found.append((SubBatch(part.rows[kept], part.places[kept]), result))
    return found


def _groups(values: list[bool] | None, everyone: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Records that go one way, and which record to put at each place of the batch for it."""
    if values is None:
        yield from ((row, row) for row in everyone.split(1))
        return
    answers = torch.tensor(values, device=everyone.device)
    for way in (True, False):
        rows = everyone[answers == way]
        if len(rows):
            yield rows, everyone.where(answers == way, rows[0])


def _check_not_by_chance(values: list[bool], copied: Tensor) -> None:
    """Raise if copies of one record decide differently: then it is not the record that decides."""
    seen: dict[int, bool] = {}
    for value, record in zip(values, copied.tolist(), strict=True):
        if seen.setdefault(record, value) != value:
            raise Unsupported(
                "the model decides by a value that it has drawn at random: records that decide alike "
                "are worked out together, and would draw something else. Decide before drawing, or with "
                "torch.where."
            )


def agreed(values: Tensor) -> Tensor:
    """The truth value that all records have; raises `Undecided` if they do not have the same one."""
    if values[0].numel() != 1:
        raise RuntimeError("the value of a tensor with more than one element is ambiguous")
    answers = values.flatten().bool().tolist()
    if len(set(answers)) > 1:
        raise DataDependentBranch(answers)
    return values.flatten()[0]


def alone(values: Tensor) -> Tensor:
    """The only record's number; raises `Undecided` where there are several."""
    if len(values) > 1:
        raise DataDependentBranch(None)
    return values[0]


def random_state() -> list[Tensor]:
    """States of torch's shared generators."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_random_state(states: list[Tensor]) -> None:
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def _taken(index: Tensor, rows: Tensor) -> Tensor:
    return rows[index.to(rows.device)]
