import pytest
import torch

from hush.core.errors import DataError
from hush.training.data import Batch, check_present

X, Y = torch.arange(10.0)[:, None], torch.arange(10)
DRAWN = torch.tensor([1, 4, 5, 8, 9])


def test_physical_batches_cover_the_logical_one_in_order() -> None:
    batch = Batch(DRAWN, (X, Y), physical=2)
    parts = [(inputs.flatten().tolist(), targets.tolist()) for inputs, targets, _ in batch]
    assert parts == [([1, 4], [1, 4]), ([5, 8], [5, 8]), ([9], [9])]
    assert len(batch) == 5
    assert all(present is None for _, _, present in batch)


def test_an_empty_slot_keeps_its_place() -> None:
    present = torch.ones(10, dtype=torch.bool)
    present[4] = False
    parts = [
        (inputs.flatten().tolist(), held.tolist())
        for inputs, _, held in Batch(DRAWN, (X, Y), physical=2, present=present)
        if held is not None
    ]
    assert parts == [([1, 4], [True, False]), ([5, 8], [True, True]), ([9], [True])]


def test_an_empty_batch_has_no_parts() -> None:
    assert list(Batch(torch.tensor([], dtype=torch.long), (X, Y), physical=2)) == []


@pytest.mark.parametrize("wrong", [torch.ones(9, dtype=torch.bool), torch.ones(10), [True] * 10, 3])
def test_presence_is_said_of_each_slot(wrong: object) -> None:
    with pytest.raises(DataError, match="boolean tensor with 10 entries"):
        check_present(wrong, 10)
    assert check_present(None, 10) is None
