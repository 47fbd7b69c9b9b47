"""Privacy filters: adaptive composition within a budget that is fixed beforehand.

After Feldman and Zrnic 2021. Costs that depend on earlier outputs do not compose by addition; a
budget that no sequence of outputs can exceed is a guarantee: docs/guarantees/filter.md.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from hush.accounting.epsilon import checked_orders
from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import DELTA, Bound, Guarantee
from hush.core.value import check_count


class RenyiFilter:
    """Individual Rényi filter: a record takes part while its RDP stays within a budget at every order.

    Args:
        orders: Rényi orders, each above 1.
        budget: RDP that a record may spend, at each order.
        records: Number of records; each has a separate budget.
        knows: Information that a record's cost may depend on, besides past releases. "record": that
            record alone, as in `individual_gaussian_rdp`. "location": all records, as in
            `hush.individual_rdp(..., change=)`. Then only one record may have a filter: others would be
            admitted by data that is not theirs.

    **Guarantee.** The Rényi divergence of all releases, with a record and without it, is at most the
    budget: for every record ("record": differential privacy), or for the watched one ("location": per
    instance). The budget is public and the spent part is not. The filter may decide only to leave the
    record out: a run that *stops* at its verdict is not private.

    >>> watched = RenyiFilter(orders=[2.0, 4.0], budget=[1.0, 2.0])
    >>> [bool(watched.admit([[0.4, 0.9]])[0]) for step in range(3)]
    [True, True, False]
    """

    def __init__(
        self,
        *,
        orders: npt.ArrayLike,
        budget: npt.ArrayLike,
        records: int = 1,
        knows: Literal["record", "location"] = "record",
    ) -> None:
        self.orders = checked_orders(orders)
        self.budget = np.array(budget, dtype=float)
        if self.budget.shape != self.orders.shape or not (self.budget > 0).all():
            raise InvalidValue(
                f"budget={budget!r} must be a positive number for each of {len(self.orders)} orders. "
                "Pass e.g. budget=0.5 * orders.",
                key="budget",
            )
        self.records = check_count("records", records, "each has a budget of its own", at_least=1)
        if knows == "location" and self.records > 1:
            raise Unproved(
                f"records={records} with costs that depend on the location: the admission of a record "
                "would depend on other records, which no noise hides. Watch one record, or use costs "
                'that depend on the record alone (knows="record").',
                key="records",
            )
        self.knows = knows
        self._spent = np.zeros((self.records, len(self.orders)))

    def admit(self, costs: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Admit and charge the records that take part in the next step.

        Args:
            costs: A row for each record: Rényi divergences of the step with the record and without it,
                the larger of both directions, at each order.

        Returns:
            A mask of the admitted records (sensitive: it depends on the records).
        """
        price = np.asarray(costs, dtype=float)
        if price.shape != self._spent.shape or not (price >= 0).all():
            raise InvalidValue(
                f"costs of shape {price.shape} must be {self._spent.shape}, none below 0 or NaN: a row "
                "for each record, a column for each order.",
                key="costs",
            )
        after = self._spent + price * OUTWARD
        admitted = np.asarray((after <= self.budget).all(axis=1))
        self._spent[admitted] = after[admitted]
        return admitted

    def restore(self, spent: npt.ArrayLike) -> None:
        """Continue with RDP that the records have spent.

        Args:
            spent: Result of `odometer` of an equal filter.
        """
        self._spent = np.array(spent, dtype=float)

    def guarantee(self, delta: float) -> Guarantee:
        """The guarantee of all releases under the filter, past and future.

        Args:
            delta: Delta of the guarantee.
        """
        delta, dp = DELTA["range"].check("delta", delta), self.knows == "record"
        return Guarantee(
            epsilon=Bound(lower=0.0, upper=rdp_to_epsilon(self.budget, self.orders, delta)),
            delta=delta,
            notion="dp" if dp else "per-instance",
            unit="one record" if dp else "the record that is watched",
            # the cost at a location is bounded for the unrounded law
            arithmetic="proved" if dp else "assumed",
        )

    def odometer(self) -> Array:
        """RDP that each record has spent at each order (sensitive: it depends on the records)."""
        return self._spent.copy()


def individual_gaussian_rdp(norms: npt.ArrayLike, scale: float, orders: npt.ArrayLike) -> Array:
    """Individual RDP of a full-batch Gaussian step: a row for each record's norm, a column per order.

    **Guarantee.** For normal noise of deviation `scale` on the sum, on a fixed support or not, in both
    directions: docs/guarantees/bounded.md, 4. It depends on the record alone.
    """
    sizes = np.asarray(norms, dtype=float) / scale
    return np.asarray(np.outer(sizes**2, checked_orders(orders)) / 2 * OUTWARD)
