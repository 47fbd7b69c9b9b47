"""The laws on a fixed support, against integrals in many digits and what theorems say of them."""

import numpy as np
import pytest

from hush.accounting.per_instance import Atoms, RectifiedLaw, Support, TruncatedLaw
from tests.accounting.per_instance import oracle

KINDS = ("rectified", "truncated", "sign", "quantized")
Case = tuple[str, float, int, float, float, float]


def law(kind: str, bound: float, levels: int) -> Support:
    if kind == "rectified":
        return RectifiedLaw(bound)
    if kind == "truncated":
        return TruncatedLaw(bound)
    if kind == "sign":
        return Atoms(np.zeros(1))
    alphabet = np.linspace(-bound, bound, levels)
    return Atoms((alphabet[1:] + alphabet[:-1]) / 2)


def scalar_divergence(support: Support, location: float, shift: float, order: float) -> float:
    return float(support.divergence(np.array([location]), np.array([shift]), order)[0])


def cases(many: int, seed: int) -> list[Case]:
    """Supports of a tenth to ten deviations; locations inside, near, and up to 1e3 outside."""
    rng = np.random.default_rng(seed)
    divergences = []
    for k in range(many):
        bound = 10 ** rng.uniform(-1, 1)
        far = rng.choice([-1, 1]) * (bound + 10 ** rng.uniform(0, 3))
        location = rng.choice([rng.uniform(-2 * bound, 2 * bound), 3 * rng.normal(), far])
        shift = rng.choice([-1, 1]) * 10 ** rng.uniform(-3, 0.5)
        order = rng.choice([1 + 10 ** rng.uniform(-2, 0), 2, 4, 32, rng.uniform(2, 64)])
        levels = int(rng.integers(2, 12))
        divergences.append((KINDS[k % 4], bound, levels, float(location), float(shift), float(order)))
    return divergences


def check(case: Case, digits: int) -> None:
    kind, bound, levels, location, shift, order = case
    support = law(kind, bound, levels)
    true = oracle.divergence(kind, bound, levels, location, shift, order, digits)
    ours = scalar_divergence(support, location, shift, order)
    assert float(true) * (1 - 1e-10) <= ours, "a charge below the truth"
    # rounding is added, so what is far below it cannot be close
    assert ours <= float(true) * (1 + 1e-6) + 1e-12 / min(1.0, order - 1)
    expected = float(oracle.information(kind, bound, levels, location, digits))
    information = float(support.information(np.array([location]))[0])
    assert information == pytest.approx(expected, rel=1e-7, abs=1e-290)


@pytest.mark.few(14)
@pytest.mark.parametrize("case", cases(40, seed=1))
def test_against_integrals(case: Case) -> None:
    check(case, digits=18)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_against_a_thousand_integrals_in_30_digits(block: int) -> None:
    for case in cases(50, seed=100 + block):
        check(case, digits=30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outside", [40.0, 1e3, 1e6])
def test_far_outside_nothing_overflows_and_little_is_told(kind: str, outside: float) -> None:
    support = law(kind, 1.0, 5)
    for sign in (-1.0, 1.0):
        for order in (1.5, 32.0, 1e6):
            cost = scalar_divergence(support, sign * outside, 0.5, order)
            assert 0 <= cost <= order / 8 * (1 + 1e-9)
        assert scalar_divergence(support, sign * outside, 0.5, 2.0) < 1e-3
        assert 0 <= float(support.information(np.array([sign * outside]))[0]) < 1e-3


def test_the_truncated_law_is_a_gaussian_mechanism_in_every_sense() -> None:
    """Threshold tests tell two truncated laws apart no better than two normal ones as far apart."""
    from scipy.special import ndtr, ndtri

    bound, shift = 1.3, 0.6
    for at in (-4.0, -0.3, 0.0, 0.9, 2.5):
        x = np.linspace(-bound, bound, 2001)[1:-1]

        def below(t: float, x: np.ndarray = x) -> np.ndarray:
            mass = ndtr(bound - t) - ndtr(-bound - t)
            return np.asarray((ndtr(x - t) - ndtr(-bound - t)) / mass)

        separation = ndtri(below(at)) - ndtri(below(at + shift))
        interior = (below(at) > 1e-12) & (below(at) < 1 - 1e-12)
        assert separation[interior].min() >= 0
        assert separation[interior].max() <= shift * (1 + 1e-6)
        assert separation[interior].max() < 0.75 * shift, (
            "here it is well below, and the check is not idle"
        )
