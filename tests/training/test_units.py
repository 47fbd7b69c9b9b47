"""Whose the records are, and which of them take part."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hush.core.errors import DataError
from hush.core.randomness import source_for
from hush.training.units import UnitTable

OWNERS = ["b", "a", "c", "a", "a", "b", "d"]  # a owns 3, b 2, c and d 1


def source(seed: int = 0) -> Any:
    return source_for(torch.device("cpu"), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "owners",
    [
        OWNERS,
        np.array(OWNERS),
        np.array(OWNERS, dtype=object),
        [1, 0, 2, 0, 0, 1, 3],
        torch.tensor([7, -1, 8, -1, -1, 7, 9]),
        [np.uint64(2**64 - 3), 1, np.uint64(2**64 - 2), np.int8(1), 1, 2**64 - 3, 2**70],
    ],
)
def test_records_are_grouped_by_equal_ids(owners: Any) -> None:
    units = UnitTable.of(owners, 3)
    assert len(units) == 4
    assert units.records == 7
    assert units.owners.tolist() == [1, 0, 2, 0, 0, 1, 3]
    rows, counts = units.draw(torch.arange(4), source())
    assert counts.tolist() == [1, 1, 2, 3]
    own = [sorted(part.tolist()) for part in rows.split(counts.tolist())]
    assert own == [[2], [6], [0, 5], [1, 3, 4]]


def test_a_drawn_unit_takes_part_with_few_of_its_own_records_alone() -> None:
    units = UnitTable.of(OWNERS, 2)
    generator = source()
    taken: Counter[int] = Counter()
    for _ in range(600):
        rows, counts = units.draw(torch.tensor([0, 2]), generator)  # a and c
        assert counts.tolist() == [1, 2]
        assert int(rows[0]) == 2
        own = rows[1:].tolist()
        assert len(set(own)) == 2
        assert set(own) <= {1, 3, 4}
        taken.update(own)
    # each of a's three records in two of three steps; 5 standard deviations
    assert all(abs(taken[row] - 400) < 5 * (600 * 2 / 9) ** 0.5 for row in (1, 3, 4))


@pytest.mark.parametrize(
    ("owners", "error", "text"),
    [
        ([], DataError, "empty"),
        ([[1, 2], [1, 3]], DataError, "several users"),
        ([0.5, 1.0], DataError, "type float"),
        (np.array([0.5, 1.0]), DataError, "type float64"),
        (["u1", float("nan")], DataError, "type float and str"),
        ("abc", DataError, "shape ()"),
        ([[1], [2, 3]], DataError, "several users"),
        (torch.zeros(3, 1).long(), DataError, "pass ids[:, 0]"),
    ],
)
def test_ids_that_say_nothing_of_owners_are_refused(owners: Any, error: Any, text: str) -> None:
    with pytest.raises(error) as caught:
        UnitTable.of(owners, 1)
    assert text in str(caught.value)
