"""Whether ranks hold the same records: all of them in one order, or none in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset

from hush.core.errors import DataError
from hush.core.randomness import Stream
from hush.gradients.tree import tree_leaves
from hush.training.checks.disjoint import input_names
from hush.training.data import Data, as_source, count, pair_of, take
from hush.training.phases.private_gradient import fingerprint
from hush.training.sources.records import base_dataset

_SPREAD = 256
"""Records, spread over the data, that tell whether two ranks have the same data in the same order."""
_SPREAD_ITEMS = 8
"""As many of a data set that has to be asked for each of them."""
_NAMED = 2**17
"""Records of each rank's part that are named, spread over it; more take seconds."""
_CHANCE = 8
"""Equal records on two ranks for each within one of them, beyond which chance is no explanation.

Of a data set that was cut at random, as many equal pairs fall on two given ranks as within the two.
"""


@dataclass(frozen=True, eq=False)
class Names:
    """Names of the records of one rank's part; equal records have equal names."""

    names: npt.NDArray[np.int64]
    cut_from: str | None = None
    """Fingerprint of the data set that names are numbers in; None: they are hashes of inputs, which
    different people's records may share."""


def data_digest(data: Data, slots: int) -> str | None:
    """Fingerprint of some records, spread over the slots; None if they come out different each time."""
    number = _SPREAD if pair_of(data) is not None else _SPREAD_ITEMS
    chosen = torch.linspace(0, slots - 1, min(slots, number)).long()

    def read() -> str:
        # a data set that draws gives the same records under the same randomness, on every rank
        values = take(data, chosen, Stream(torch.device("cpu"), bytes(32)))
        return fingerprint([part for part in tree_leaves(values) if part.layout == torch.strided])

    first = read()
    return first if pair_of(data) is not None or read() == first else None


def record_names(data: Data, held: int) -> Names | None:
    """Names of a part's records: numbers in the data set that it was cut from, or hashes of inputs.

    Args:
        data: part of one rank.
        held: slots of it, one or more.

    Returns:
        None where every record would have to be read, which may take as long as an epoch.
    """
    source = None if pair_of(data) is not None else as_source(data)
    if source is not None and isinstance(source.dataset, Subset):
        base, indices = base_dataset(source.dataset)
        whole = replace(source, dataset=base, present=None)
        digest = data_digest(whole, count(whole))
        return None if digest is None else Names(np.asarray(indices, np.int64), digest)
    if source is not None and not source.draws_nothing:
        return None
    slots = torch.linspace(0, held - 1, min(held, _NAMED), dtype=torch.float64).long()
    return Names(np.frombuffer(b"".join(name[:8] for name in input_names(data, slots)), np.int64))


def check_unmoved(before: Sequence[Names | None], after: Sequence[Names | None]) -> None:
    """Raise if most records have changed slots since a batch was drawn, as far as that can be told.

    A record that was mended stays in its slot, whatever becomes of it. Names that several records had
    say nothing. As `check_apart`, a guard against a mistake, which depends on the private records.

    Args:
        before: of each rank's part when the batch was drawn, slot by slot.
        after: likewise, now.
    """
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old and new]
    comparable = {part.cut_from for pair in pairs for part in pair}
    if len(comparable) != 1 or any(len(old.names) != len(new.names) for old, new in pairs):
        return
    old, new = (np.concatenate([part.names for part in side]) for side in zip(*pairs, strict=True))
    names, counts = np.unique(old, return_counts=True)
    moved = (old != new) & np.isin(new, names[counts == 1])
    if moved.sum() > (old == new).sum():
        raise DataError(
            "a batch was drawn and not used, and most records are in other slots now, on other ranks "
            "or in another order: its slots would be other records', picked after the draw. Pass the "
            "records on the ranks and in the order that they were in, each mended by itself."
        )


def check_apart(parts: list[Names | None]) -> None:
    """Raise if two ranks hold records in common, as far as that can be told.

    Whether this raises depends on the private records. It is a guard against a mistake, to stop a run
    before anything is released, and not part of what is released.

    Args:
        parts: of each rank.
    """
    for (first, ours), (second, theirs) in combinations(enumerate(parts), 2):
        if ours is None or theirs is None or ours.cut_from != theirs.cut_from:
            continue
        common = len(np.intersect1d(ours.names, theirs.names))
        repeated = sum(len(part.names) - len(np.unique(part.names)) for part in (ours, theirs))
        if common > (_CHANCE * max(1, repeated) if ours.cut_from is None else 0):
            raise DataError(
                f"ranks {first} and {second} hold the same records, and shard=True says that each rank "
                "has its own: a record that several ranks hold would be drawn and counted several "
                "times, and cost more than is charged. Cut the data once, in one order and without "
                "repeating records to make parts equal (as DistributedSampler does), e.g. "
                "data[rank::ranks]; or leave shard out where every rank can read all records."
            )
