"""RDP of one step with independent noise in each coordinate, sampled coordinates and sampled records."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array, log1mexp, log_binomial, log_weights
from hush.accounting.rdp.allocation import worst_allocation
from hush.accounting.rdp.profile import CoordinateRDP
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet

Blocks = Sequence[tuple[CoordinateRDP, SensitivitySet]]

# Up to this order every whole one is computed: the binomial sum of subsampling magnifies errors. Beyond,
# orders are 3% apart, independently of the highest requested one, to reuse cached values.
_DENSE = 152
_COMPUTED_ORDERS: Array = np.unique(
    np.round(np.append(np.arange(2, _DENSE + 1), np.geomspace(_DENSE, 1e6, 298)))
)
# Dense where epsilon is decided: twice as many orders change it by less than 0.1%.
WHOLE_ORDERS: Array = np.unique(np.round(np.append(np.arange(2, 33), np.geomspace(33, 1024, 28))))


def coordinatewise_rdp(blocks: Blocks, rate: float, orders: npt.ArrayLike) -> Array:
    """Rényi divergence of one step at each order, the larger of both directions.

    **Guarantee.** Never below either direction of adding and removing one record:
    docs/guarantees/coordinate-wise.md.

    >>> blocks = [(CoordinateRDP(beta=1, scale=1.0), SensitivitySet(p=1, norm=1.0))]
    >>> coordinatewise_rdp(blocks, rate=0.1, orders=[2, 4]).round(6).tolist()
    [0.008536, 0.017893]
    """
    order_array = np.atleast_1d(np.asarray(orders, dtype=float))
    if rate == 1:
        return _sum_over_blocks(blocks, order_array)
    if not ((order_array == np.round(order_array)) & (order_array >= 2)).all():
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers >= 2 under sampling: the amplification bound is "
            "a binomial sum over who takes part. Pass e.g. orders=[2, 3, 4]."
        )
    base = _at_every_order(tuple(blocks), int(order_array.max()))
    swapped = all(profile.rate == 1 for profile, _ in blocks)
    return np.array([subsampled_rdp(base[: int(a) - 1], rate, swapped=swapped) for a in order_array])


def subsampled_rdp(base: npt.ArrayLike, rate: float, *, swapped: bool) -> float:
    """Rényi divergence of one Poisson-subsampled step, from the divergences without sampling.

    Args:
        base: D_a without sampling at a = 2, 3, ..., each whole order up to the result's.
        rate: Probability that a record takes part.
        swapped: Whether a reflection swaps the laws without the record and with it, as for symmetric
            noise. Otherwise the odd moments of their ratio less 1 must not be negative, as with sampled
            coordinates.

    **Guarantee.** An upper bound on both directions, if `base` bounds both (each order may have its
    own worst case): docs/guarantees/coordinate-wise.md, "Input sampling".

    >>> round(subsampled_rdp([0.5, 0.75], rate=0.1, swapped=True), 6)
    0.01039
    """
    unsampled = np.asarray(base, dtype=float)
    a = len(unsampled) + 1
    v = np.arange(2, a + 1)
    log_weight = log_binomial(a, v.astype(float), log_weights(rate))
    power = (v - 1) * unsampled
    # the binomial weights sum to one, so 1 is taken from every term
    terms = log_weight + power + log1mexp(-power)
    if not swapped and a % 2:
        terms = np.append(terms, log_weight[-1] + power[-1] + math.log1p(-rate))
    excess = np.logaddexp.reduce(terms)
    return float(np.logaddexp(0.0, excess) / (a - 1) * OUTWARD)


def _at_every_order(blocks: tuple[tuple[CoordinateRDP, SensitivitySet], ...], highest: int) -> Array:
    """Bounds at the orders 2, 3, ..., `highest`: computed at knots, interpolated between them.

    (a - 1) D_a is convex in a, for each change and so for the worst one: a chord lies above it.
    """
    every = np.arange(2, highest + 1, dtype=float)
    knots = np.append(
        _COMPUTED_ORDERS[: int(np.searchsorted(_COMPUTED_ORDERS, highest))], float(highest)
    )
    cache = _moment_cache(blocks)
    missing = np.array([a for a in knots if a not in cache])
    if len(missing):
        computed = (missing - 1) * _sum_over_blocks(blocks, missing)
        cache.update(zip(missing.tolist(), computed.tolist(), strict=True))
    moments = np.array([cache[a] for a in knots])
    finite = np.isfinite(moments)
    # Divergences grow with the order, so those above an infinite one are infinite.
    limit = float(knots[finite].max(initial=1.0))
    divergences = np.full(len(every), np.inf)
    finite_orders = every <= limit
    if finite_orders.any():
        divergences[finite_orders] = np.interp(every[finite_orders], knots[finite], moments[finite]) / (
            every[finite_orders] - 1
        )
    return divergences


@lru_cache(maxsize=16)
def _moment_cache(blocks: tuple[tuple[CoordinateRDP, SensitivitySet], ...]) -> dict[float, float]:
    """Cache of (a - 1) D_a of these blocks by order a, without subsampling of records."""
    return {}


def _sum_over_blocks(blocks: Blocks, orders: Array) -> Array:
    """Bound on the divergence of a product of blocks: their worst allocations, added."""
    total: Array = np.sum([worst_allocation(profile, ball, orders) for profile, ball in blocks], axis=0)
    return total
