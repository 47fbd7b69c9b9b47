"""Coordinate sampling: each coordinate of a record takes part on its own."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.loss import Array
from hush.accounting.profile import (
    OUTWARD,
    Law,
    checked,
    curvature,
    least_bend,
    nearly_quadratic,
    sampled,
)
from hush.core.number import number
from hush.core.value import Value

RATE = number(
    above=0,
    at_most=1,
    why="it is the probability that a coordinate takes part",
    example=0.5,
)


@dataclass(frozen=True, kw_only=True)
class Profile(Value):
    """What one coordinate costs: noise of a law, and a shift that is there with probability `rate`."""

    law: Law
    rate: float = field(default=1.0, metadata=RATE)

    def __call__(self, orders: npt.ArrayLike, shifts: npt.ArrayLike) -> Array:
        """The larger of the two D_a between law(0) and (1 - rate) law(0) + rate law(shift).

        **Guarantee.** Never below the true value, and within 1e-8 of it relatively. The larger is
        always that of the mixture from law(0), for every symmetric law, rate and order:
        docs/guarantees/coordinate-wise.md, "Which direction". Convex in the shift at rate 1 and at
        whole orders; not proved elsewhere.

        >>> from hush.accounting.profile import Law
        >>> sampled = Profile(law=Law(beta=2, scale=1), rate=0.5)
        >>> bool(sampled(3, 0.5) < Profile(law=Law(beta=2, scale=1))(3, 0.5))
        True
        """
        order, shift = checked(orders, shifts)
        whole = bool((order == np.round(order)).all()) and float(order.max(initial=0)) <= 1000
        if self.law.beta == 2 and self.rate < 1 and whole:
            return self._binomial(order, shift / self.law.scale)
        return sampled(self.law, self.rate, order, shift)

    def curvature(self, order: Array, reach: Array) -> Array:
        """K such that the profile is at most K shift^2 up to `reach`."""
        return curvature(self.law, self.rate, order, reach)

    def nearly_quadratic(self, order: float) -> float:
        """A shift up to which `curvature` hardly grows with its reach."""
        return nearly_quadratic(self.law, self.rate, order)

    def least_bend(self, order: float, reach: float) -> float:
        """m >= 0 with M'' >= m at shifts up to `reach`, M = exp((order - 1) D); 0 if none is proved."""
        return order * (order - 1) * least_bend(self.law, reach) if self.rate == 1 else 0.0

    @property
    def quadratic(self) -> bool:
        """Whether the profile is a multiple of shift^2 at every order."""
        return self.law.beta == 2 and self.rate == 1

    def convex(self, order: Array) -> bool:
        """Whether the profile is proved convex in the shift at all these orders."""
        return self.rate == 1 or bool((order == np.round(order)).all())

    def _binomial(self, order: Array, shift: Array) -> Array:
        """Normal noise at whole orders; the binomial weights sum to 1, which is taken from each term."""
        found = np.zeros(order.shape)
        for a in np.unique(order):
            v = np.arange(2, a + 1)
            log_weight = gammaln(a + 1) - gammaln(v + 1) - gammaln(a - v + 1)
            log_weight += (a - v) * np.log1p(-self.rate) + v * np.log(self.rate)
            mine = order == a
            power = v * (v - 1) * shift[mine][:, None] ** 2
            with np.errstate(divide="ignore"):
                terms = log_weight + power + np.log(-np.expm1(-power))
            found[mine] = np.logaddexp(0.0, np.logaddexp.reduce(terms, axis=1)) / (a - 1)
        return OUTWARD * found
