"""User-level privacy: record-to-owner table, and the records of a drawn owner that a step includes."""

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hush.core.errors import DataError, InvalidValue, PrivacyWarning
from hush.core.guarantee import Adjacency, Neighbours
from hush.core.randomness import RandomSource, random_bits
from hush.core.value import check_count, check_kind
from hush.gradients.tape import Reduction
from hush.training.options import Units

_FAR = 0.05
"""Share of `records` by which the number of records may differ from it without a warning."""

Owners = Sequence[int] | Sequence[str] | np.ndarray[Any, Any] | Tensor
"""The owner of each record: integers or names, one a record."""


@dataclass(frozen=True, eq=False)
class UnitTable:
    """Units of privacy (users) that own the records, and how many records of one a step takes at most.

    **Guarantee.** A step in which a drawn unit takes part with one clipped gradient costs one unit as
    much as a step of records costs one record: docs/guarantees/units.md.
    """

    order: Tensor
    """Numbers of the records, unit by unit."""
    counts: Tensor
    """Records that each unit owns."""
    per_unit: int
    reduction: Reduction

    @classmethod
    def of(
        cls,
        owners: Owners,
        per_unit: int,
        reduction: Reduction = "mean",
        neighbours: Neighbours = Neighbours.ZERO_OUT,
    ) -> "UnitTable":
        """Units of a list of owners (private under `ADD_REMOVE`), with `per_unit` records in a step."""
        if reduction not in ("mean", "sum"):
            raise InvalidValue(f'gradient={reduction!r} must be "mean" or "sum".', key="gradient")
        limit = check_count("per_unit", per_unit, "a drawn unit has one record at least", 1, 1)
        _, unit, counts = np.unique(owner_ids(owners), return_inverse=True, return_counts=True)
        if limit > counts.max() and neighbours is not Neighbours.ADD_REMOVE:
            raise InvalidValue(
                f"per_unit={limit} and no unit has more than {counts.max()} records. Pass "
                f"per_unit={counts.max()} or less.",
                key="per_unit",
            )
        order = torch.from_numpy(np.argsort(unit, kind="stable"))
        return cls(order, torch.from_numpy(counts), limit, reduction)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def records(self) -> int:
        """Records of all units together."""
        return len(self.order)

    @cached_property
    def owners(self) -> Tensor:
        """Number of the unit that owns each record, in the order of the records."""
        units = torch.arange(len(self)).repeat_interleave(self.counts)
        return torch.empty_like(units).index_copy_(0, self.order, units)

    @cached_property
    def digest(self) -> str:
        """Hash of the owners and the options; a resumed run has the same."""
        options = f"{self.per_unit} {self.reduction} ".encode()
        tables = self.order.numpy().tobytes() + self.counts.numpy().tobytes()
        return hashlib.sha256(options + tables).hexdigest()[:32]

    @cached_property
    def table(self) -> str:
        """Hash of the assignment of records to owners, independent of their names."""
        first = self.order[self.counts.cumsum(0) - self.counts]  # the sort of records is stable
        return hashlib.sha256(first[self.owners].numpy().tobytes()).hexdigest()[:32]

    def draw(self, drawn: Tensor, source: RandomSource) -> tuple[Tensor, Tensor]:
        """Records of the drawn units, unit by unit and units by rising count, and these counts.

        `per_unit` of each at random, or all that it owns. The choice affects only the unit's own
        gradient, so no charge depends on its law.
        """
        owned = self.counts[drawn]
        place = torch.arange(len(drawn)).repeat_interleave(owned)
        first = (self.counts.cumsum(0) - self.counts)[drawn].repeat_interleave(owned)
        rank_in_unit = torch.arange(len(place)) - (owned.cumsum(0) - owned).repeat_interleave(owned)
        shuffled = random_bits(len(place), source).cpu().argsort()
        shuffled = shuffled[place[shuffled].argsort(stable=True)]  # unit by unit, at random within
        taken = shuffled[rank_in_unit < self.per_unit]
        taken_counts = owned.clamp(max=self.per_unit)
        by_count = taken_counts.argsort(stable=True)
        rank = torch.empty_like(by_count).index_copy_(0, by_count, torch.arange(len(by_count)))
        taken = taken[rank[place[taken]].argsort(stable=True)]
        return self.order[(first + rank_in_unit)[taken]], taken_counts[by_count]


