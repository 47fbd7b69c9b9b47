"""A process group of one rank: scripts for several run there, too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import hush
from hush.core.errors import InvalidValue

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1e-9)
)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of all processes, which is this one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(*, shard: bool = False, sharded: bool = False) -> list[Tensor]:
    """Weights after three steps on all records."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.5),
        PLAN,
        records=len(X),
        distributed=hush.Distributed(shard=shard),
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(3)),
    )
    for batch in step.batches((X, Y), steps=3):
        step(batch)
    assert len(step.ledger.counts) == 1
    return [getattr(value, "full_tensor", value.detach)() for value in model.parameters()]


@pytest.mark.usefixtures("one_rank")
def test_the_part_of_the_only_rank_is_all() -> None:
    for part, whole in zip(trained(shard=True), trained(), strict=True):
        assert torch.equal(part, whole)


@pytest.mark.usefixtures("one_rank")
def test_shards_of_one_rank_are_trained_as_the_whole() -> None:
    for shard, whole in zip(trained(sharded=True), trained(), strict=True):
        torch.testing.assert_close(shard, whole, rtol=1e-5, atol=1e-6)


def test_a_part_without_a_group_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"torch\.distributed is not initialised"):
        trained(shard=True)
