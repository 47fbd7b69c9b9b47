import numpy as np
import pytest
from scipy.stats import norm

import hush
from hush.accounting.attacker import Attacker


def plan(rate: float, multiplier: float) -> hush.Plan:
    return hush.Plan(
        sampling=hush.FullBatch() if rate == 1 else hush.Poisson(rate=rate),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=multiplier),
    )


RATES = (1e-3, 0.01, 0.1, 0.3, 0.7)


def test_without_sampling_it_is_the_gaussian_trade_off() -> None:
    attacker = Attacker({plan(1.0, 10.0): 100})
    assert attacker.advantage == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-9)
    for x in RATES:
        exact = norm.cdf(norm.isf(x) - 1.0)
        rate = attacker.false_negative_rate(x)
        assert rate <= exact * (1 + 1e-12)
        assert rate == pytest.approx(exact, rel=1e-4)


def likelihood_ratio_attack(rate: float, multiplier: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The best attack there is, carried out: sorted log-likelihood ratios of both worlds."""
    random = np.random.default_rng(0)
    runs = 20_000

    def ratios(member: bool) -> np.ndarray:
        total = np.zeros(runs)
        for _ in range(steps):
            drawn = (random.random(runs) < rate) & member
            output = drawn + multiplier * random.standard_normal(runs)
            total += np.log1p(rate * np.expm1((2 * output - 1) / (2 * multiplier**2)))
        return np.sort(total)

    return ratios(False), ratios(True)


def best_found(attacker: Attacker, absent: np.ndarray, present: np.ndarray) -> float:
    """The largest excess of an attack's true positive rate over its bound, in standard errors."""
    worst = -np.inf
    for x in RATES:
        threshold = np.quantile(absent, 1 - x)
        power = np.mean(present > threshold)
        error = np.sqrt(power * (1 - power) / len(present)) + 3 * x**0.5 / len(absent) ** 0.5
        worst = max(worst, (power - attacker.true_positive_rate(x)) / error)
    return float(worst)


def test_the_likelihood_ratio_attack_stays_below_and_a_wrong_claim_is_caught() -> None:
    absent, present = likelihood_ratio_attack(0.1, 1.0, 30)
    honest = Attacker({plan(0.1, 1.0): 30})
    assert best_found(honest, absent, present) < 4
    too_good = Attacker({plan(0.1, 1.6): 30})
    assert best_found(too_good, absent, present) > 4


def test_the_curve_falls_and_is_consistent() -> None:
    attacker = Attacker({plan(0.2, 2.0): 10, plan(1.0, 20.0): 4})
    missed = [attacker.false_negative_rate(x) for x in (0.0, *RATES, 1.0)]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] == pytest.approx(1.0, abs=1e-9)
    assert missed[-1] == 0.0
    for x, missed_rate in zip((0.0, *RATES, 1.0), missed, strict=True):
        assert 1 - missed_rate - x <= attacker.advantage + 1e-12
    assert attacker.success == (1 + attacker.advantage) / 2
