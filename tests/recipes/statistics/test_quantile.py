"""The noisy histogram of norms, its noise and its charge."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import hush
from hush_recipes.statistics.quantile import NoisyQuantile
from tests.training.helpers import released, seeded

NORMS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(NORMS, NORMS), min_size=1, max_size=6), st.data())
def test_one_record_changes_one_count_of_each_block_by_one(
    rows: list[tuple[float, float]], data: st.DataObject
) -> None:
    quantile = NoisyQuantile(multiplier=1.0, bins=data.draw(st.integers(2, 30)))
    norms = torch.tensor(rows, dtype=torch.float64)
    gone = data.draw(st.integers(0, len(rows) - 1))
    fewer = torch.cat([norms[:gone], norms[gone + 1 :]])
    change = quantile._counts(norms) - quantile._counts(fewer)
    assert change.shape == (2, quantile.bins)
    for block in change:
        assert sorted(block.tolist()) == [0.0] * (quantile.bins - 1) + [1.0]


def test_counts_against_numpy() -> None:
    quantile = NoisyQuantile(multiplier=1.0, low=0.1, high=10.0, bins=8)
    values = np.random.default_rng(0).lognormal(0, 1.5, (500, 2))
    edges = np.geomspace(0.1, 10.0, 9)
    edges[0], edges[-1] = 0, np.inf
    expected = [np.histogram(column, edges)[0] for column in values.T]
    assert quantile._counts(torch.from_numpy(values)).numpy() == pytest.approx(np.array(expected))


def noise_of(multiplier: float, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Noise on the released counts."""
    noisy, norms = released(monkeypatch), torch.ones(50, 3)
    quantile = NoisyQuantile(multiplier=multiplier, bins=8000)
    quantile(norms, 0.5, hush.Ledger(), generator=seeded())
    return (noisy[0] - quantile._counts(norms)).flatten()


def test_the_noise_is_the_noise_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = noise_of(7.0, monkeypatch).numpy()
    assert stats.kstest(noise, stats.norm(scale=7.0).cdf).pvalue > 1e-3
    assert stats.kstest(noise, stats.norm(scale=0.9 * 7.0).cdf).pvalue < 1e-6


def test_what_is_charged_is_one_gaussian_of_all_blocks_together() -> None:
    # k counts that move by 1 under noise of deviation m: a Gaussian of multiplier m / sqrt(k)
    quantile, delta = NoisyQuantile(multiplier=8.0), 1e-5
    ledger = hush.Ledger()
    quantile(torch.rand(100, 4), 0.9, ledger, generator=seeded())
    spent = ledger.epsilon(delta).epsilon
    assert list(ledger.counts.values()) == [1]
    assert quantile.guarantee(4, delta).epsilon.upper == spent.upper
    assert quantile.guarantee(4, delta).epsilon.lower == 0

    def exact(eps: float, mu: float = math.sqrt(4) / 8.0) -> float:
        low = stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)
        return float(low)

    assert exact(spent.upper) <= delta <= exact(0.999 * spent.upper)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_quantiles_are_off_by_a_bin_and_the_noise_of_the_counts(share: float) -> None:
    values = np.random.default_rng(1).lognormal(0.3, 0.8, (50_000, 2)) * [1, 20]
    quantile = NoisyQuantile(multiplier=10.0)
    actual = quantile(torch.from_numpy(values), share, hush.Ledger(), generator=seeded(3))
    factor = (quantile.high / quantile.low) ** (1 / quantile.bins)
    off = 4 * 10.0 * math.sqrt(2 * quantile.bins) / 50_000
    for column, value in zip(values.T, actual, strict=True):
        low, high = np.quantile(column, [share - off, min(1.0, share + off)])
        assert low <= value <= high * factor
    # as a guess it would not be known to depend on the noise
    wild = NoisyQuantile(multiplier=3000.0)(
        torch.from_numpy(values), share, hush.Ledger(), generator=seeded(3)
    )
    assert wild != actual


def test_every_estimate_is_charged() -> None:
    ledger, quantile = hush.Ledger(), NoisyQuantile(multiplier=8.0)
    for seed in (0, 0, 1):
        quantile(torch.rand(10, 2), 0.5, ledger, generator=seeded(seed))
    assert ledger.counts == {quantile.plan(2): 3}
