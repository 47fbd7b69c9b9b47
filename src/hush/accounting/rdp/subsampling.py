"""Privacy amplification by Poisson subsampling of records, for Rényi divergences."""

import math
from enum import Enum

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array, log1mexp, log_binomial, log_weights
from hush.accounting.rdp.profile import PARTICIPATION
from hush.core.errors import InvalidValue


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
