"""User-level privacy: record-to-user map, and sampling of the records of each user."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hush.core.errors import DataError, InvalidValue, PrivacyWarning
from hush.core.guarantee import Adjacency, Neighbours
from hush.core.randomness import RandomSource, random_bits
from hush.core.value import check_count, check_kind, with_article
from hush.gradients.tape import Reduction
from hush.training.options import Units

_FAR = 0.05
"""Maximum relative difference between `records` and the true number without a warning."""

Owners = Sequence[int] | Sequence[str] | np.ndarray[Any, Any] | Tensor
"""User id of each record: integers or strings."""


@dataclass(frozen=True, eq=False)
class UnitTable:
    """Users, their records, and the maximum number of records of one user per step.

    **Guarantee.** If each sampled user contributes one clipped gradient, the privacy cost for a user
    equals the cost for a record in a record-level step: docs/guarantees/units.md.
    """

    order: Tensor
    """Record numbers, grouped by user."""
    counts: Tensor
    """Number of records of each user."""
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
        """Create a table from user ids, which are private under `ADD_REMOVE`."""
        if reduction not in ("mean", "sum"):
            raise InvalidValue(f'gradient={reduction!r} must be "mean" or "sum".', key="gradient")
        limit = check_count("per_unit", per_unit, "a sampled user has at least one record", 1, 1)
        _, unit, counts = np.unique(owner_ids(owners), return_inverse=True, return_counts=True)
        if limit > counts.max() and neighbours is not Neighbours.ADD_REMOVE:
            raise InvalidValue(
                f"per_unit={limit}, but no user has more than {counts.max()} records. Pass "
                f"per_unit={counts.max()} or less.",
                key="per_unit",
            )
        order = torch.from_numpy(np.argsort(unit, kind="stable"))
        return cls(order, torch.from_numpy(counts), limit, reduction)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def records(self) -> int:
        """Total number of records."""
        return len(self.order)

    @cached_property
    def owners(self) -> Tensor:
        """User number of each record."""
        units = torch.arange(len(self)).repeat_interleave(self.counts)
        return torch.empty_like(units).index_copy_(0, self.order, units)

    @cached_property
    def digest(self) -> str:
        """Hash of the record-to-user map and the options, which must be equal when a run resumes."""
        options = f"{self.per_unit} {self.reduction} ".encode()
        tables = self.order.numpy().tobytes() + self.counts.numpy().tobytes()
        return hashlib.sha256(options + tables).hexdigest()[:32]

    @cached_property
    def table(self) -> str:
        """Hash of the record-to-user map, independent of the user ids."""
        first = self.order[self.counts.cumsum(0) - self.counts]  # first records; the sort is stable
        return hashlib.sha256(first[self.owners].numpy().tobytes()).hexdigest()[:32]

    def draw(self, drawn: Tensor, source: RandomSource) -> tuple[Tensor, Tensor]:
        """Sample at most `per_unit` records of each drawn user.

        The sample affects only the gradient of this user, so the privacy cost does not depend on its
        distribution.

        Returns:
            Records, grouped by user in the order of increasing count, and the counts.
        """
        owned = self.counts[drawn]
        place = torch.arange(len(drawn)).repeat_interleave(owned)
        first = (self.counts.cumsum(0) - self.counts)[drawn].repeat_interleave(owned)
        rank_in_unit = torch.arange(len(place)) - (owned.cumsum(0) - owned).repeat_interleave(owned)
        shuffled = random_bits(len(place), source).cpu().argsort()
        shuffled = shuffled[
            place[shuffled].argsort(stable=True)
        ]  # grouped by user, in random order for each user
        taken = shuffled[rank_in_unit < self.per_unit]
        taken_counts = owned.clamp(max=self.per_unit)
        by_count = taken_counts.argsort(stable=True)
        rank = torch.empty_like(by_count).index_copy_(0, by_count, torch.arange(len(by_count)))
        taken = taken[rank[place[taken]].argsort(stable=True)]
        return self.order[(first + rank_in_unit)[taken]], taken_counts[by_count]


def units_of(units: Units | None, neighbours: Neighbours) -> UnitTable | None:
    """Create the table of users; None for record-level privacy."""
    if units is None:
        return None
    check_kind("units", units, Units)
    return UnitTable.of(units.owners, units.per_unit, units.gradient, neighbours)


def adjacency_of(units: UnitTable | None, neighbours: Neighbours) -> Adjacency:
    """Adjacency of a step, with the record-to-user map if it is public."""
    if units is None:
        return Adjacency(neighbours=neighbours)
    table = None if neighbours is Neighbours.ADD_REMOVE else units.table
    return Adjacency(neighbours=neighbours, per_unit=units.per_unit, owners=table)


def public_count(records: int | None, units: UnitTable | None, neighbours: Neighbours) -> int:
    """Public number of records or users, by which the update is divided."""
    if units is not None and neighbours is not Neighbours.ADD_REMOVE and records in (None, len(units)):
        return len(units)
    if records is None:
        raise InvalidValue(
            "records was not passed: the update is divided by the public number of slots, or by a "
            "public estimate under ADD_REMOVE. Pass e.g. records=60_000.",
            key="records",
        )
    if units is not None and neighbours is not Neighbours.ADD_REMOVE:
        text = f"records={records}, but there are {len(units)} distinct user ids. Leave records out."
        raise InvalidValue(text, key="records")
    return check_count("records", records, "the update is divided by it", 1)


def check_length(slots: int, records: int, units: UnitTable | None, neighbours: Neighbours) -> None:
    """Raise unless the data has the step's number of slots; warn if a public estimate is far off."""
    if units is not None and slots != units.records:
        raise DataError(
            f"the data has {slots} records, but units= has {units.records} ids. Pass one id per record."
        )
    present = slots if units is None else len(units)
    if present != records and neighbours is not Neighbours.ADD_REMOVE:
        raise DataError(
            f"the data has {present} records, but the step was made for records={records}. Pass this "
            "number of slots, with present= for missing records. If the number is private, pass "
            "neighbours=hush.Neighbours.ADD_REMOVE and a public estimate for records=."
        )
    if abs(present - records) > _FAR * records:
        warnings.warn(
            f"the data has {present} records or users, but records={records}: updates are "
            f"{present / records:.2g} times the mean. The guarantee holds; do not publish this warning.",
            PrivacyWarning,
            stacklevel=3,
        )


