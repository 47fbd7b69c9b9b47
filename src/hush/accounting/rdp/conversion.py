"""Conversion of Rényi differential privacy to (epsilon, delta)."""

import math

import numpy as np

from hush.accounting.numerics import Array

ORDERS: Array = np.concatenate(
    [1 + np.geomspace(1e-4, 0.9, 25), np.arange(2, 65), np.round(np.geomspace(70, 1e6, 60))]
)


def rdp_to_epsilon(divergences: Array, orders: Array, delta: float) -> float:
    """Smallest epsilon at `delta` that is implied by Rényi divergences at the given orders."""
    # NaN gives no bound
    known = np.where(np.isnan(divergences), np.inf, divergences)
    return max(0.0, float((known + conversion_term(orders, delta)).min()))


def conversion_term(orders: Array, delta: float) -> Array:
    """Term to add to the Rényi divergence to get epsilon at `delta`, for each order; may be negative.

    Reference: Canonne, Kamath and Steinke (2020), Proposition 12.
    """
    added: Array = -math.log(delta) / (orders - 1)
    return added + np.log1p(-1 / orders) - np.log(orders) / (orders - 1)


def rdp_to_delta(divergences: Array, orders: Array, epsilon: float) -> float:
    """Smallest delta at `epsilon` that is implied by Rényi divergences at the given orders.

    Solves `conversion_term` for delta. Delta is also at most the total variation distance, which is at
    most sqrt(D/2) (Pinsker) and sqrt(1 - exp(-D)) (Bretagnolle and Huber).
    """
    divergences = np.where(np.isnan(divergences), np.inf, divergences)
    exponents = (orders - 1) * (divergences - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    smallest = float(divergences.min())
    total_variation = min(math.sqrt(smallest / 2), math.sqrt(-math.expm1(-smallest)))
    return min(total_variation, math.exp(min(0.0, float(exponents.min()))))
