"""Fisher information loss over many steps: what adds up, and how to read it."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import Array
from hush.core.errors import InvalidValue
from hush.core.ranges import check_count
from hush.sampling.poisson import RATE


@dataclass
class FisherLoss:
    """What the steps of a run tell about each record (sensitive: it depends on the records).

    Squared losses add over steps; a step in which each record takes part with chance `rate` counts that
    much of what it would tell if the record took part: docs/guarantees/fisher.md. Along one run it is a
    sample of the information, whose mean over runs is what the theorem speaks of.

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
        """One more step: each record's largest eigenvalue of J^T diag(eta^2) J, if it takes part."""
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
        """The loss of each record."""
        return np.asarray(np.sqrt(self._squared))

    @property
    def largest(self) -> float:
        """That of the record that is told most about."""
        return float(self.eta().max())

    @property
    def median(self) -> float:
        return float(np.median(self.eta()))

    def deviation(self) -> Array:
        """The least standard deviation, in any direction, of an unbiased guess of each record."""
        with np.errstate(divide="ignore"):
            return np.asarray(1 / self.eta())
