"""Each published statement in `hush claims`: both of its numbers computed again, by integration."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gamma
from scipy.stats import norm

from hush.accounting.pld import accountant
from hush.accounting.steps import SampledGaussian, SampledNoise
from hush_recipes.claims import CLAIMS
from tests.recipes import errata


def check(printed: float, true: float) -> None:
    """That the claim which names the calling test has these two numbers, as far as it shows them."""
    import inspect

    name = inspect.stack()[1].function
    (claim,) = [claim for claim in CLAIMS if claim.test.endswith(f"::{name}")]
    assert claim.printed == pytest.approx(printed, rel=1e-3, abs=1e-12)
    assert claim.true == pytest.approx(true, rel=3e-3)
    assert abs(claim.true - claim.printed) > 1e-2 * abs(claim.true), "there is nothing to claim"


def test_every_claim_has_its_test() -> None:
    for claim in CLAIMS:
        file, name = claim.test.split("::")
        assert file == Path(__file__).name
        assert name in globals()


def test_the_page_of_errata_has_every_claim() -> None:
    """`python -m tests.recipes.errata` writes the page."""
    assert errata.PAGE.read_text() == errata.markdown()


def test_rectified_fisher_information() -> None:
    theta, s, a, b = 0.0, 1.0, -1.0, 1.0
    phi, cdf = norm.pdf, norm.cdf
    low, high = (a - theta) / s, (theta - b) / s
    printed = phi(low) ** 2 / cdf(low) + phi(high) ** 2 / cdf(high)
    printed += cdf((theta - b) / s) - cdf((theta - a) / s)
    printed += (a - theta) / s * phi((a - theta) / s) - (b - theta) / s * phi((b - theta) / s)
    # The information is the mean squared score: of the density inside, of the atoms at the ends.
    inside = quad(lambda x: ((x - theta) / s**2) ** 2 * phi((x - theta) / s) / s, a, b)[0]
    ends = (phi(low) / s) ** 2 / cdf(low) + (phi(high) / s) ** 2 / cdf(high)
    check(printed / s**2, inside + ends)


def divergence(first: Callable[[float], float], second: Callable[[float], float], a: float) -> float:
    return math.log(quad(lambda x: first(x) ** a * second(x) ** (1 - a), -1, 1, epsabs=1e-12)[0]) / (
        a - 1
    )


def test_truncated_divergence() -> None:
    order, theta, c, s = 4.0, 0.7, 0.5, 0.8

    def mass(x: float) -> float:
        return float(norm.cdf((1 - x) / s) - norm.cdf((-1 - x) / s))

    plain = order * c**2 / (2 * s**2)
    ratio = (
        mass(theta + c) / mass(theta) * (mass((1 - order) * (c + theta)) / mass(theta)) ** (1 - order)
    )
    first = lambda x: norm.pdf(x, theta, s) / mass(theta)  # noqa: E731
    second = lambda x: norm.pdf(x, theta + c, s) / mass(theta + c)  # noqa: E731
    check(plain + math.log(ratio), divergence(first, second, order))


def rectified(first: float, second: float, s: float, a: float) -> float:
    """D_a between rectified Gaussians on [-1, 1]: the inside by integration, and the two atoms."""
    total = quad(lambda x: norm.pdf(x, first, s) ** a * norm.pdf(x, second, s) ** (1 - a), -1, 1)[0]
    for p, q in (
        (norm.cdf(-1, first, s), norm.cdf(-1, second, s)),
        (norm.sf(1, first, s), norm.sf(1, second, s)),
    ):
        total += p**a * q ** (1 - a)
    return math.log(total) / (a - 1)


def test_one_direction_is_not_enough() -> None:
    check(rectified(-2.0, -1.5, 0.8, 4.0), rectified(-1.5, -2.0, 0.8, 4.0))


def test_selection_costs_more_than_its_test() -> None:
    order, sigma = 2, 0.8
    often, seldom = norm.cdf(0.0), norm.cdf(-1 / sigma)  # accepted at the two ends of the clip

    def accepted(share: float) -> float:
        """D_a of which kind of proposal is accepted, with the record and without it."""
        p = share * often / (share * often + (1 - share) * seldom)
        q = share * seldom / (share * seldom + (1 - share) * often)
        return math.log(p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)) / (
            order - 1
        )

    check(order / (2 * sigma**2), max(accepted(share) for share in np.linspace(0.001, 0.999, 2000)))


def test_conditioned_noise_costs_the_same_in_any_unit() -> None:
    order, sigma, mu = 1.5, 1.0, 0.002
    masses = {t: norm.cdf(0, t, mu * sigma) for t in (0.0, mu)}

    def cost(first: float, second: float) -> float:
        def moment(z: float) -> float:
            p, q = (norm.pdf(mu * z, t, mu * sigma) / masses[t] for t in (first, second))
            return float(mu * p**order * q ** (1 - order))

        return math.log(quad(moment, -12, 0)[0]) / (order - 1)

    true = max(cost(0.0, mu), cost(mu, 0.0))
    check(order * mu**2 / (2 * sigma**2), true)
    assert true < order / (2 * sigma**2)
    assert order * 0.577**2 / (2 * sigma**2) < true < order * 0.58**2 / (2 * sigma**2)


def generalized(beta: float, scale: float, shift: float, order: float) -> float:
    constant = beta / (2 * scale * float(gamma(1 / beta)))

    def integrand(x: float) -> float:
        exponent = order * abs(x / scale) ** beta + (1 - order) * abs((x - shift) / scale) ** beta
        return constant * math.exp(-exponent) - constant * math.exp(-(abs(x / scale) ** beta))

    excess = quad(integrand, -30, 30, points=[0, shift], epsabs=1e-15, epsrel=1e-12, limit=500)[0]
    return math.log1p(float(excess)) / (order - 1)


def test_a_conversion_without_its_numerator() -> None:
    order, delta = 5.0, 1e-5
    renyi = order / 2
    printed = renyi + math.log(1 / (order - 1)) - (math.log(delta) + math.log(order)) / (order - 1)
    # the exact curve of the Gaussian mechanism of deviation 1 (Balle and Wang 2018)
    low, high = 0.0, 10.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        spent = norm.cdf(0.5 - middle) - math.exp(middle) * norm.cdf(-0.5 - middle)
        low, high = (middle, high) if spent > delta else (low, middle)
    check(printed, high)
    assert printed + math.log((order - 1) ** 2 / order) > high  # Eq. 26 is a bound


def test_spreading_a_change_costs_more() -> None:
    spread = 1000 * generalized(4.0, 3.0, 1000 ** (-1 / 4), 2.0)
    check(1.0, spread / generalized(4.0, 3.0, 1.0, 2.0))


def test_a_replaced_vote_moves_two_counts() -> None:
    def wins(lead: float) -> float:
        """Probability that the first class wins, with `lead` more votes than the second."""
        return float(quad(lambda noise: norm.pdf(noise) * norm.cdf(noise + lead), -12, 12)[0])

    def delta(moved: float) -> float:
        """Delta of one noisy count that moves by `moved`."""
        return float(norm.cdf(moved / 2 - 1 / moved) - math.e * norm.cdf(-moved / 2 - 1 / moved))

    check(delta(1.0), wins(0.0) - math.e * wins(-2.0))
    assert wins(0.0) - math.e * wins(-2.0) == pytest.approx(delta(math.sqrt(2)))  # what is charged
    assert all(wins(lead + 1) - math.e * wins(lead) < delta(1.0) for lead in np.arange(-6, 6, 0.25))


def test_sampled_histograms_miss_the_tail() -> None:
    epsilon, n, h, error = 5.5, 100_000, 0.01, 1e-9
    losses = 0.5 + np.random.default_rng(0).standard_normal(n)
    # Eq. 10 and the shift of Theorem 6, for one step whose privacy loss has deviation 1
    epsilon_error = h * math.sqrt(math.log(12 / error) / 2)
    shifted = epsilon - epsilon_error - h * math.sqrt(2 * math.log(2 / error)) - 1 / math.sqrt(n)
    sampled = np.mean(np.maximum(0.0, -np.expm1(shifted - (losses + h))))  # a bin has width h
    check(
        float(sampled) + 2 * error,
        norm.cdf(0.5 - epsilon) - math.exp(epsilon) * norm.cdf(-0.5 - epsilon),
    )
    # no sample is above with probability .95, and the theorem fails with probability 4e-9
    assert norm.cdf(shifted - h - 0.5) ** n > 0.95
    assert 2 * math.exp(-2 * n * h**2) < 5e-9


def analytic(beta: float, c: float, epsilon: float, g0: float, change: float) -> float:
    """Delta of Theorem 11 without its constant; a change of 0 in its last step is as printed."""
    q = beta / (beta - 1)
    root = (g0**q + 1) ** (1 / q)
    r, s = g0 * (epsilon / c) ** (1 / beta) / root, 1 / root
    a = (r - change) / (1 - s)
    return math.exp(-c * a**beta) / (c * a ** (beta - 1)) if a > 0 else math.inf


def test_the_analytic_bound_forgets_the_change() -> None:
    check(analytic(2.0, 0.5, 1.0, 1.0, 0.0), norm.cdf(-0.5) - math.e * norm.cdf(-1.5))
    assert analytic(2.0, 0.5, 1.0, 0.1, 0.0) < 1e-100


@pytest.mark.parametrize(
    ("beta", "scale", "epsilon"), [(1.5, 1.5, 2.0), (1.5, 2.0, 1.0), (2.0, 1.5, 3.0), (3.0, 2.0, 4.0)]
)
def test_the_corrected_analytic_bound_is_above_what_is_charged(
    beta: float, scale: float, epsilon: float
) -> None:
    c = scale**-beta
    assert epsilon > c  # so the loss exceeds epsilon on one side of 0 alone
    bounds = [analytic(beta, c, epsilon, g0, 1.0) for g0 in np.geomspace(0.1, 1000, 500)]
    corrected = min(bounds) / (2 * gamma(1 + 1 / beta) * scale)  # the density's constant
    charged = accountant.delta({SampledNoise(1.0, beta, scale): 1}, epsilon).upper
    assert corrected / 30 < charged <= corrected


def test_the_central_limit_is_not_a_bound() -> None:
    sigma, rate, steps = 0.6, 0.001, 100_000
    mu = rate * math.sqrt(steps * math.expm1(1 / sigma**2))
    limit = accountant.epsilon({SampledGaussian(1.0, 1 / mu): 1}, 1e-5)
    truth = accountant.epsilon({SampledGaussian(rate, sigma): steps}, 1e-5)
    assert limit.upper < truth.lower
    check(limit.upper, truth.upper)
