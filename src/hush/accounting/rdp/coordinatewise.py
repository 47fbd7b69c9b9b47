"""RDP of one step with independent noise in each coordinate, sampled coordinates and sampled records."""

import math
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array, log1mexp, log_binomial, log_weights
from hush.accounting.rdp.allocation import sum_over_blocks
from hush.accounting.rdp.profile import PARTICIPATION, CoordinateRDP
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet


class AdjacentPair(Enum):
    """Known property of the pair of output laws without the record and with it, before sampling.

    docs/guarantees/coordinate-wise.md, "Input sampling", proves each.
    """

    SWAPPED = "a reflection swaps them: symmetric noise around a shift"
    POSITIVE = "odd moments of their ratio less 1 are not negative: symmetric noise, sampled coordinates"
    ANY = "nothing"


def subsampled_rdp(
    base: npt.ArrayLike, rate: float, pair: AdjacentPair, orders: npt.ArrayLike | None = None
) -> Array:
    """Rényi divergences D_a of one Poisson-subsampled step, from those without sampling.

    Args:
        base: D_a without sampling at a = 2, 3, ..., each whole order up to the largest.
        rate: the probability that a record takes part.
        pair: what is known of the two laws before sampling.
        orders: whole orders; every order of `base` unless given.

    Returns:
        D_a at each order.

    **Guarantee.** An upper bound on both directions, if `base` bounds both (each order may have its
    own worst case): docs/guarantees/coordinate-wise.md, "Input sampling".

    >>> subsampled_rdp([0.5, 0.75], rate=0.1, pair=AdjacentPair.SWAPPED).round(6).tolist()
    [0.006466, 0.01039]
    """
    rate = PARTICIPATION["range"].check("rate", rate)
    unsampled = np.asarray(base, dtype=float)
    if unsampled.ndim != 1 or not (unsampled >= 0).all():
        raise InvalidValue(
            f"base={base!r} must be a list of divergences >= 0 at the orders 2, 3, ...: the sum over "
            "who takes part needs every whole order up to the largest. Pass e.g. base=[0.5, 0.75]."
        )
    whole_orders = np.arange(2, len(unsampled) + 2) if orders is None else np.asarray(orders).astype(int)
    if rate == 1:
        chosen: Array = unsampled[whole_orders - 2]
        return chosen
    return np.array([_at_order(unsampled[: a - 1], rate, pair) for a in whole_orders])


def _at_order(unsampled: Array, rate: float, pair: AdjacentPair) -> float:
    """The bound at the order of the last entry of `unsampled`."""
    a = len(unsampled) + 1
    v = np.arange(2, a + 1)
    log_weight = log_binomial(a, v.astype(float), log_weights(rate))
    power = (v - 1) * unsampled
    # the binomial weights sum to one, so 1 is taken from every term
    terms = log_weight + power + log1mexp(-power)
    surcharge = removal_surcharge(v, a, pair)
    charged = surcharge > 0
    extra = (log_weight + power)[charged] + math.log1p(-rate) + np.log(surcharge[charged])
    excess = np.logaddexp.reduce(np.append(terms, extra))
    return float(np.logaddexp(0.0, excess) / (a - 1) * OUTWARD)


def removal_surcharge(v: npt.NDArray[np.int_], a: int, pair: AdjacentPair) -> Array:
    """The multiple of each term that is added to cover the direction in which the record is removed."""
    if pair is AdjacentPair.SWAPPED:
        return np.zeros(len(v))
    if pair is AdjacentPair.POSITIVE:
        # odd orders only: the splitting of Zhu and Wang is not convex where a density is negative
        return np.where((v == a) & (a % 2 == 1), 1.0, 0.0)
    # sup over 0 < r < 1 of (2 - r)^v r^(v-1), at r = 1 - 1 / (2v - 1); Zhu and Wang have 2 here
    multiple = (1 - (2.0 * v - 1) ** -2) ** (v - 1) * 2 * v / (2 * v - 1)
    return np.where(v >= 3, multiple, 0.0)


Blocks = tuple[tuple[CoordinateRDP, SensitivitySet], ...]

# Up to this order every whole one is computed: the binomial sum of subsampling magnifies errors. Beyond,
# orders are 3% apart, independently of the highest requested one, so that cached values are reused.
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
