"""Charges with sampled coordinates, against integrals of the mixtures themselves."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import hush
from hush.core.parts import Noise
from hush_recipes.bounded.sampled import sampled_rdp


def plan(noise: Noise, rate: float, norm: float = 0.5) -> hush.Plan:
    return hush.Plan(sampling=hush.Coordinate(rate=rate), clipping=hush.Linf(norm), noise=noise)


def mixture(at: float, shift: float, rate: float, order: float, kind: str) -> tuple[float, float]:
    """D_a of the mixture from the law and of the law from the mixture; scale 1, support [-1, 1]."""
    total = np.zeros(2)

    def moments(p: float, q: float) -> tuple[float, float]:
        m = (1 - rate) * p + rate * q
        return m**order * p ** (1 - order), p**order * m ** (1 - order)

    def mass(t: float) -> float:
        return float(norm.cdf(1 - t) - norm.cdf(-1 - t)) if kind == "truncated" else 1.0

    for k in (0, 1):
        total[k] += quad(
            lambda z, k=k: moments(
                norm.pdf(z - at) / mass(at), norm.pdf(z - at - shift) / mass(at + shift)
            )[k],
            -1,
            1,
            epsabs=1e-13,
        )[0]
        if kind == "rectified":
            total[k] += moments(norm.cdf(-1 - at), norm.cdf(-1 - at - shift))[k]
            total[k] += moments(norm.sf(1 - at), norm.sf(1 - at - shift))[k]
    divergences = np.log(total) / (order - 1)
    return float(divergences[0]), float(divergences[1])


@pytest.mark.parametrize("rate", [0.5, 0.125])
@pytest.mark.parametrize("at", [-2.0, 0.0, 0.6])
@pytest.mark.parametrize("kind", ["rectified", "truncated"])
def test_no_mixture_costs_more(kind: str, at: float, rate: float) -> None:
    bounded: dict[str, Noise] = {
        "rectified": hush.Rectified(scale=1.0, bound=1.0),
        "truncated": hush.Truncated(scale=1.0, bound=1.0),
    }
    noise = bounded[kind]
    for order in (2, 5, 12):
        true = max(cost for shift in (-0.5, 0.5) for cost in mixture(at, shift, rate, order, kind))
        ours = float(sampled_rdp(plan(noise, rate), [at], [order])[0])
        assert true <= ours * (1 + 1e-9)
        assert ours <= true * (1 + 1e-6)
        # a rate an eighth off is seen
        assert float(sampled_rdp(plan(noise, 0.875 * rate), [at], [order])[0]) < true


def test_coordinates_add_and_a_rate_of_one_is_no_sampling() -> None:
    noise = hush.Quantized(scale=1.0, bound=1.0, levels=3)
    per_coordinate = [float(sampled_rdp(plan(noise, 0.25), [at], [4])[0]) for at in (-1.0, 0.3)]
    assert float(sampled_rdp(plan(noise, 0.25), [-1.0, 0.3], [4])[0]) == pytest.approx(
        sum(per_coordinate)
    )
    full = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(0.5), noise=noise)
    assert float(sampled_rdp(plan(noise, 1.0), [0.3], [4])[0]) == pytest.approx(
        float(hush.individual_rdp(full, [0.3], [4])[0]), rel=1e-8
    )