def units_of(units: Units | None, neighbours: Neighbours) -> UnitTable | None:
    """Table of the units that own the records; None if each record is a unit."""
    if units is None:
        return None
    check_kind("units", units, Units)
    return UnitTable.of(units.owners, units.per_unit, units.gradient, neighbours)


def adjacency_of(units: UnitTable | None, neighbours: Neighbours) -> Adjacency:
    """Adjacency of a step, with the table of owners if it is public."""
    if units is None:
        return Adjacency(neighbours=neighbours)
    table = None if neighbours is Neighbours.ADD_REMOVE else units.table
    return Adjacency(neighbours=neighbours, per_unit=units.per_unit, owners=table)


def public_count(records: int | None, units: UnitTable | None, neighbours: Neighbours) -> int:
    """Public number of units of privacy, which divides the update."""
    if units is not None and neighbours is not Neighbours.ADD_REMOVE and records in (None, len(units)):
        return len(units)
    if records is None:
        raise InvalidValue(
            "records was not passed: the divisor of the update is the public number of slots, or under "
            "ADD_REMOVE a public constant near it. Pass e.g. records=60_000.",
            key="records",
        )
    if units is not None and neighbours is not Neighbours.ADD_REMOVE:
        text = f"records={records} and the ids are of {len(units)} units. Leave records out."
        raise InvalidValue(text, key="records")
    return check_count("records", records, "the divisor of the update is a public number", 1)


def check_length(slots: int, records: int, units: UnitTable | None, neighbours: Neighbours) -> None:
    """Raise unless data has the length that a step was made for; warn if a constant is far off."""
    if units is not None and slots != units.records:
        raise DataError(
            f"the data has {slots} records and units has {units.records} ids. Pass one id per record."
        )
    present = slots if units is None else len(units)
    if present != records and neighbours is not Neighbours.ADD_REMOVE:
        raise DataError(
            f"the data has {present} records and the step was made for records={records}. Pass as many "
            "slots; a missing record leaves its slot empty (present=). If the number is private, pass "
            "neighbours=hush.Neighbours.ADD_REMOVE and a public constant for records=."
        )
    if abs(present - records) > _FAR * records:
        warnings.warn(
            f"the data has {present} units and records={records}: an update is {present / records:.2g} "
            "times as long as the mean. The guarantee holds, and this warning is not to be published.",
            PrivacyWarning,
            stacklevel=3,
        )


def owner_ids(owners: Owners) -> np.ndarray[Any, Any]:
    """Owners as a vector of integers or names; raise for anything else."""
    if isinstance(owners, Tensor):
        owners = owners.numpy(force=True)
    # numpy would turn a list of several types into text, and 1 and 1.0 would differ
    values = np.asarray(owners, dtype=None if hasattr(owners, "dtype") else object)
    if values.size == 0:
        raise DataError("units is empty. Pass one id per record.")
    types = {type(value) for value in values.flat} if values.dtype == object else {values.dtype.type}
    if values.ndim == 2 or types & {list, tuple, set}:
        raise DataError(
            f"units of shape {values.shape} give a record several owners, and it is clipped with one. "
            "Give it to one owner by a rule independent of the records; of a table with one column, "
            "pass the column, ids[:, 0]."
        )
    names = all(issubclass(each, str) for each in types)
    numbers = bool not in types and all(issubclass(each, int | np.integer) for each in types)
    if values.ndim != 1 or not (names or numbers):
        raise DataError(
            f"units of type {' and '.join(sorted(each.__name__ for each in types))} and shape "
            f"{values.shape} do not identify owners. Pass one integer or string a record, all of one "
            "type."
        )
    if values.dtype != object:
        return values
    return values.astype(str) if names else np.asarray([int(value) for value in values], dtype=object)
