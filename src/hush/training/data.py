"""Access to data by slot number, and batches of slots."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hush.core.errors import DataError
from hush.core.randomness import RandomSource, Stream, fill_state, substream
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.fingerprint import fingerprint
from hush.training.records import MapStyle, check_present, has_leaves, rows_at
from hush.training.source import Source

Data = tuple[Any, Any] | MapStyle | Source
"""Inputs and targets with one row per record, a map-style data set, or data for `hush.Source`.

Inputs may also be a tuple of tensors, or a dictionary of tensors by the names of the model's arguments.
"""

_SPREAD, _SPREAD_ITEMS = 256, 8
"""Number of records in a digest, for tensors and for data sets that are read item by item."""


def prepare(data: Data, present: Tensor | None = None) -> Data:
    """Convert data other than tensors to a `Source`; `present` replaces its mask of non-empty slots."""
    if not isinstance(data, Source) and pair_of(data) is not None:
        return data
    source = as_source(data)  # an existing source keeps its workers
    return source if present is None or present is source.present else replace(source, present=present)


def occupied(data: Data, present: Tensor | None) -> Tensor | None:
    """Mask of the non-empty slots of data from `prepare`."""
    return data.present if isinstance(data, Source) else check_present(present, count(data))


def ragged(data: Data) -> bool:
    """Whether records are padded to the longest record of a physical batch (`pad_to="longest"`)."""
    return isinstance(data, Source) and data.ragged


def count(data: Data) -> int:
    """Number of records; raise if the data is empty or not map-style."""
    if not (records := len(as_source(data))):
        raise DataError("the data has no records. Pass at least one record.")
    return records


def take(data: Data, indices: Tensor, source: "RandomSource | None" = None) -> tuple[Any, Any]:
    """Inputs and targets of these slots, one row per slot.

    Data sets with random augmentation draw from a separate stream of `source` per slot. If `source` is
    None, they draw from the global generators.
    """
    if (pair := pair_of(data)) is None:
        key = None if source is None else substream(source).key
        return as_source(data).take(indices.tolist(), key)
    return _rows(pair, indices)


def _rows(pair: Sequence[Any], slots: Tensor) -> tuple[Any, Any]:
    read = partial(rows_at, slots=slots)
    return tree_map(pair[0], read), tree_map(pair[1], read)


def zero_record(data: Data) -> tuple[Any, Any]:
    """Inputs and targets of one all-zero record, with the shapes and types of the data."""
    first = take(data, torch.arange(1), Stream(torch.device("cpu"), bytes(32)))
    return tree_map(first, torch.zeros_like)  # type: ignore[no-any-return]


def as_source(data: Data) -> Source:
    """Convert data to a `Source`."""
    return data if isinstance(data, Source) else Source(data)


def describe_record(data: Data) -> str:
    """Dtypes and shapes of a record's inputs and targets, which are public."""
    inputs, targets = (list(tree_leaves(part)) for part in take(data, torch.arange(1)))
    kinds = [f"{str(part.dtype)[6:]} {tuple(part.shape[1:])}" for part in (*inputs, *targets)]
    return f"{', '.join(kinds[: len(inputs)])} -> {', '.join(kinds[len(inputs) :])}"


def data_digest(data: Data, slots: int) -> str | None:
    """Fingerprint of evenly spaced records among the first `slots`; None if two reads differ."""
    in_memory = pair_of(data) is not None
    chosen = torch.linspace(0, slots - 1, min(slots, _SPREAD if in_memory else _SPREAD_ITEMS)).long()
    reads = []
    for _ in range(1 if in_memory else 2):
        # seed the augmentation, to get equal records on every rank
        values = take(data, chosen, Stream(torch.device("cpu"), bytes(32)))
        parts = [part.cpu() for part in tree_leaves(values) if part.layout == torch.strided]
        reads.append(fingerprint(parts))
    return reads[0] if reads[0] == reads[-1] else None


