"""Scaling of columns by declared bounds, or by noisy moments that are paid for."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.integrations.sklearn.schema import Array
from hush.noise import Gaussian
from hush.sampling import FullBatch
from hush.training.methods.moments import NoisyMoments

_SCALING_SHARE = 0.1
"""Share of epsilon that statistics for scaling get; what they leave of the budget goes to the fit."""
_DEVIATIONS = 3.0
"""Distance from the mean, in standard deviations, at which paid scaling clamps."""


@dataclass(frozen=True, eq=False)
class Interval:
    """Interval of each column within [-1, 1] that is mapped to [-1, 1], clamped."""

    centre: Array
    half_width: Array

    def scale(self, values: Array) -> Array:
        """Columns mapped from the interval to [-1, 1], each record by itself."""
        return np.clip((values - self.centre) / self.half_width, -1.0, 1.0)

    def take(self, columns: slice) -> "Interval":
        """Interval of some of the columns."""
        return Interval(self.centre[columns], self.half_width[columns])


def paid_interval(
    values: Array, budget: Budget, ledger: Ledger, generator: torch.Generator | None
) -> Interval:
    """Mean plus and minus three standard deviations of each column, from noisy moments on the ledger.

    **Guarantee.** That of `NoisyMoments`: the interval is a function of its release and of public
    numbers. A row of c numbers in [-1, 1] has a norm of sqrt(c) at most, and so have their squares.

    Args:
        values: scaled columns, in [-1, 1].
        budget: of everything on the ledger, of which a share is spent.
        ledger: to charge.
        generator: seeds the noise: for tests.
    """
    records, columns = values.shape
    share = Budget(epsilon=_SCALING_SHARE * budget.epsilon, delta=budget.delta)
    # of a ledger that earlier charges have nearly used up, a quarter of what is left at most
    left = multiplier_of(calibrate(one_release(), budget, 2, spent=ledger.counts))
    multiplier = max(multiplier_of(calibrate(one_release(), share, 2)), 2 * left)
    norm = math.sqrt(columns)
    # variances below what noise alone would show are not told from it
    floor = max(1e-6, 2 * multiplier * norm / records)
    moments = NoisyMoments(multiplier=multiplier, norm=norm, square_norm=norm, floor=min(floor, 1.0))
    released = moments(torch.from_numpy(values)[:, :, None], ledger, generator=generator)
    half_width = np.minimum(_DEVIATIONS * np.sqrt(released.variance.numpy()), 1.0)
    room = 1.0 - half_width
    return Interval(np.clip(released.mean.numpy(), -room, room), half_width)


def one_release() -> Plan:
    """Full-batch Gaussian release; its multiplier is to be calibrated."""
    return Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=1.0))


def multiplier_of(plan: Plan) -> float:
    """Noise multiplier of a plan of Gaussian noise."""
    assert isinstance(plan.noise, Gaussian)
    return plan.noise.multiplier
