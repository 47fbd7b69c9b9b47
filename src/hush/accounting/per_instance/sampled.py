"""Per-instance charges where every coordinate of every record takes part on its own.

With sampled coordinates the output is a product again, given the other records' draws; with sampled
records it is not. docs/guarantees/bounded.md, "Sampled coordinates".
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr

from hush.accounting.epsilon import checked_orders
from hush.accounting.numerics import Array, log_mixture, log_weights, log_weights_numpy
from hush.accounting.per_instance.bounded import as_vector, support_of
from hush.accounting.per_instance.laws import (
    Atoms,
    Rectified,
    Support,
    Truncated,
    log_density,
    log_mass,
    weighed,
)
from hush.clipping import Linf
from hush.core.errors import InvalidValue, Unproved
from hush.core.plan import Plan
from hush.sampling import Coordinate

_MOST_ORDER, _CHUNK = 256.0, 2**11
_OUTWARD = 1 + 1e-8
"""More than the quadrature is off by, measured."""


def sampled_rdp(plan: Plan, location: npt.ArrayLike, orders: npt.ArrayLike) -> Array:
    """The Rényi divergence of one step with `Coordinate` sampling, given the others' draws (sensitive).

    `location` is the sum of what took part of the other records. For a record that may add anything up
    to the clipping norm to each coordinate that it is drawn for.

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
    wanted, at = checked_orders(orders), as_vector("location", location)
    if wanted.max() > _MOST_ORDER:
        raise InvalidValue(
            f"orders={orders!r} must be at most {_MOST_ORDER:g}: beyond it the integral is longer "
            "than it is worth. Pass e.g. orders=[2, 4, 8].",
            key="orders",
        )
    support, scale = support_of(plan.noise, plan.clipping.reference_norm)
    rate, limit = plan.sampling.coordinate_participation, plan.clipping.reference_norm / scale
    totals = np.zeros((2, len(wanted)))
    for start in range(0, len(at), _CHUNK):
        here = at[start : start + _CHUNK] / scale
        for k, order in enumerate(wanted):
            pair = [_mixed(support, here, sign * limit, rate, float(order)) for sign in (1, -1)]
            totals[:, k] += np.maximum(*pair).sum(1)
    return np.asarray(totals.max(0) * _OUTWARD)


def _mixed(support: Support, at: Array, shift: float, rate: float, order: float) -> Array:
    """The mixture from the law without the record, and that law from the mixture: (2, coordinates)."""
    excess = np.full((2, len(at)), -np.inf)
    # one by NumPy and one by the C library: other last bits would be other charges
    weights = log_weights_numpy(rate)[0], log_weights(rate)[1]
    for without, moved in _outcomes(support, at, shift, order):
        mixture = log_mixture(weights, without, moved)
        excess[0] = np.logaddexp(excess[0], weighed(mixture, without, order))
        excess[1] = np.logaddexp(excess[1], weighed(without, mixture, order))
    return np.asarray(np.logaddexp(0.0, excess) / (order - 1))


def _outcomes(support: Support, at: Array, shift: float, order: float) -> Iterator[tuple[Array, Array]]:
    """log-probabilities at both locations of every outcome; the inside of the support by nodes."""
    if isinstance(support, Atoms):
        for low, high in itertools.pairwise([-math.inf, *map(float, support.cuts), math.inf]):
            yield log_mass(low - at, high - at), log_mass(low - at - shift, high - at - shift)
        return
    bound = support.bound if isinstance(support, Rectified | Truncated) else math.inf
    lost = [np.zeros(len(at)), np.zeros(len(at))]
    if isinstance(support, Rectified):
        yield log_ndtr(-bound - at), log_ndtr(-bound - at - shift)
        yield log_ndtr(at - bound), log_ndtr(at + shift - bound)
    elif isinstance(support, Truncated):
        lost = [log_mass(-bound - t, bound - t) for t in (at, at + shift)]
    left, right = _window(bound, at, shift, order)
    wide = float((right - left).max())
    nodes, weights = np.polynomial.legendre.leggauss(max(48, math.ceil(4 * wide)))
    for node, weight in zip(nodes, weights, strict=True):
        z = (left + right) / 2 + node * (right - left) / 2
        share = np.log(weight * (right - left) / 2)
        yield share + log_density(z - at) - lost[0], share + log_density(z - at - shift) - lost[1]


def _window(bound: float, at: Array, shift: float, order: float) -> tuple[Array, Array]:
    """Where the integrand is: around the locations, tilted by the order; far outside, at the end."""
    reach = 10 + order * abs(shift)
    side = np.where(at < 0, -1.0, 1.0)
    outside = side * at - bound
    low = np.clip(at - reach, -bound, bound)
    high = np.clip(at + reach, -bound, bound)
    # beyond the end by more than the tilt, the law falls at least as fast as exp(-(m - tilt) depth)
    far = outside > reach - 5
    depth = np.minimum(2 * bound, 45 / np.maximum(outside - order * abs(shift), 5.0))
    low = np.where(far, np.where(side > 0, bound - depth, -bound), low)
    high = np.where(far, np.where(side > 0, bound, -bound + depth), high)
    return low, high
