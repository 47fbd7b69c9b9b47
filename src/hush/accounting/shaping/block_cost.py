"""RDP of a step as a function of its blocks' noise, with gradients: normal noise, sampled coordinates.

`coordinatewise_rdp` charges the same for any law, with certified integrals. For normal noise at whole
orders every stage is a finite sum, and the worst allocation is known (docs/guarantees/shaped-noise.md,
"One block"), which makes an objective to search with. Nothing is charged by it.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import Array, log_binomial_in_turn, log_expm1, log_sum_exp, log_weights
from hush.accounting.rdp.subsampling import AdjacentPair, removal_surcharge
from hush.core.parts import SensitivitySet


class BlockCost:
    """D_a of one step and its gradient in the blocks' log-variances, convex at each whole order."""

    def __init__(
        self,
        blocks: Sequence[SensitivitySet],
        rate: float,
        coordinate_rate: float,
        highest: int,
        pair: AdjacentPair,
    ) -> None:
        self._squares = np.array([block.max_entry**2 for block in blocks])
        self._moved = np.array([block.max_entries_moved for block in blocks])
        self._rate, self._pair = rate, pair
        v = np.arange(2, highest + 1)
        self._pairs: Array = v * (v - 1) / 2
        self._inner = _log_binomial(highest, coordinate_rate)
        self._outer = _log_binomial(highest, rate) if rate < 1 else None

    def at(self, order: int, log_variances: Array) -> tuple[float, Array]:
        """The divergence at one order, and its gradient."""
        moments, slopes = self._unsampled(order, log_variances)
        return self._sampled(order, moments, slopes)

    def at_all(self, orders: Sequence[int], log_variances: Array) -> list[tuple[float, Array]]:
        """`at` several orders, at little more than the cost of the highest alone."""
        moments, slopes = self._unsampled(max(orders), log_variances)
        return [self._sampled(a, moments[: a - 1], slopes[:, : a - 1]) for a in orders]

    def _unsampled(self, order: int, log_variances: Array) -> tuple[Array, Array]:
        """(v - 1) D_v for v = 2, ..., order without subsampling of records, and gradients by block.

        Theorem 5.2 of the twice-sampling paper, block by block.
        """
        weight = self._inner[: order - 1, : order - 1]
        pairs = self._pairs[: order - 1]
        total, slopes = np.zeros(order - 1), np.empty((len(self._squares), order - 1))
        for j, (square, entries_moved) in enumerate(zip(self._squares, self._moved, strict=True)):
            power = pairs * square * math.exp(-log_variances[j])
            # the binomial weights sum to one, so 1 is taken from every term
            excess = log_sum_exp(weight + log_expm1(power))
            moment = np.logaddexp(0.0, excess)
            total += entries_moved * moment
            slopes[j] = -entries_moved * (np.exp(weight + power - moment[:, None]) @ power)
        return total, slopes

    def _sampled(self, order: int, moments: Array, slopes: Array) -> tuple[float, Array]:
        """Theorem 5.4, and the surcharge for the removal of a record at odd orders."""
        if self._outer is None:
            return float(moments[-1]) / (order - 1), slopes[:, -1] / (order - 1)
        weight = self._outer[order - 2, : order - 1]
        surcharge = removal_surcharge(np.arange(2, order + 1), order, self._pair) * (1 - self._rate)
        with np.errstate(divide="ignore"):
            terms = weight + moments + np.log(-np.expm1(-moments) + surcharge)
        moment = float(np.logaddexp(0.0, log_sum_exp(terms)))
        parts = np.exp(weight + moments - moment) * (1 + surcharge)
        return moment / (order - 1), slopes @ parts / (order - 1)


def _log_binomial(highest: int, rate: float) -> Array:
    """Log-probabilities that v of a take part, rows a = 2, ..., highest, columns v = 2, ..., highest."""
    a = np.arange(2, highest + 1, dtype=float)[:, None]
    v = np.arange(2, highest + 1, dtype=float)[None, :]
    possible: npt.NDArray[np.bool_] = v <= a
    return np.where(possible, log_binomial_in_turn(a, np.minimum(v, a), log_weights(rate)), -np.inf)
