"""Per-instance RDP under coordinate sampling: every coordinate of every record takes part on its own.

With sampled coordinates the output is a product law, given the other records' draws; with sampled
records it is not. docs/guarantees/bounded.md, "Sampled coordinates".
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr

from hush.accounting.epsilon import checked_orders
from hush.accounting.numerics import Array, log_mixture, log_normal_mass, log_weights, log_weights_numpy
from hush.accounting.per_instance import (
    Atoms,
    RectifiedLaw,
    Support,
    TruncatedLaw,
    as_vector,
    check_always_released,
    log_density,
    log_remainder_mass,
    unit_law,
)
from hush.clipping import Linf
from hush.core.errors import InvalidValue, Unproved
from hush.core.plan import Plan
from hush.sampling import Coordinate

_MAX_ORDER, _CHUNK = 256.0, 2**11
_QUADRATURE_OUTWARD = 1 + 1e-8
"""More than the quadrature is off by, measured."""


def sampled_rdp(plan: Plan, location: npt.ArrayLike, orders: npt.ArrayLike) -> Array:
    """Per-instance Rényi divergence of one step with `Coordinate` sampling (sensitive).

    Args:
        plan: `Coordinate` sampling, `Linf` clipping, and noise of bounded support or Gaussian.
        location: the sum over the other records of the coordinates that were drawn.
        orders: each > 1 and at most 256.

    Returns:
        The divergence at each order, given the others' draws, for a record that may add up to the
        clipping norm to each coordinate that it is drawn for.

    **Guarantee** (per-instance, given the others' draws). The larger direction, the worse sign in each
    coordinate: docs/guarantees/bounded.md, "Sampled coordinates". One draw's value does not bound the
    average over draws.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Coordinate(rate=0.5),
    ...     clipping=hush.Linf(norm=0.5),
    ...     noise=hush.Rectified(scale=1.0, bound=1.0),
    ... )
    >>> sampled_rdp(plan, [0.0, 3.0], orders=[2]).round(4).tolist()
    [0.0819]
    """
    if type(plan.sampling) is not Coordinate or type(plan.clipping) is not Linf:
        raise Unproved(
            f"{type(plan.sampling).__name__} x {type(plan.clipping).__name__} has no charge for the "
            "draw at hand: only where each coordinate is drawn and bounded on its own is the output a "
            "product. Use Coordinate and Linf."
        )
    check_always_released(plan)
    order_array, center = checked_orders(orders), as_vector("location", location)
    if order_array.max() > _MAX_ORDER:
        raise InvalidValue(
            f"orders={orders!r} must be at most {_MAX_ORDER:g}: beyond it the integral is longer "
            "than it is worth. Pass e.g. orders=[2, 4, 8].",
            key="orders",
        )
    support, scale = unit_law(plan.noise, plan.clipping.reference_norm)
    rate, limit = plan.sampling.coordinate_participation, plan.clipping.reference_norm / scale
    totals = np.zeros((2, len(order_array)))
    for start in range(0, len(center), _CHUNK):
        chunk = center[start : start + _CHUNK] / scale
        for k, order in enumerate(order_array):
            pair = [_mixture_rdp(support, chunk, sign * limit, rate, float(order)) for sign in (1, -1)]
            totals[:, k] += np.maximum(*pair).sum(1)
    return np.asarray(totals.max(0) * _QUADRATURE_OUTWARD)


def _mixture_rdp(support: Support, center: Array, shift: float, rate: float, order: float) -> Array:
    """The mixture from the law without the record, and that law from the mixture: (2, coordinates)."""
    excess = np.full((2, len(center)), -np.inf)
    # one by NumPy and one by the C library: other last bits would be other charges
    weights = log_weights_numpy(rate)[0], log_weights(rate)[1]
    for without, shifted in _outcomes(support, center, shift, order):
        mixture = log_mixture(weights, without, shifted)
        excess[0] = np.logaddexp(excess[0], log_remainder_mass(mixture, without, order))
        excess[1] = np.logaddexp(excess[1], log_remainder_mass(without, mixture, order))
    return np.asarray(np.logaddexp(0.0, excess) / (order - 1))


def _outcomes(
    support: Support, center: Array, shift: float, order: float
) -> Iterator[tuple[Array, Array]]:
    """log-probabilities at both locations of every outcome; the inside of the support by nodes."""
    if isinstance(support, Atoms):
        for low, high in support.intervals():
            with_record = log_normal_mass(low - center - shift, high - center - shift)
            yield log_normal_mass(low - center, high - center), with_record
        return
    bound = support.bound if isinstance(support, RectifiedLaw | TruncatedLaw) else math.inf
    log_normalizers = [np.zeros(len(center)), np.zeros(len(center))]
    if isinstance(support, RectifiedLaw):
        yield log_ndtr(-bound - center), log_ndtr(-bound - center - shift)
        yield log_ndtr(center - bound), log_ndtr(center + shift - bound)
    elif isinstance(support, TruncatedLaw):
        log_normalizers = [log_normal_mass(-bound - t, bound - t) for t in (center, center + shift)]
    left, right = _window(bound, center, shift, order)
    width = float((right - left).max())
    nodes, weights = np.polynomial.legendre.leggauss(max(48, math.ceil(4 * width)))
    for node, weight in zip(nodes, weights, strict=True):
        z = (left + right) / 2 + node * (right - left) / 2
        share = np.log(weight * (right - left) / 2)
        yield (
            share + log_density(z - center) - log_normalizers[0],
            share + log_density(z - center - shift) - log_normalizers[1],
        )


def _window(bound: float, center: Array, shift: float, order: float) -> tuple[Array, Array]:
    """Where the integrand is: around the locations, tilted by the order; far outside, at the end."""
    reach = 10 + order * abs(shift)
    side = np.where(center < 0, -1.0, 1.0)
    outside = side * center - bound
    low = np.clip(center - reach, -bound, bound)
    high = np.clip(center + reach, -bound, bound)
    # beyond the end by more than the tilt, the law falls at least as fast as exp(-(m - tilt) depth)
    outside_far = outside > reach - 5
    depth = np.minimum(2 * bound, 45 / np.maximum(outside - order * abs(shift), 5.0))
    low = np.where(outside_far, np.where(side > 0, bound - depth, -bound), low)
    high = np.where(outside_far, np.where(side > 0, bound, -bound + depth), high)
    return low, high
