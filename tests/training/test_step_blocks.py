"""Steps whose noise is laid over blocks, and whose coordinates are sampled."""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from tests.training.helpers import plan_of, run, step_of, weights_of

RECORDS, WIDTH, CLASSES = 32, 60, 50


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES).double()
    return model, (torch.randn(RECORDS, WIDTH).double(), torch.randint(0, CLASSES, (RECORDS,)))


def noisy_sum(plan: hush.Plan, data: Any = None) -> Tensor:
    """What one step moved the parameters by, times the divisor."""
    model, usual = problem()
    before = weights_of(model)
    run(step_of(model, plan, lr=1.0, seed=0, records=RECORDS), data or usual)
    return (before - weights_of(model)) * plan.sampling.expected(RECORDS)


def deviation_fits(values: Tensor, deviation: float) -> bool:
    freedom = values.numel()
    share = stats.chi2.cdf(float((values / deviation).square().sum()), freedom)
    return bool(1e-4 < share < 1 - 1e-4)


def test_each_block_has_the_noise_it_is_charged_for() -> None:
    plan = plan_of(
        clipping=hush.Subspaces(ranks=(1000, 2000, 50), l2=(1e-9, 2e-9, 3e-9)),
        noise=hush.BlockGaussian(multipliers=(1e9, 2e9, 1e10)),
    )
    # clipped to nothing beside the noise, which is what remains
    blocks = noisy_sum(plan).split([1000, 2000, 50])
    for block, deviation in zip(blocks, (1.0, 4.0, 30.0), strict=True):
        assert deviation_fits(block, deviation)
        assert stats.kstest(block.numpy() / deviation, "norm").pvalue > 1e-4
    assert not deviation_fits(blocks[0], 1.2)
    assert not deviation_fits(blocks[1], 1.0), "the noise of another block"
    # independent between blocks and within one
    assert abs(float(torch.corrcoef(torch.stack([blocks[0], blocks[1][:1000]]))[0, 1])) < 0.13


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_coordinates_are_sampled_record_by_record_and_divided_by_the_rate(rate: float) -> None:
    plan = plan_of(hush.Coordinate(rate=rate), hush.Linf(1e-6), 1e-9)
    _, (inputs, targets) = problem()
    record = (inputs[:1].expand(RECORDS, -1), targets[:1].expand(RECORDS))
    # every number of the gradient is cut off at the norm, the same one: sums count who took part
    moved = noisy_sum(plan, record).abs() / 1e-6
    counts = moved.round()
    torch.testing.assert_close(moved, counts, atol=1e-3, rtol=0)
    assert len(counts) > 1000
    mean = float(counts.sum()) / (len(counts) * RECORDS)
    assert abs(mean - rate) < 4 * math.sqrt(rate * (1 - rate) / (len(counts) * RECORDS))
    spread = float(counts.var()) / (RECORDS * rate * (1 - rate))
    assert 0.8 < spread < 1.2, "all coordinates of a record together would spread far more"
    assert plan.sampling.expected(RECORDS) == RECORDS * rate


def test_replay_does_not_repeat_the_sampling_of_coordinates() -> None:
    options: dict[str, Any] = {"execution": hush.Execution(replay=True)}
    with pytest.raises(Unsupported, match="sampled coordinates"):
        step_of(problem()[0], plan_of(hush.Twice(rate=0.5, coordinate_rate=0.25)), records=8, **options)
