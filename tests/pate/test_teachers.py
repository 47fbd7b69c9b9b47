"""Which teacher a record goes to depends on nothing but the record."""

import pytest
import torch

from hush.core.errors import DataError, InvalidValue
from hush.pate.teachers import teacher_of


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, 4, 4, generator=generator), torch.arange(count) % 10


def test_removing_a_record_moves_no_other_one() -> None:
    x, y = records(200)
    before = teacher_of(x, y, 7)
    for gone in (0, 57, 199):
        remaining = torch.arange(200) != gone
        assert torch.equal(teacher_of(x[remaining], y[remaining], 7), before[remaining])
    shuffled = torch.randperm(200)
    assert torch.equal(teacher_of(x[shuffled], y[shuffled], 7), before[shuffled])


def test_shares_are_of_about_equal_size_and_the_label_counts() -> None:
    x, y = records(5000)
    sizes = torch.bincount(teacher_of(x, y, 10), minlength=10)
    assert int(sizes.min()) > 400
    assert int(sizes.max()) < 600
    assert not torch.equal(teacher_of(x, y, 10), teacher_of(x, (y + 1) % 10, 10))


def test_more_teachers_than_records_are_refused() -> None:
    with pytest.raises(DataError, match=r"teachers=30 is more than the 20 records"):
        teacher_of(*records(20), 30)
    with pytest.raises(InvalidValue, match="teachers=1 must be"):
        teacher_of(*records(20), 1)
