"""The stages together: the published tables of twice sampling, and plain sampling as a special case."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from hush.accounting.numerics import Array
from hush.accounting.rdp import gaussian
from hush.accounting.rdp.coordinatewise import coordinatewise_rdp
from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.steps import SampledGaussian
from hush.core.parts import SensitivitySet

ORDERS = np.arange(2, 40)


def twice(deviation: float, rate: float, coordinate_rate: float) -> Array:
    """One step of twice sampling with l2 clipping at 1 and l-infinity clipping at 0.1."""
    profile = CoordinateRDP(beta=2, scale=deviation * math.sqrt(2), rate=coordinate_rate)
    ball = SensitivitySet(p=2, norm=1, cap=0.1, dimension=300_000)
    return coordinatewise_rdp([(profile, ball)], rate, ORDERS)


def needed(step: Callable[[float], Array], epsilon: float, steps: int) -> float:
    """The least deviation with which all steps keep (epsilon, 1e-5), by the paper's Lemma 2.3."""
    low, high = math.log(0.3), math.log(20)
    for _ in range(14):
        middle = (low + high) / 2
        total = steps * step(math.exp(middle)) - math.log(1e-5) / (ORDERS - 1)
        low, high = (middle, high) if total.min() > epsilon else (low, middle)
    return math.exp((low + high) / 2)


# Table 1 of the twice-sampling paper, recomputed: d0 = 100;
# both estimates are divided by n q1 q2, so the ratio of noise
# variances is that of the squared deviations.
@pytest.mark.parametrize(
    ("rate", "coordinate_rate", "ratios"),
    [
        (0.06, 1 / 3, [86.8, 86.0, 78.4, 71.0]),
        (0.02, 1 / 2, [73.1, 71.6, 61.5, 55.4]),
        pytest.param(0.04, 1 / 2, [89.2, 88.5, 82.1, 76.0], marks=pytest.mark.slow),
        pytest.param(0.03, 1 / 3, [67.4, 65.7, 53.5, 45.8], marks=pytest.mark.slow),
    ],
)
def test_the_noise_twice_sampling_needs(
    rate: float, coordinate_rate: float, ratios: list[float]
) -> None:
    targets = [(2, 1500), (2.5, 2000), (4, 2500), (8, 5000)]
    for (epsilon, steps), ratio in zip(targets, ratios, strict=True):
        plain = needed(
            lambda s: gaussian.renyi_divergence(SampledGaussian(rate * coordinate_rate, s), ORDERS),
            epsilon,
            steps,
        )
        ours = needed(lambda s: twice(s, rate, coordinate_rate), epsilon, steps)
        assert 100 * (ours / plain) ** 2 == pytest.approx(ratio, abs=0.1)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_normal_noise_in_l2_is_the_sampled_gaussian(rate: float) -> None:
    law = CoordinateRDP(beta=2, scale=1.3 * math.sqrt(2))
    divergences = coordinatewise_rdp([(law, SensitivitySet(p=2, norm=1, dimension=1000))], rate, ORDERS)
    assert divergences == pytest.approx(
        gaussian.renyi_divergence(SampledGaussian(rate, 1.3), ORDERS), rel=1e-9
    )


def test_coordinate_sampling_of_a_one_hot_change_is_input_sampling() -> None:
    law = CoordinateRDP(beta=2, scale=1.3 * math.sqrt(2), rate=0.1)
    divergences = coordinatewise_rdp([(law, SensitivitySet(p=2, norm=1))], 1.0, [2, 5, 20])
    assert divergences == pytest.approx(
        gaussian.renyi_divergence(SampledGaussian(0.1, 1.3), [2, 5, 20]), rel=1e-3
    )
