"""Fisher information loss of each record over many steps."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import Array
from hush.core.errors import InvalidValue
from hush.core.value import check_count
from hush.sampling import RATE


@dataclass
class FisherLoss:
    """Fisher information loss eta of each record, accumulated over the steps of a run (sensitive).

    Squared losses add over steps; a step in which each record takes part with probability `rate` adds
    that share of its information given that the record takes part: docs/guarantees/fisher.md. Along one
    run it is a sample of the information, whose mean over runs is what the theorem bounds.

    >>> loss = FisherLoss(records=2)
    >>> loss.add([0.01, 0.04]); loss.add([0.01, 0.04], rate=0.5)
    >>> loss.eta().round(4).tolist(), round(loss.largest, 4)
    ([0.1225, 0.2449], 0.2449)
    """

    records: int
    _squared: Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.records = check_count("records", self.records, "each has a loss of its own", at_least=1)
        self._squared = np.zeros(self.records)

    def add(self, squared: npt.ArrayLike, rate: float = 1.0) -> None:
        """Add one step.

        Args:
            squared: the largest eigenvalue of J^T diag(eta^2) J of each record, if it takes part.
            rate: the probability that a record takes part.
        """
        rate = RATE["range"].check("rate", rate)
        step = np.asarray(squared, dtype=float)
        if step.shape != (self.records,) or not (step >= 0).all():
            raise InvalidValue(
                f"squared of shape {step.shape} must be {self.records} numbers >= 0, one a record: "
                "information left out would be a loss that nobody counts.",
                key="squared",
            )
        self._squared += rate * step

    def eta(self) -> Array:
        """The Fisher information loss eta of each record."""
        return np.asarray(np.sqrt(self._squared))

    @property
    def largest(self) -> float:
        """The largest loss of any record."""
        return float(self.eta().max())

    @property
    def median(self) -> float:
        """The median loss over the records."""
        return float(np.median(self.eta()))

    def deviation(self) -> Array:
        """The least standard deviation of an unbiased estimate of each record (Cramér and Rao)."""
        with np.errstate(divide="ignore"):
            return np.asarray(1 / self.eta())
