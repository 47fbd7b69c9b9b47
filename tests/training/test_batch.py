import torch

from hush.training.batch import Batch

X, Y = torch.arange(10.0)[:, None], torch.arange(10)


def test_physical_batches_cover_the_logical_one_in_order() -> None:
    batch = Batch(torch.tensor([1, 4, 5, 8, 9]), (X, Y), physical=2)
    parts = [(inputs.flatten().tolist(), targets.tolist()) for inputs, targets in batch]
    assert parts == [([1, 4], [1, 4]), ([5, 8], [5, 8]), ([9], [9])]
    assert len(batch) == 5


def test_an_empty_batch_has_no_parts() -> None:
    assert list(Batch(torch.tensor([], dtype=torch.long), (X, Y), physical=2)) == []
