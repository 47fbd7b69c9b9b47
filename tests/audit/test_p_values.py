"""P-values of independent coins and noise are valid, and see what depends on what."""

import numpy as np
import pytest
from scipy import stats

from hush.audit import draws
from hush.audit.noise import ObservedNoise, noise_fresh

TIMES = 200


def repeats(noise: np.ndarray) -> float:
    return noise_fresh(ObservedNoise(noise=noise, exponent=2.0)).p_value


@pytest.mark.parametrize(
    "p_value",
    [
        lambda rng: repeats(rng.normal(size=(4, 30))),
        lambda rng: draws.joint_draws(rng.random((30, 17)) < 0.3, 0.3),
        lambda rng: draws.sizes(rng.binomial(40, 0.3, size=50).astype(float), 40, 0.3),
    ],
    ids=["repeats", "joint draws", "sizes"],
)
def test_small_p_values_are_as_rare_as_they_say(p_value: object) -> None:
    rng = np.random.default_rng(0)
    values = np.array([p_value(rng) for _ in range(TIMES)])  # type: ignore[operator]
    for level in (0.01, 0.1):
        limit = stats.binom(TIMES, level).isf(1e-6)
        assert (values <= level).sum() <= limit
    assert values.min() > 0


@pytest.mark.parametrize(("steps", "numbers"), [(1, 0), (0, 7), (3, 5), (2, -5)])
def test_noise_that_repeats_is_seen_at_any_distance(steps: int, numbers: int) -> None:
    noise = np.random.default_rng(1).normal(size=(8, 60))
    assert repeats(noise) > 1e-6
    low, high = max(0, numbers), 60 + min(0, numbers)
    for row in range(steps, 8):
        for start in range(low, high):  # in order, so that copies of copies repeat as well
            noise[row, start] = noise[row - steps, start - numbers]
    assert repeats(noise) < 1e-6


def test_agreement_counts_are_those_of_a_plain_loop() -> None:
    """A single pair of rows: the p-value is that of the distance that stands out, corrected."""
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(2, 9))
    signs = np.sign(noise)
    expected = []
    for steps in (0, 1):
        for lag in range(-8 if steps else 1, 9):
            left = signs[: 2 - steps, max(0, -lag) : 9 - max(0, lag)]
            right = signs[steps:, max(0, lag) : 9 + min(0, lag)]
            agree = int((left == right).sum())
            law = stats.binom(left.size, 0.5)
            expected.append(min(1.0, 2 * min(law.cdf(agree), law.sf(agree - 1))))
    assert repeats(noise) == pytest.approx(min(1.0, len(expected) * min(expected)))
