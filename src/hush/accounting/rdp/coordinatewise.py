"""RDP of one step with independent noise in each coordinate, sampled coordinates and sampled records."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import Array
from hush.accounting.rdp.allocation import sum_over_blocks
from hush.accounting.rdp.profile import PARTICIPATION, CoordinateRDP
from hush.accounting.rdp.subsampling import AdjacentPair, subsampled_rdp
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet

Blocks = tuple[tuple[CoordinateRDP, SensitivitySet], ...]

# Up to this order every whole one is computed: the binomial sum of subsampling magnifies errors. Beyond,
# orders are 3% apart. They do not depend on the highest one asked for, so that a higher one reuses them.
_DENSE = 152
_COMPUTED_ORDERS: Array = np.unique(
    np.round(np.append(np.arange(2, _DENSE + 1), np.geomspace(_DENSE, 1e6, 298)))
)
# Dense where epsilon is decided: twice as many orders change it by less than 0.1%.
WHOLE_ORDERS: Array = np.unique(np.round(np.append(np.arange(2, 33), np.geomspace(33, 1024, 28))))


def coordinatewise_rdp(
    blocks: Sequence[tuple[CoordinateRDP, SensitivitySet]], rate: float, orders: npt.ArrayLike
) -> Array:
    """The Rényi divergence of one step at each order, the larger of both directions.

    Args:
        blocks: of coordinates, each with its RDP profile and the changes that one record can make.
        rate: the probability that a record takes part.
        orders: whole numbers >= 2 where anything is sampled.

    **Guarantee.** Never below either direction of adding and removing one record:
    docs/guarantees/coordinate-wise.md.

    >>> from hush.accounting.rdp.profile import NoiseDensity
    >>> laplace = CoordinateRDP(law=NoiseDensity(beta=1, scale=1.0))
    >>> blocks = [(laplace, SensitivitySet(p=1, norm=1.0))]
    >>> coordinatewise_rdp(blocks, rate=0.1, orders=[2, 4]).round(6).tolist()
    [0.008536, 0.017893]
    """
    order_array = np.atleast_1d(np.asarray(orders, dtype=float))
    if PARTICIPATION["range"].check("rate", rate) == 1:
        return sum_over_blocks(blocks, order_array)
    whole = (order_array == np.round(order_array)) & (order_array >= 2)
    if not whole.all():
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers >= 2 under sampling: the amplification bound is "
            "a binomial sum over who takes part. Pass e.g. orders=[2, 3, 4]."
        )
    base = _at_every_order(tuple(blocks), int(order_array.max()))
    swapped = all(profile.rate == 1 for profile, _ in blocks)
    return subsampled_rdp(
        base, rate, AdjacentPair.SWAPPED if swapped else AdjacentPair.POSITIVE, order_array
    )


def _at_every_order(blocks: Blocks, highest: int) -> Array:
    """Bounds at the orders 2, 3, ..., `highest`: computed at knots, interpolated between them.

    (a - 1) D_a is convex in a, for each change and so for the worst one: a chord lies above it.
    """
    every = np.arange(2, highest + 1, dtype=float)
    knots = np.append(
        _COMPUTED_ORDERS[: int(np.searchsorted(_COMPUTED_ORDERS, highest))], float(highest)
    )
    moments = _log_moments(blocks, knots)
    finite = np.isfinite(moments)
    # Divergences grow with the order, so what is infinite stays infinite from there on.
    limit = float(knots[finite].max(initial=1.0))
    divergences = np.full(len(every), np.inf)
    finite_orders = every <= limit
    if finite_orders.any():
        divergences[finite_orders] = np.interp(every[finite_orders], knots[finite], moments[finite]) / (
            every[finite_orders] - 1
        )
    return divergences


def _log_moments(blocks: Blocks, orders: Array) -> Array:
    """(a - 1) D_a without subsampling of records; orders computed before come from the cache."""
    cache = _moment_cache(blocks)
    missing = np.array([a for a in orders if a not in cache])
    if len(missing):
        computed = (missing - 1) * sum_over_blocks(blocks, missing)
        cache.update(zip(missing.tolist(), computed.tolist(), strict=True))
    return np.array([cache[a] for a in orders])


@lru_cache(maxsize=16)
def _moment_cache(blocks: Blocks) -> dict[float, float]:
    """Cache of the log-moments of these blocks by order; filled by `_log_moments`."""
    return {}
