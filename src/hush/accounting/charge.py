"""What plans cost: Rényi divergence of one step, epsilon of many."""

from collections import Counter
from collections.abc import Mapping

import numpy.typing as npt

from hush.accounting import pld
from hush.accounting.loss import Array
from hush.accounting.mechanism import SampledGaussian, mechanism
from hush.accounting.rdp import divergence
from hush.core.guarantee import DELTA, Guarantee
from hush.core.number import check_count
from hush.core.plan import Plan

_WHY_WHOLE = "each step is charged whole, so it is run whole or not at all"


def rdp(plan: Plan, orders: npt.ArrayLike, dimension: int | None = None) -> Array:
    """The Rényi divergence of one step of `plan` at each of the `orders`.

    **Guarantee.** Never below the larger of the two directions of adding and removing one record:
    docs/guarantees/poisson-gaussian.md. `dimension` does not matter for the parts there are yet:
    under Gaussian noise every direction of one length costs the same.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=2.0),
    ... )
    >>> [round(float(value), 6) for value in hush.rdp(plan, orders=[2, 8])]
    [0.25, 1.0]
    """
    return divergence(mechanism(plan), orders)


def epsilon(plan: Plan, steps: int, delta: float, dimension: int | None = None) -> Guarantee:
    """What `steps` steps of `plan` guarantee at `delta`.

    **Guarantee.** The true epsilon lies in the `Bound`: docs/guarantees/poisson-gaussian.md.
    `dimension` does not matter for the parts there are yet, as in `rdp`.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> print(hush.epsilon(plan, steps=10_000, delta=1e-5).epsilon)
    <= 6.1879 (and >= 6.1876)
    """
    return spent({plan: check_count("steps", steps, _WHY_WHOLE)}, delta)


def spent(counts: Mapping[Plan, int], delta: float) -> Guarantee:
    """What running each plan as often as `counts` says guarantees at `delta`, all together."""
    delta = DELTA["range"].check("delta", delta)
    merged: Counter[SampledGaussian] = Counter()
    for plan, count in counts.items():
        merged[mechanism(plan)] += check_count("steps", count, _WHY_WHOLE)
    return Guarantee(epsilon=pld.epsilon(merged, delta), delta=delta)
