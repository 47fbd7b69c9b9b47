"""Steps whose noise is laid over blocks, and whose coordinates are sampled."""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.training.step import PrivateStep

RECORDS, WIDTH, CLASSES = 32, 60, 50
LOSS = nn.CrossEntropyLoss()


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES).double()
    return model, (torch.randn(RECORDS, WIDTH).double(), torch.randint(0, CLASSES, (RECORDS,)))


def stepped(
    plan: hush.Plan, data: Any = None, seed: int = 0, steps: int = 1
) -> tuple[Tensor, PrivateStep]:
    """What the steps moved the parameters by, times the divisor: the noisy sum of one step."""
    model, usual = problem()
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    step = hush.PrivateStep(
        model,
        LOSS,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        records=RECORDS,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(seed)),
    )
    for batch in step.batches(data or usual, steps=steps):
        step(batch)
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return (before - after) * plan.sampling.expected(RECORDS), step


def deviation_fits(values: Tensor, deviation: float) -> bool:
    freedom = values.numel()
    share = stats.chi2.cdf(float((values / deviation).square().sum()), freedom)
    return bool(1e-4 < share < 1 - 1e-4)


def test_each_block_has_the_noise_it_is_charged_for() -> None:
    plan = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.Subspaces(ranks=(1000, 2000, 50), l2=(1e-9, 2e-9, 3e-9)),
        noise=hush.BlockGaussian(multipliers=(1e9, 2e9, 1e10)),
    )
    # clipped to nothing beside the noise, which is what remains
    moved, _ = stepped(plan)
    blocks = moved.split([1000, 2000, 50])
    for block, deviation in zip(blocks, (1.0, 4.0, 30.0), strict=True):
        assert deviation_fits(block, deviation)
        assert stats.kstest(block.numpy() / deviation, "norm").pvalue > 1e-4
    assert not deviation_fits(blocks[0], 1.2)
    assert not deviation_fits(blocks[1], 1.0), "the noise of another block"
    # independent between blocks and within one
    assert abs(float(torch.corrcoef(torch.stack([blocks[0], blocks[1][:1000]]))[0, 1])) < 0.13


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_coordinates_are_sampled_record_by_record_and_divided_by_the_rate(rate: float) -> None:
    plan = hush.Plan(
        sampling=hush.Coordinate(rate=rate),
        clipping=hush.Linf(norm=1e-6),
        noise=hush.Gaussian(multiplier=1e-9),
    )
    _, (inputs, targets) = problem()
    record = (inputs[:1].expand(RECORDS, -1), targets[:1].expand(RECORDS))
    # every number of the gradient is cut off at the norm, the same one: sums count who took part
    moved = stepped(plan, record)[0].abs() / 1e-6
    counts = moved.round()
    torch.testing.assert_close(moved, counts, atol=1e-3, rtol=0)
    assert len(counts) > 1000
    mean = float(counts.sum()) / (len(counts) * RECORDS)
    assert abs(mean - rate) < 4 * math.sqrt(rate * (1 - rate) / (len(counts) * RECORDS))
    spread = float(counts.var()) / (RECORDS * rate * (1 - rate))
    assert 0.8 < spread < 1.2, "all coordinates of a record together would spread far more"
    assert plan.sampling.expected(RECORDS) == RECORDS * rate


def test_one_record_moves_the_sum_within_its_balls() -> None:
    for clipping in (
        hush.L2Linf(l2=0.5, linf=0.02),
        hush.Subspaces(ranks=(1000, 2050), l2=(0.3, 0.1), linf=(0.02, 0.01)),
    ):
        plan = hush.Plan(
            sampling=hush.Coordinate(rate=0.5), clipping=clipping, noise=hush.Gaussian(multiplier=1e-9)
        )
        _, (inputs, targets) = problem()
        inputs = inputs.clone()
        inputs[-1] = 0.0  # the last record alone differs, so that all masks before it are the same
        without, _ = stepped(plan, (inputs, targets))
        inputs[-1] = 3.0
        moved = stepped(plan, (inputs, targets))[0] - without
        assert torch.count_nonzero(moved) > 100
        start = 0
        for ball in clipping.sensitivity(len(moved)):
            part = moved[start : start + (ball.dimension or 0)]
            start += len(part)
            # replaced: one record taken away and one added
            assert float(part.norm()) <= 2 * ball.norm * 1.001
            assert float(part.abs().max()) <= 2 * ball.max_entry * 1.001


def test_replay_does_not_repeat_the_sampling_of_coordinates() -> None:
    model, _ = problem()
    plan = hush.Plan(
        sampling=hush.Twice(rate=0.5, coordinate_rate=0.25),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1.0),
    )
    with pytest.raises(Unsupported, match="coordinates take part"):
        hush.PrivateStep(
            model,
            LOSS,
            torch.optim.SGD(model.parameters(), lr=1.0),
            plan,
            records=RECORDS,
            execution=hush.Execution(replay=True),
            randomness=hush.Randomness(secure=True),
        )
