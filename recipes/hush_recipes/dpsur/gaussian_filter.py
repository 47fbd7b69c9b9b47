"""Gaussian-DP filter: adaptive full-batch Gaussian releases within a precision fixed beforehand."""

import math

from hush.accounting.calibrate import calibrate
from hush.accounting.epsilon import epsilon
from hush.accounting.numerics import OUTWARD
from hush.clipping import L2
from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget, Guarantee
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.sampling import FullBatch


class GaussianFilter:
    """Gaussian-DP filter: admits full-batch Gaussian releases within a total precision fixed beforehand.

    The precision of a release is 1 / multiplier^2, its squared mu of Gaussian DP. Each may depend on
    all that was released before, and so may the decision to stop.

    Args:
        budget: Epsilon and delta of all releases together.

    **Guarantee.** All that is released under the filter, whatever the outputs, is dominated by one
    Gaussian release of the whole precision, `plan`: docs/guarantees/baselines.md. That plan is what a
    ledger is charged, once, before the first release. What was spent in the end promises nothing by
    itself.

    >>> budget = GaussianFilter(Budget(epsilon=1.0, delta=1e-5))
    >>> [budget.admit(share * budget.precision) for share in (0.5, 0.4, 0.2, 0.09)]
    [True, True, False, True]
    """

    def __init__(self, budget: Budget) -> None:
        start = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=1.0))
        self.plan = calibrate(start, budget, steps=1)
        assert isinstance(self.plan.noise, Gaussian)
        self.precision = self.plan.noise.multiplier**-2
        self._spent = 0.0

    @property
    def remaining(self) -> float:
        """The precision that may still be spent; public, as it is a function of what was released."""
        return max(0.0, self.precision - self._spent)

    def admit(self, precision: float) -> bool:
        """Whether one more release fits; if so it is charged, and must then be made as said.

        Args:
            precision: 1 / multiplier^2 of the release.
        """
        if not 0 < precision < math.inf:
            raise InvalidValue(
                f"precision={precision!r} must be above 0 and finite: it is what a release costs, "
                "1 / multiplier^2. Pass e.g. precision=0.01.",
                key="precision",
            )
        after = self._spent + precision * OUTWARD
        if after > self.precision:
            return False
        self._spent = after
        return True

    def guarantee(self, delta: float) -> Guarantee:
        """The guarantee of all releases under the filter, past and future.

        Args:
            delta: Delta of the guarantee.
        """
        return epsilon(self.plan, 1, delta)
