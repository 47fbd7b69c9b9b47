"""Privacy filters: adaptive composition within a fixed budget (Feldman and Zrnic 2021).

The sum of costs that depend on earlier outputs is not a guarantee. A budget that is not exceeded for any
sequence of outputs is a guarantee: docs/guarantees/filter.md.
"""

import numpy as np
import numpy.typing as npt

from hush.accounting.epsilon import checked_orders
from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.core.errors import InvalidValue
from hush.core.guarantee import DELTA, Bound, Guarantee
from hush.core.value import check_count


class RenyiFilter:
    """Individual Rényi filter: a record takes part while its RDP is within a budget at every order.

    Args:
        orders: Rényi orders, each above 1.
        budget: RDP budget of each record, at each order.
        records: Number of records. Each record has a separate budget.

    **Guarantee.** The Rényi divergence of all releases with and without a record is at most the budget
    (differential privacy). The cost of a record must only depend on this record and past releases, as in
    `individual_gaussian_rdp`. The budget is public; the spent part is sensitive. The filter may only
    exclude records: a run that *stops* because of it is not private.

    >>> watched = RenyiFilter(orders=[2.0, 4.0], budget=[1.0, 2.0])
    >>> [bool(watched.admit([[0.4, 0.9]])[0]) for step in range(3)]
    [True, True, False]
    """

    def __init__(self, *, orders: npt.ArrayLike, budget: npt.ArrayLike, records: int = 1) -> None:
        self.orders = checked_orders(orders)
        self.budget = np.array(budget, dtype=float)
        if self.budget.shape != self.orders.shape or not (self.budget > 0).all():
            raise InvalidValue(
                f"budget={budget!r} must have a positive number for each of {len(self.orders)} orders. "
                "Pass e.g. budget=0.5 * orders.",
                key="budget",
            )
        self.records = check_count("records", records, "each record has a separate budget", at_least=1)
        self._spent = np.zeros((self.records, len(self.orders)))

    def admit(self, costs: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Decide which records take part in the next step, and subtract its cost from their budgets.

        Args:
            costs: Rényi divergence of the step with and without the record, the larger of both
                directions: one row per record, one column per order.

        Returns:
            Mask of the admitted records (sensitive).
        """
        price = np.asarray(costs, dtype=float)
        if price.shape != self._spent.shape or not (price >= 0).all():
            raise InvalidValue(
                f"costs of shape {price.shape} must have shape {self._spent.shape} and no negative or "
                "NaN entry: a row per record and a column per order.",
                key="costs",
            )
        after = self._spent + price * OUTWARD
        admitted = np.asarray((after <= self.budget).all(axis=1))
        self._spent[admitted] = after[admitted]
        return admitted

    def restore(self, spent: npt.ArrayLike) -> None:
        """Restore the spent RDP of each record.

        Args:
            spent: Result of `odometer()` of a filter with the same arguments.
        """
        self._spent = np.array(spent, dtype=float)

    def guarantee(self, delta: float) -> Guarantee:
        """Guarantee for all past and future releases under the filter.

        Args:
            delta: Delta of the guarantee.
        """
        delta = DELTA["range"].check("delta", delta)
        epsilon = rdp_to_epsilon(self.budget, self.orders, delta)
        return Guarantee(epsilon=Bound(lower=0.0, upper=epsilon), delta=delta)

    def odometer(self) -> Array:
        """Spent RDP of each record at each order (sensitive)."""
        return self._spent.copy()


def individual_gaussian_rdp(norms: npt.ArrayLike, scale: float, orders: npt.ArrayLike) -> Array:
    """Individual RDP of a full-batch Gaussian step: one row per gradient norm, one column per order.

    **Guarantee.** An upper bound for both directions, for Gaussian noise of standard deviation `scale`
    on the sum, with or without bounded support: docs/guarantees/bounded.md, section 4. The result only
    depends on the record.
    """
    sizes = np.asarray(norms, dtype=float) / scale
    return np.asarray(np.outer(sizes**2, checked_orders(orders)) / 2 * OUTWARD)
