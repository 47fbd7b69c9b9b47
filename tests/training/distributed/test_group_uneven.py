"""Shares and parts of unequal size, or empty, in another order on each rank, and read by sources."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, Subset, TensorDataset

import hush
from hush.training.data import Batch
from tests.training.distributed import spawned
from tests.training.distributed.problems import RECORDS, data_of, plan_of, step_of, train
from tests.training.distributed.spawned import Raised
from tests.training.helpers import seeded

DRAWN = (0, 1, 2, 5, 11, RECORDS)
"""Slots of a batch, for two ranks and physical batches of 5: none, one rank's alone, uneven, all."""
SELECTIVE = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=0.0)


def drawn_by_hand(step: hush.PrivateStep, data: Any, sizes: tuple[int, ...]) -> list[Tensor]:
    """Updates of steps whose batches are the last slots of the data, so many of them."""
    wanted = iter(sizes)

    def draw(like: Batch, sampling: Any = None) -> Batch:
        return replace(like, indices=torch.arange(RECORDS - next(wanted), RECORDS))

    step.draw = draw  # type: ignore[method-assign]
    updates = []
    for batch in step.batches(data, steps=len(sizes)):
        step(batch)
        assert step.update is not None
        updates.append(step.update.clone())
    return updates


def sums_of(step: hush.PrivateStep, data: Any) -> list[Tensor]:
    step.batches(data)
    empty = Batch(torch.arange(0), data, 5)
    return [
        step.clipped_sum(replace(empty, indices=torch.arange(RECORDS - size, RECORDS))).clone()
        for size in DRAWN
    ]


def part_of(cut: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the data, before or after the cut."""
    inputs, targets = data_of()
    own = slice(cut, RECORDS) if dist.get_rank() else slice(0, cut)
    return inputs[own], targets[own]


def shares(folder: Path) -> dict[str, Any]:
    step = step_of(seed=0)
    sums = sums_of(step, data_of())
    updates = drawn_by_hand(step_of(seed=0), data_of(), DRAWN)
    return {"sums": sums, "updates": updates}


def parts(folder: Path) -> dict[str, Any]:
    """39 records and 1: batches of the last slots are of rank 1 alone, and then nearly all of rank 0."""
    data = part_of(39)
    steps = [step_of(distributed=hush.Distributed(shard=True), seed=0) for _ in range(2)]
    return {"updates": drawn_by_hand(steps[0], data, DRAWN), "sums": sums_of(steps[1], data)}


def trained_in_parts(shared: Path, cut: int, plan: hush.Plan) -> dict[str, Any]:
    """A run, and the same run after a restart."""
    results = []
    for resume in (False, True):
        weights, trained = train(
            5 if resume else 3,
            plan,
            part_of(cut),
            checkpoints=hush.Checkpoints(directory=shared / "run", resume=resume),
            logging=hush.Logging(every=2),
            distributed=hush.Distributed(shard=True),
        )
        results.append((weights, trained.guarantee.records))
    return {"weights": results[-1][0], "records": results[-1][1]}


def nothing_on_rank_0(folder: Path) -> dict[str, Any]:
    return trained_in_parts(folder, 0, plan_of())


def no_verdict_of_rank_1(folder: Path) -> dict[str, Any]:
    return trained_in_parts(folder, RECORDS, plan_of(release=SELECTIVE))


def half_of(seed: int) -> list[int]:
    """This rank's half of the records in a random order."""
    return torch.randperm(RECORDS, generator=seeded(seed)).chunk(2)[dist.get_rank()].tolist()


def subsets_of_two_orders(folder: Path) -> None:
    subset = Subset(TensorDataset(*data_of()), list(range(RECORDS)))
    data = Subset(subset, half_of(dist.get_rank()))
    step_of(distributed=hush.Distributed(shard=True)).batches(data)


def evened_out(folder: Path) -> None:
    """39 records on two ranks, as torch's sampler hands them out: 20 each, and one of them twice."""
    whole = TensorDataset(*data_of(records=39))
    sampler: DistributedSampler[Any] = DistributedSampler(
        whole, num_replicas=2, rank=dist.get_rank(), shuffle=False
    )
    step_of(distributed=hush.Distributed(shard=True)).batches(Subset(whole, list(sampler)))


def halves_of_one_order(folder: Path) -> None:
    data = Subset(TensorDataset(*data_of()), half_of(0))
    step_of(distributed=hush.Distributed(shard=True)).batches(data)


class Pairs(Dataset[Any]):
    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[0][index], self.data[1][index]


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


result = partial(spawned.result, __name__, 2)


@pytest.mark.parametrize("name", ["shares", "parts"])
def test_unequal_and_empty_shares_make_the_sum_of_one_process(name: str) -> None:
    first, second = result(name)
    one = sums_of(step_of(seed=0), data_of())
    for ours, theirs, whole in zip(first["sums"], second["sums"], one, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["nothing_on_rank_0", "no_verdict_of_rank_1"])
def test_a_rank_without_records_adds_its_noise_and_moves_with_the_others(name: str) -> None:
    first, second = result(name)
    assert torch.equal(first["weights"], second["weights"])
    assert first["records"] == second["records"] == RECORDS


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("subsets_of_two_orders", "ranks 0 and 1 hold the same records"),
        ("evened_out", "without repeating records to make parts equal"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_on_every_rank(name: str, words: str) -> None:
    for raised in result(name):
        assert isinstance(raised, Raised), raised
        assert raised.kind in ("DataError", "ProcessFailed")
        assert words in raised.text


def test_parts_without_a_record_in_common_are_taken() -> None:
    assert result("halves_of_one_order") == [None, None]


def test_ragged_records_of_one_rank_weaken_the_charge_of_all() -> None:
    assert result("ragged_on_rank_1") == [["proved", "assumed"]] * 2