def bound_contributions(
    users: Sequence[Collection[int | str]] | np.ndarray[Any, Any] | Tensor, per_user: int = 1
) -> Tensor:
    """Numbers of records to train on, so that every user is in at most `per_user` of them.

    For records with several users, such as messages or photographs of several people. Records are
    accepted greedily, those with few users first. The choice depends on the ids alone. Reference:
    Ganesh, McKenna, McMahan, Smith and Wu, It's My Data Too, 2025.

    **Guarantee.** If the users of each record are public, training on the accepted records under
    zero-out or replace protects all records of one user at the cost of a group of `per_user` records:
    docs/guarantees/units.md. It does not hold under `ADD_REMOVE`.

    Args:
        users: User ids of each record: integers or strings, in the order of the records.
        per_user: Maximum number of accepted records of one user.

    Returns:
        Record numbers in increasing order.

    >>> import hush
    >>> hush.bound_contributions([{"ann", "bob"}, {"ann"}, {"bob", "eve"}]).tolist()
    [1, 2]
    """
    limit = check_count("per_user", per_user, "it is a number of records", 1, 1)
    rows: list[Any] = [ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids for ids in users]
    for slot, ids in enumerate(rows):
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Collection):
            raise DataError(
                f"users[{slot}] is {with_article(type(ids).__name__)}, not a set of ids. For one user "
                "per record, pass units=hush.Units(owners=ids, per_unit=...) instead."
            )
        if len(ids) == 0:
            raise DataError(
                f"users[{slot}] is empty: nobody in this record would be protected. Pass an id of its "
                "own for a record of an unknown person."
            )
    flat = owner_ids([each for ids in rows for each in ids]).tolist()
    ends = np.cumsum([len(ids) for ids in rows])
    owned = [set(flat[end - len(ids) : end]) for ids, end in zip(rows, ends, strict=True)]
    taken: Counter[Any] = Counter()
    accepted = []
    for slot in sorted(range(len(owned)), key=lambda slot: len(owned[slot])):
        if all(taken[each] < limit for each in owned[slot]):
            taken.update(owned[slot])
            accepted.append(slot)
    return torch.tensor(sorted(accepted))


def owner_ids(owners: Owners) -> np.ndarray[Any, Any]:
    """Validate user ids and convert them to an array."""
    if isinstance(owners, Tensor):
        owners = owners.numpy(force=True)
    # NumPy would convert a list of several types to strings, and 1 and 1.0 would differ
    values = np.asarray(owners, dtype=None if hasattr(owners, "dtype") else object)
    if values.size == 0:
        raise DataError("units is empty. Pass one id per record.")
    types = {type(value) for value in values.flat} if values.dtype == object else {values.dtype.type}
    if values.ndim == 2 or types & {list, tuple, set}:
        raise DataError(
            f"user ids of shape {values.shape} give a record several users. Train on the records of "
            "hush.bound_contributions(ids) without units=; of a table with one column, pass ids[:, 0]."
        )
    names = all(issubclass(each, str) for each in types)
    numbers = bool not in types and all(issubclass(each, int | np.integer) for each in types)
    if values.ndim != 1 or not (names or numbers):
        raise DataError(
            f"user ids of type {' and '.join(sorted(each.__name__ for each in types))} and shape "
            f"{values.shape} are not supported. Pass one integer or string per record, all of the same "
            "type."
        )
    if values.dtype != object:
        return values
    return values.astype(str) if names else np.asarray([int(value) for value in values], dtype=object)
