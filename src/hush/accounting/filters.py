"""Privacy filters: adaptive composition within a fixed budget (Feldman and Zrnic 2021).

Costs that depend on earlier outputs do not compose by addition, but a budget that no sequence of outputs
exceeds is a guarantee: docs/guarantees/filter.md.
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
        budget: RDP that a record may spend, at each order.
        records: Number of records; each has a separate budget.

    **Guarantee.** The Rényi divergence of all releases with and without a record is at most the budget
    (differential privacy), if a record's costs depend on that record and past releases alone, as in
    `individual_gaussian_rdp`. The budget is public; the spent part is sensitive. The filter may only
    exclude the record: a run that *stops* at its verdict is not private.

    >>> watched = RenyiFilter(orders=[2.0, 4.0], budget=[1.0, 2.0])
    >>> [bool(watched.admit([[0.4, 0.9]])[0]) for step in range(3)]
    [True, True, False]
    """

    def __init__(self, *, orders: npt.ArrayLike, budget: npt.ArrayLike, records: int = 1) -> None:
        self.orders = checked_orders(orders)
        self.budget = np.array(budget, dtype=float)
        if self.budget.shape != self.orders.shape or not (self.budget > 0).all():
            raise InvalidValue(
                f"budget={budget!r} must be a positive number for each of {len(self.orders)} orders. "
                "Pass e.g. budget=0.5 * orders.",
                key="budget",
            )
        self.records = check_count("records", records, "each record has a separate budget", at_least=1)
        self._spent = np.zeros((self.records, len(self.orders)))

    def admit(self, costs: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Admit and charge the records that take part in the next step.

        Args:
            costs: A row per record: Rényi divergence of the step with and without the record, the larger
                direction, at each order.

        Returns:
            Mask of the admitted records (sensitive).
        """
        price = np.asarray(costs, dtype=float)
        if price.shape != self._spent.shape or not (price >= 0).all():
            raise InvalidValue(
                f"costs of shape {price.shape} must be {self._spent.shape}, none below 0 or NaN: a row "
                "per record and a column per order.",
                key="costs",
            )
        after = self._spent + price * OUTWARD
        admitted = np.asarray((after <= self.budget).all(axis=1))
        self._spent[admitted] = after[admitted]
        return admitted

    def restore(self, spent: npt.ArrayLike) -> None:
        """Restore the RDP that the records have spent.

        Args:
            spent: `odometer()` of an equal filter.
        """
        self._spent = np.array(spent, dtype=float)

    def guarantee(self, delta: float) -> Guarantee:
        """The guarantee of all releases under the filter, past and future.

        Args:
            delta: Delta of the guarantee.
        """
        delta = DELTA["range"].check("delta", delta)
        epsilon = rdp_to_epsilon(self.budget, self.orders, delta)
        return Guarantee(epsilon=Bound(lower=0.0, upper=epsilon), delta=delta)

    def odometer(self) -> Array:
        """RDP that each record has spent at each order (sensitive)."""
        return self._spent.copy()


def individual_gaussian_rdp(norms: npt.ArrayLike, scale: float, orders: npt.ArrayLike) -> Array:
    """Individual RDP of a full-batch Gaussian step: a row per norm, a column per order.

    **Guarantee.** An upper bound for both directions, for Gaussian noise of standard deviation `scale`
    on the sum, also with bounded support: docs/guarantees/bounded.md, 4. It depends on the record alone.
    """
    sizes = np.asarray(norms, dtype=float) / scale
    return np.asarray(np.outer(sizes**2, checked_orders(orders)) / 2 * OUTWARD)
