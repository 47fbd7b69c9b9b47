"""Charges of plans with noise on a fixed support: at worst, and for the records at hand."""

import itertools

import mpmath
import numpy as np
import pytest

import hush
from hush.accounting.epsilon import delta
from hush.core.parts import Clipping, Noise, Sampling
from hush.noise.bounded import largest_variance
from tests.accounting.per_instance import oracle

NOISES: tuple[Noise, ...] = (
    hush.Rectified(scale=0.8, bound=1.0),
    hush.Truncated(scale=0.8, bound=1.0),
    hush.StochasticSign(scale=0.8),
    hush.Quantized(scale=0.8, bound=1.0, levels=4),
)
KINDS = ("rectified", "truncated", "sign", "quantized")
ORDERS = [1.5, 2.0, 4.0, 20.0]


def plan(noise: Noise, clipping: Clipping | None = None, sampling: Sampling | None = None) -> hush.Plan:
    return hush.Plan(
        sampling=sampling or hush.FullBatch(), clipping=clipping or hush.Linf(0.5), noise=noise
    )


@pytest.mark.parametrize(("noise", "kind"), list(zip(NOISES, KINDS, strict=True)))
def test_for_all_it_is_the_worse_sign_and_the_larger_direction(noise: Noise, kind: str) -> None:
    location = [-2.0, 0.3]
    costs: dict[tuple[bool, int, int], float] = {}
    for j, at in enumerate(location):
        for sign in (-1, 1):
            pair = at / 0.8, (at + sign * 0.5) / 0.8
            for away in (False, True):
                first, second = pair if away else pair[::-1]
                cost = oracle.divergence(kind, 1 / 0.8, 4, first, second - first, 4.0, digits=16)
                costs[away, j, sign] = float(cost)
    direction = [
        sum(max(costs[away, j, sign] for sign in (-1, 1)) for j in (0, 1)) for away in (False, True)
    ]
    divergence = hush.individual_rdp(plan(noise), location, [4.0])[0]
    assert divergence == pytest.approx(max(direction), rel=1e-8)
    # what the paper's algorithm adds up: one sign, one direction
    assert sum(costs[True, j, 1] for j in (0, 1)) < 0.95 * divergence


@pytest.mark.parametrize("noise", NOISES)
def test_no_neighbour_costs_more_than_what_is_charged_for_all(noise: Noise) -> None:
    rng = np.random.default_rng(3)
    location = rng.normal(scale=1.5, size=6)
    change = rng.uniform(-0.5, 0.5, size=(50, 6))
    change[0] = 0.5
    divergences = hush.individual_rdp(plan(noise), location, ORDERS, change=change)
    assert divergences.shape == (50, 4)
    for_all = hush.individual_rdp(plan(noise), location, ORDERS)
    assert (divergences <= for_all * (1 + 1e-12)).all()
    # from the neighbour's point of view the two directions change places
    back = hush.individual_rdp(plan(noise), location + change[7], ORDERS, change=-change[7])
    assert back == pytest.approx(divergences[7], rel=1e-9)
    assert (for_all <= hush.rdp(plan(noise), ORDERS, dimension=6) * (1 + 1e-9)).all()


def test_a_change_of_many_records_by_hand() -> None:
    noise = hush.StochasticSign(scale=2.0)
    from scipy.stats import norm

    location, change, order = np.array([0.4, -3.0]), np.array([0.1, 0.7]), 3.0
    expected = []
    for p_at, q_at in ((location, location + change), (location + change, location)):
        p, q = norm.cdf(p_at / 2), norm.cdf(q_at / 2)
        moments = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)
        expected.append(np.log(moments).sum() / (order - 1))
    divergence = hush.individual_rdp(plan(noise), location, [order], change=change)[0]
    assert divergence == pytest.approx(max(expected), rel=1e-8)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    ("sampling", "clipping"),
    list(
        itertools.product(
            (hush.FullBatch(), hush.Poisson(0.1)),
            (hush.L2(0.5), hush.Linf(0.1), hush.L2Linf(l2=0.5, linf=0.2)),
        )
    ),
)
def test_at_worst_it_is_charged_as_the_normal_law(
    noise: Noise, sampling: Sampling, clipping: Clipping
) -> None:
    normal = hush.Gaussian(0.8 / clipping.reference_norm)
    ours, theirs = (
        hush.epsilon(plan(each, clipping, sampling), 3, 1e-5, dimension=30) for each in (noise, normal)
    )
    if isinstance(noise, hush.Truncated) and isinstance(sampling, hush.FullBatch):
        assert ours.epsilon.upper < theirs.epsilon.upper
    else:
        assert ours.epsilon.upper == theirs.epsilon.upper
    assert ours.epsilon.lower == 0, "the normal law's lower end is not this law's"
    assert not ours.sensitive


def test_the_worst_case_is_nearly_met_on_a_wide_support() -> None:
    """Where the charge at worst is not idle: records in the middle of a wide support."""
    wide = plan(hush.Rectified(scale=0.8, bound=8.0))
    at_worst = hush.rdp(wide, [2.0], dimension=5)
    assert hush.individual_rdp(wide, np.zeros(5), [2.0]) == pytest.approx(at_worst, rel=1e-6)


def variance(bound: float, location: float) -> float:
    """Variance of a truncated normal variable of deviation 1, by integrals in many digits."""
    with mpmath.workdps(30):
        ends = [-bound, 0, bound]
        mass = mpmath.quad(lambda x: mpmath.npdf(x - location), ends)
        mean = mpmath.quad(lambda x: x * mpmath.npdf(x - location), ends) / mass
        return float(mpmath.quad(lambda x: (x - mean) ** 2 * mpmath.npdf(x - location), ends) / mass)


