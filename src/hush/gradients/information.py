"""Fisher information at many places at once, on their device: from a table of the exact numbers."""

import numpy as np
import torch
from torch import Tensor

from hush.accounting.bounded import fisher, support_of
from hush.core.errors import Unsupported
from hush.core.plan import Plan

_A_DEVIATION = 1024
"""Entries of the table to a deviation."""
_BEYOND = 40
"""Deviations outside the support where the table ends."""
_WIDEST = 1000
ERROR = 1e-6
"""Of the table, over 1/scale^2: a chord of length h is off by h^2/8 times the curvature at most."""


class Information:
    """eta^2 of one step of `plan` at any number of locations (sensitive, as they are).

    **Guarantee.** No less than `hush.fisher`, and no more than twice ERROR/scale^2 above it up to 40
    deviations outside the support; beyond that, what it is there. The law is symmetric and tells less
    the farther outside.
    """

    def __init__(self, plan: Plan, device: torch.device | str) -> None:
        self.scale = support_of(plan.noise, plan.clipping.unit)[1]
        half = getattr(plan.noise, "bound", 0.0) / self.scale
        if half > _WIDEST:
            raise Unsupported(
                f"{plan.noise} reaches {half:.3g} deviations to each side: a draw that never comes near "
                f"its ends is normal. Use Gaussian, or a bound of at most {_WIDEST} scales."
            )
        places = np.arange(int((half + _BEYOND) * _A_DEVIATION) + 2) / _A_DEVIATION
        exact = fisher(plan, places * self.scale)
        most = 1 / self.scale**2
        self._table = torch.as_tensor(np.minimum(exact + ERROR * most, most), device=device)

    def at(self, location: Tensor) -> Tensor:
        """eta^2 for each number, of the shape and type of the locations."""
        place = location.abs().mul(_A_DEVIATION / self.scale).clamp_(max=len(self._table) - 1.5)
        below = place.long()
        table = self._table.to(location.dtype)
        return torch.lerp(table[below], table[below + 1], place - below)
