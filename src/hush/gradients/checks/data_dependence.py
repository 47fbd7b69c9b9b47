"""Data-dependent control flow: each record takes its own branch, in a batch of the same shape."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hush.core.errors import Unsupported
from hush.gradients.tree import tree_leaves, tree_map

CONDITIONS = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}
"""Calls that turn a tensor into a truth value, on which Python may then branch."""

NUMBERS = {Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item}
"""Calls that turn a tensor into a number, which Python may then compute with."""

T = TypeVar("T")


class ValueReadDetector(TorchFunctionMode):
    """Notes whether a tensor was turned into a truth value or a number."""

    reads_values = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads_values = self.reads_values or func in CONDITIONS or func in NUMBERS
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class SubBatch:
    """Records of a batch that took the same branch, and their places in the batch computed for it."""

    rows: Tensor
    """Which records of the batch."""
    places: Tensor
    """Their places in the computed batch; the other places held copies and count for nothing."""

    def spread(self, values: Tensor, size: int) -> Tensor:
        """Values of the whole batch at these places of a batch of `size`, zero elsewhere."""
        return values.new_zeros(size).index_put((self.places,), values[self.rows])


class DataDependentBranch(BaseException):
    """Raised where records branch differently; no error, so that no model catches it as one.

    `values` are the truth values by record, None if every record is to be computed alone.
    """

    def __init__(self, values: list[bool] | None) -> None:
        super().__init__("records decide differently")
        self.values = values


def run_by_branch(
    run: Callable[[Any, Any], T], inputs: Any, targets: Any, copied: Tensor | None = None
) -> "list[tuple[SubBatch, T]]":
    """Results of `run` for sub-batches whose records take the same branches; they partition the batch.

    **Guarantee.** What is computed for a record is a function of that record, its place and the size of
    the batch: others are replaced by copies of one that branches as it does, not taken out, because a
    kernel rounds by place and shape. A record that is read as a number is computed alone.

    Args:
        run: computes something for a batch; raises `DataDependentBranch` where its records branch
            differently.
        inputs: of the batch.
        targets: of the batch.
        copied: which record each place holds a copy of, where some were replaced.
    """
    first = next(tree_leaves(inputs))
    indices = torch.arange(len(first), device=first.device)
    before = random_state()
    try:
        return [(SubBatch(indices, indices), run(inputs, targets))]
    except DataDependentBranch as branch:
        values = branch.values
    if values is not None and copied is not None:
        _check_deterministic(values, copied)
    results = []
    for rows, source in _branches(values, indices):
        if values is not None:
            set_random_state(before)  # whichever branch a record takes, it draws what its place would
        some_inputs, some_targets = tree_map((inputs, targets), partial(_take_rows, source))
        for part, result in run_by_branch(run, some_inputs, some_targets, source):
            if values is None:  # the only record of its batch
                results.append((SubBatch(rows, part.places), result))
                continue
            in_branch = torch.isin(part.rows, rows)
            if bool(in_branch.any()):
                sub_batch = SubBatch(part.rows[in_branch], part.places[in_branch])
                results.append((sub_batch, result))
    return results


def gather_records(parts: "list[tuple[SubBatch, Tensor]]") -> Tensor:
    """Values computed by sub-batch, in the order of the records of the whole batch."""
    values = torch.cat([computed[part.places] for part, computed in parts])
    return values[torch.cat([part.rows for part, _ in parts]).argsort()]


def _branches(values: list[bool] | None, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Records that take one branch, and which record to put at each place of the batch for it."""
    if values is None:
        yield from ((row, row) for row in indices.split(1))
        return
    by_record = torch.tensor(values, device=indices.device)
    for value in (True, False):
        rows = indices[by_record == value]
        if len(rows):
            yield rows, indices.where(by_record == value, rows[0])


def _check_deterministic(values: list[bool], copied: Tensor) -> None:
    """Raise if copies of one record branch differently: then it is not the record that decides."""
    first: dict[int, bool] = {}
    for value, record in zip(values, copied.tolist(), strict=True):
        if first.setdefault(record, value) != value:
            raise Unsupported(
                "the model decides by a value that it has drawn at random: records that decide alike "
                "are worked out together, and would draw something else. Decide before drawing, or with "
                "torch.where."
            )


def common_truth_value(values: Tensor) -> Tensor:
    """The truth value that all records share; raises `DataDependentBranch` if they differ."""
    if values[0].numel() != 1:
        raise RuntimeError("the value of a tensor with more than one element is ambiguous")
    by_record = values.flatten().bool().tolist()
    if len(set(by_record)) > 1:
        raise DataDependentBranch(by_record)
    return values.flatten()[0]


def single_record_number(values: Tensor) -> Tensor:
    """The only record's number; raises `DataDependentBranch` where there are several records."""
    if len(values) > 1:
        raise DataDependentBranch(None)
    return values[0]


def random_state() -> list[Tensor]:
    """States of torch's shared generators."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_state(states: list[Tensor]) -> None:
    """Set torch's shared generators to states that `random_state` returned."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def same_draws(model: nn.Module) -> Iterator[None]:
    """Context in which torch draws the same numbers each time; its generators are left as they were."""
    with torch.random.fork_rng({value.device for value in model.parameters() if value.is_cuda}):
        torch.manual_seed(0)
        yield


def _take_rows(index: Tensor, rows: Tensor) -> Tensor:
    return rows[index.to(rows.device)]
