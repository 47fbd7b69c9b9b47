"""Several ranks on records that sources read: as on tensors, apart, and stopped together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

import hush
from hush.core.errors import DataError, HushError
from tests.training.distributed import spawned
from tests.training.distributed.problems import data_of, plan_of, seeded, step_of, weights_of


class Pairs(Dataset[Any]):
    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[0][index], self.data[1][index]


def fork_workers() -> None:
    """Start workers as a rank of torchrun does, not as this rank was started, which takes seconds."""
    torch.multiprocessing.set_start_method("fork", force=True)


def trains_on_shards(folder: Path) -> list[Tensor]:
    fork_workers()
    rank = torch.distributed.get_rank()
    inputs, targets = data_of()
    part = (inputs[:25], targets[:25]) if rank == 0 else (inputs[25:], targets[25:])
    weights = []
    for data in (part, Pairs(part), hush.Source(tuple(rows.numpy() for rows in part), workers=1)):
        step = step_of(
            randomness=hush.Randomness(generator=seeded()), distributed=hush.Distributed(shard=True)
        )
        for batch in step.batches(data, steps=3):
            step(batch)
        weights.append(weights_of(step.model))
    return weights


def shards_that_share_records(folder: Path) -> str:
    """Error for parts that overlap."""
    rank = torch.distributed.get_rank()
    inputs, targets = data_of()
    cut = Subset(Pairs((inputs, targets)), range(len(inputs))[15 * rank : 15 * rank + 25])
    step = step_of(distributed=hush.Distributed(shard=True), records=50)
    with pytest.raises(DataError) as raised:
        step.batches(hush.Source(cut, collate_fn=default_collate))
    return str(raised.value)


class Sum(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.sum(1, keepdim=True)


def ragged_on_rank_1(folder: Path) -> list[str]:
    """Arithmetic of a step on equal lengths, and of one whose records differ in length on rank 1."""
    said: list[str] = []
    rank = torch.distributed.get_rank()
    for more in (0, 3 * rank):
        inputs: Any = [torch.full((4 + more * (slot % 2),), 1.0 + rank) for slot in range(4)]
        torch.manual_seed(0)
        step = step_of(
            nn.Sequential(Sum(), nn.Linear(1, 5)),
            plan=plan_of(sampling=hush.FullBatch()),
            records=8,
            distributed=hush.Distributed(shard=True),
        )
        data: Any = Pairs((inputs, torch.arange(4)))
        for batch in step.batches(hush.Source(data, pad_to="longest") if more else data, steps=1):
            step(batch)
        said.append(step.spent(delta=1e-3).arithmetic)
    return said


class Breaking(Pairs):
    """Records that cannot be read for a while."""

    broken = False

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.broken:
            raise OSError("the file of alice")
        return super().__getitem__(index)


def unreadable_on_one_rank(folder: Path) -> tuple[str, int, bool]:
    """What is said, steps charged by then, and whether the same batch is trained on afterwards."""
    data, step, said = Breaking(data_of()), step_of(randomness=hush.Randomness(generator=seeded())), ""
    batch = next(step.batches(data))
    data.broken = torch.distributed.get_rank() == 1
    try:
        step(batch)
    except HushError as error:
        said = str(error)
    charged, data.broken = sum(step.ledger.counts.values()), False
    again = next(step.batches(data))
    return said, charged, torch.equal(again.indices, batch.indices) and step(again)


def test_ranks_do_not_hold_a_record_twice_whatever_reads_it() -> None:
    for said in spawned.run(__name__, 2)["shards_that_share_records"]:
        assert "ranks 0 and 1 hold the same records" in said


def test_ragged_records_of_one_rank_weaken_the_charge_of_all() -> None:
    assert spawned.run(__name__, 2)["ragged_on_rank_1"] == [["proved", "assumed"]] * 2


def test_a_record_that_one_rank_cannot_read_stops_all_before_the_charge() -> None:
    first, second = spawned.run(__name__, 2)["unreadable_on_one_rank"]
    assert "rank 1" in first[0]
    assert "a record could not be read: OSError" in second[0]
    for said, charged, went_on in (first, second):
        assert "alice" not in said
        assert charged == 0
        assert went_on


def test_ranks_train_on_sources_as_on_tensors() -> None:
    first, second = spawned.run(__name__, 2)["trains_on_shards"]
    assert torch.equal(first[0], second[0])
    for weights in (*first[1:], *second[1:]):
        assert torch.equal(weights, first[0])
