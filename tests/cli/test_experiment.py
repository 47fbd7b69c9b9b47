"""Signal-to-noise ratio of a run."""

import math

import pytest
import torch

import hush
from hush.accounting.planning import signal_to_noise
from hush.core.parts import Clipping, Noise, Sampling


@pytest.mark.parametrize(
    ("sampling", "clipping", "noise"),
    [
        (hush.Poisson(0.5), hush.L2(3.0), hush.Gaussian(2.0)),
        (hush.FullBatch(), hush.Lp(p=1.0, norm=3.0), hush.Laplace(2.0)),
        (hush.FullBatch(), hush.L2(3.0), hush.GeneralizedGaussian(beta=4.0, multiplier=2.0)),
        (hush.Twice(rate=0.5, coordinate_rate=0.5), hush.Linf(0.1), hush.Gaussian(5.0)),
        (hush.FullBatch(), hush.Linf(0.1), hush.Rectified(scale=5.0, bound=1e6)),
        (
            hush.FullBatch(),
            hush.Subspaces(ranks=[1000, 3000], l2=[1.0, 2.0]),
            hush.BlockGaussian(multipliers=[1.0, 5.0]),
        ),
    ],
)
def test_against_a_draw_of_the_noise(sampling: Sampling, clipping: Clipping, noise: Noise) -> None:
    plan = hush.Plan(sampling=sampling, clipping=clipping, noise=noise)
    records, steps, dimension = 40, 9, 4000
    source = torch.Generator().manual_seed(0)
    blocks = clipping.sensitivity(dimension)
    drawn = [
        law.privatize(torch.zeros(block.size, dtype=torch.float64), norm=norm, generator=source)
        for block, (law, norm) in zip(
            blocks, noise.per_block(blocks, clipping.reference_norm), strict=True
        )
    ]
    signal = math.sqrt(sum(block.l2_radius**2 for block in blocks)) * records
    signal *= sampling.participation * sampling.coordinate_participation
    expected = steps * signal / (math.sqrt(steps) * float(torch.cat(drawn).norm()))
    ratio = signal_to_noise(plan, records=records, steps=steps, dimension=dimension)
    assert ratio == pytest.approx(expected, rel=0.05)