def pair_of(data: Data) -> Sequence[Any] | None:
    """Inputs and targets if all are tensors in memory; otherwise None."""
    pair = data.tensors if isinstance(data, TensorDataset) else data
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return None
    both = isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)
    return pair if both or has_leaves(pair, Tensor) else None  # a `Source` reads rows of arrays


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Slots drawn for one step (sensitive).

    The layout of physical batches depends only on the draw, so empty slots keep their positions.
    """

    indices: Tensor
    data: Data
    physical: int
    present: Tensor | None = None
    """Mask of the non-empty slots of the data; None if no slot is empty."""
    counts: Tensor | None = None
    """Number of records of each drawn user, in increasing order; None for record-level privacy. The
    records of a user are consecutive in `indices`."""

    def __len__(self) -> int:
        """Number of drawn records or users."""
        return (self.indices if self.counts is None else self.counts).shape[0]

    def __repr__(self) -> str:
        return "Batch(private)"

    def __getitem__(self, *_: object) -> NoReturn:
        """Raise: a batch cannot be indexed, unpacked or iterated."""
        raise DataError("a batch is private: pass it to step(batch), which reads its records.")

    __iter__ = __getitem__

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a batch has no attribute {name!r}: it is private. Pass it to step(batch), which reads "
                "its records."
            )

    def physical_batches(
        self, source: "RandomSource | None" = None
    ) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
        """Iterate over physical batches; the records of a user are not split.

        Args:
            source: Random source for augmentation; None for the global generators.

        Yields:
            Inputs, targets, mask of non-empty slots (None if no slot is empty), and number of records
            per user (None for record-level privacy).
        """
        parts, counts = self._layout()
        rows: Iterable[tuple[Any, Any]]
        if (pair := pair_of(self.data)) is None:
            key = None if source is None else substream(source).key
            rows = as_source(self.data).batches(parts, key)
        else:
            rows = map(partial(_rows, pair), parts)
        for slots, several, (inputs, targets) in zip(parts, counts, rows, strict=True):
            yield inputs, targets, None if self.present is None else self.present[slots.cpu()], several

    def _layout(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Slots of each physical batch, and the number of slots of each user in it."""
        if self.counts is None:
            slots = self.indices.split(self.physical) if self.indices.shape[0] else ()
            return slots, [None] * len(slots)
        ends, parts, counts = self.counts.cumsum(0), [], []
        unit = slot = 0
        while unit < len(ends):
            room = slot + self.physical
            last = max(unit + 1, int(torch.searchsorted(ends, room, right=True)))
            parts.append(self.indices[slot : int(ends[last - 1])])
            counts.append(self.counts[unit:last])
            unit, slot = last, int(ends[last - 1])
        return parts, counts


def same_slots(drawn: Batch, like: Batch) -> Batch:
    """Batch of new data with the slots of an earlier draw that was not charged."""
    if count(drawn.data) != count(like.data):
        raise DataError(
            "a batch was drawn and not used, and the data had another length (which may be private "
            "and is not shown). Keep every slot: fix an invalid record, or exclude it by present=."
        )
    return replace(like, indices=drawn.indices, counts=drawn.counts)


def no_randomness(source: Stream, device: torch.device) -> None:
    """Advance the source as `own_randomness` does, if a computation draws no random numbers."""
    source.skip(3 if device.type == "cuda" else 2)


@contextmanager
def own_randomness(source: RandomSource, device: torch.device, *, host: bool = True) -> Iterator[None]:
    """Context that seeds torch's global generators from the source.

    `host` also seeds the generator of the CPU if the device is a GPU.
    """
    # seed the GPU first, so its state does not depend on `host`
    shared = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    shared += [torch.default_generator] if host or device.type == "cpu" else []
    states = [generator.get_state() for generator in shared]
    try:
        for generator in shared:
            fill_state(generator, source)
        yield
    finally:
        for generator, state in zip(shared, states, strict=True):
            generator.set_state(state)