@pytest.mark.parametrize("bound", [1e-6, 0.01, 0.3, 1.0, 2.5, 6.0, 50.0])
def test_the_variance_is_largest_in_the_middle(bound: float) -> None:
    largest, ends = largest_variance(bound), (0.0, 1e-3, bound / 2, bound, 2 * bound, bound + 1)
    if bound < 10:
        found = [variance(bound, at) for at in ends]
        assert found[0] <= largest <= found[0] * (1 + 1e-8) + 2e-14
        assert max(found[1:]) <= found[0] * (1 + 1e-15)
        assert max(found[1:]) >= found[0] * (1 - 1e-6), "the second location is next to the middle"
    assert largest <= min(1.0, bound**2 / 3 * (1 + 1e-13))


def exponent(location: float, change: float, order: float, noise: hush.Truncated) -> float:
    """Rényi divergence of one coordinate, by the oracle."""
    units = (noise.bound / noise.scale, 2, location / noise.scale, change / noise.scale, order)
    return float(oracle.divergence("truncated", *units, digits=16))


@pytest.mark.parametrize("bound", [0.2, 0.8, 2.0])
def test_truncated_noise_costs_any_records_a_share_of_the_normal_law(bound: float) -> None:
    """Locations in the middle, at the ends, outside and near the tilted one; one and two coordinates."""
    noise = hush.Truncated(scale=0.8, bound=bound)
    rng, nearest = np.random.default_rng(4), 0.0
    for order in (1.1, 2.0, 9.0):
        charge = hush.rdp(plan(noise, hush.L2(1.0)), [order], dimension=2)[0]
        for norm_, at in itertools.product((0.05, 1.0), (0.0, -0.5, bound, -bound - 0.7, 1.0)):
            change = norm_ * rng.choice([-1, 1])
            found = exponent(at, change, order, noise) / norm_**2
            assert found <= charge * (1 + 1e-9)
            nearest = max(nearest, found / charge)
        angle = rng.uniform(0, np.pi / 2)
        both = [exponent(0.0, part, order, noise) for part in (np.cos(angle), np.sin(angle))]
        assert sum(both) <= charge * (1 + 1e-9)
    assert nearest > 0.995, "a share that is 1% smaller would be no bound"


def test_delta_of_truncated_noise_against_cells() -> None:
    """True deltas of compositions at fixed locations, from the law of the privacy loss."""
    noise, edges = hush.Truncated(scale=4.0, bound=4.0), np.linspace(-1, 1, 20_001)
    chosen, x, steps = plan(noise, hush.L2(1.0)), (edges[1:] + edges[:-1]) / 2, 20
    epsilons, tight = np.array([0.0, 0.5, 1.5]), 0.0
    for at, change in itertools.product((0.0, -0.125, 1.0, 3.0), (0.25, -0.25)):
        first, second = (np.exp(-((x - t) ** 2) / 2) for t in (at, at + change))
        first, second = first / first.sum(), second / second.sum()
        # the loss is linear in x, so sums of x have the law of the sum of losses
        size = 2 ** int(np.ceil(np.log2(steps * len(x))))
        law = np.fft.irfft(np.fft.rfft(first, size) ** steps, size)[: steps * len(x)].clip(0)
        losses = steps * np.log(first[0] / second[0]) - change * (x[1] - x[0]) * np.arange(len(law))
        for epsilon in epsilons:
            found = (law * np.maximum(0.0, 1 - np.exp(np.minimum(0.0, epsilon - losses)))).sum()
            charge = delta({chosen: steps}, float(epsilon)).upper
            assert found <= charge
            normal = delta({plan(hush.Gaussian(4.0), hush.L2(1.0)): steps}, float(epsilon)).lower
            assert charge < normal or epsilon < 1
            tight = max(tight, found / charge)
    assert tight > 0.2, "the adversaries are not far from the charge"


def test_truncated_noise_is_no_gaussian_mechanism_of_its_own_variance() -> None:
    """So its privacy loss distribution is that of the untruncated law, and only Rényi orders cost less.

    The share of the variance bounds Rényi divergences, but not threshold tests.
    """
    from scipy.special import ndtr, ndtri

    bound, shift = 1.0, 0.1
    masses = np.diff(ndtr(np.array([-bound, 0.0, bound]) - shift / 2))
    right = masses[1] / masses.sum()  # probability of a draw above 0, for a location of shift / 2
    separation = float(ndtri(right) - ndtri(1 - right))
    assert separation > 1.05 * np.sqrt(largest_variance(bound)) * shift
    assert separation <= shift


def test_groups_and_sampling_of_truncated_noise() -> None:
    noise = hush.Truncated(scale=8.0, bound=8.0)
    chosen = plan(noise, hush.L2(1.0))
    group = hush.epsilon(chosen, 10, 1e-5, group=2).epsilon.upper
    assert group == hush.epsilon(plan(noise, hush.L2(2.0)), 10, 1e-5).epsilon.upper
    replaced = hush.epsilon(chosen, 10, 1e-5, neighbours=hush.Neighbours.REPLACE).epsilon.upper
    assert replaced == group
    for sampling in (hush.Poisson(0.5), hush.Coordinate(0.5)):
        ours, theirs = (
            hush.rdp(plan(each, hush.L2(1.0), sampling), [2.0], dimension=3)
            for each in (noise, hush.Gaussian(8.0))
        )
        assert ours == theirs
    calibrated = hush.calibrate(chosen, hush.Budget(epsilon=3.0, delta=1e-5), 10).noise
    assert isinstance(calibrated, hush.Truncated)
    assert calibrated.bound == pytest.approx(calibrated.scale)
