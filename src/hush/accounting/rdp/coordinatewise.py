"""One step of a coordinate-wise mechanism: law, coordinate sampling, geometry, input sampling."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import Array
from hush.accounting.rdp.allocation import sum_over_blocks
from hush.accounting.rdp.profile import RATE, CoordinateRDP
from hush.accounting.rdp.subsampling import AdjacentPair, subsampled_rdp
from hush.core.errors import InvalidValue
from hush.core.sensitivity import SensitivitySet

Blocks = tuple[tuple[CoordinateRDP, SensitivitySet], ...]

# Up to this order every whole one is worked out: the sum over who takes part magnifies errors. Beyond,
# orders are 3% apart. They do not depend on the highest one asked for, so that a higher one reuses them.
_DENSE = 152
_WORKED_OUT: Array = np.unique(
    np.round(np.append(np.arange(2, _DENSE + 1), np.geomspace(_DENSE, 1e6, 298)))
)
# Dense where epsilon is decided: twice as many orders change it by less than 0.1%.
WHOLE_ORDERS: Array = np.unique(np.round(np.append(np.arange(2, 33), np.geomspace(33, 1024, 28))))


def coordinate_wise(
    blocks: Sequence[tuple[CoordinateRDP, SensitivitySet]], rate: float, orders: npt.ArrayLike
) -> Array:
    """D_a of one step at each order: `blocks` of coordinates, records that take part with `rate`.

    **Guarantee.** Never below either direction of adding and removing one record:
    docs/guarantees/coordinate-wise.md. Orders are whole numbers >= 2 where anything is sampled.

    >>> from hush.accounting.rdp.profile import Law
    >>> laplace = Profile(law=Law(beta=1, scale=1.0))
    >>> coordinate_wise([(laplace, Ball(p=1, norm=1.0))], rate=0.1, orders=[2, 4]).round(6).tolist()
    [0.008536, 0.017893]
    """
    wanted = np.atleast_1d(np.asarray(orders, dtype=float))
    if RATE["range"].check("rate", rate) == 1:
        return sum_over_blocks(blocks, wanted)
    whole = (wanted == np.round(wanted)) & (wanted >= 2)
    if not whole.all():
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers >= 2 under sampling: the amplification bound is "
            "a binomial sum over who takes part. Pass e.g. orders=[2, 3, 4]."
        )
    base = _at_every_order(tuple(blocks), int(wanted.max()))
    swapped = all(profile.rate == 1 for profile, _ in blocks)
    return subsampled_rdp(base, rate, AdjacentPair.SWAPPED if swapped else AdjacentPair.POSITIVE, wanted)


def _at_every_order(blocks: Blocks, highest: int) -> Array:
    """Bounds at the orders 2, 3, ..., `highest`: worked out at some, and joined between them.

    (a - 1) D_a is convex in a, for each change and so for the worst one: a chord lies above it.
    """
    every = np.arange(2, highest + 1, dtype=float)
    some = np.append(_WORKED_OUT[: int(np.searchsorted(_WORKED_OUT, highest))], float(highest))
    moments = _moments(blocks, some)
    finite = np.isfinite(moments)
    # Divergences grow with the order, so what is infinite stays infinite from there on.
    limit = float(some[finite].max(initial=1.0))
    joined = np.full(len(every), np.inf)
    near = every <= limit
    if near.any():
        joined[near] = np.interp(every[near], some[finite], moments[finite]) / (every[near] - 1)
    return joined


def _moments(blocks: Blocks, orders: Array) -> Array:
    """(a - 1) D_a without input sampling; an order that was worked out before is not again."""
    known = _known(blocks)
    missing = np.array([a for a in orders if a not in known])
    if len(missing):
        found = (missing - 1) * sum_over_blocks(blocks, missing)
        known.update(zip(missing.tolist(), found.tolist(), strict=True))
    return np.array([known[a] for a in orders])


@lru_cache(maxsize=16)
def _known(blocks: Blocks) -> dict[float, float]:
    """The moments of these blocks that were worked out, by order; filled by `_moments`."""
    return {}
