"""Fits of encoded columns within one budget: scaling, then a solver, on one ledger."""

from dataclasses import dataclass

import numpy as np
import torch

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger.ledger import Ledger
from hush.core.errors import BudgetExceeded, DataError
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.integrations.sklearn.scaling import Interval, multiplier_of, one_release, paid_interval
from hush.integrations.sklearn.schema import Array, Encoded
from hush.integrations.sklearn.solvers import (
    Descent,
    Layers,
    NumberTargets,
    Targets,
    gradient_descent,
    least_squares,
    row_norm,
)

_LEAST_LEFT = 0.01
"""Share of the budget's precision (inverse variance of noise) that a fit must have: calibration leaves a
little, from which a second fit would be made of noise."""


@dataclass(frozen=True, eq=False)
class FittedModel:
    """Linear model or network on encoded columns, which may be published with its guarantee."""

    layers: Layers
    columns: Interval
    target: Interval
    """Of one number; of none for classes."""

    def __call__(self, encoded: Encoded) -> Array:
        """Outputs of shape (records, outputs); numbers are in units of the declared bounds."""
        values = features(encoded, self.columns)
        for place, (weight, bias) in enumerate(self.layers):
            values = (np.tanh(values) if place else values) @ weight.T + bias
        return (
            values * self.target.half_width + self.target.centre if len(self.target.centre) else values
        )


def fit(
    encoded: Encoded,
    targets: Targets,
    *,
    descent: Descent | None,
    paid: bool,
    budget: Budget,
    ledger: Ledger,
    generator: torch.Generator | None,
    plan: Plan | None = None,
) -> FittedModel:
    """Model of the records, charged to a ledger whose whole stays within the budget.

    Args:
        encoded: columns, scaled by the declared schema.
        targets: classes or numbers, scaled by declared bounds.
        descent: settings of DP-SGD; None: least squares.
        paid: scale by noisy moments instead of declared bounds.
        budget: most that everything on the ledger may cost.
        ledger: to charge.
        generator: seeds all draws: for tests.
        plan: of a trial's steps of DP-SGD; None: that of `descent`, calibrated to the budget.
    """
    numeric = encoded.numeric.shape[1]
    check_worth_fitting(len(encoded.numeric), budget, ledger)
    columns = (
        [encoded.numeric, targets.values] if isinstance(targets, NumberTargets) else [encoded.numeric]
    )
    together = np.hstack(columns)
    interval = Interval(np.zeros(together.shape[1]), np.ones(together.shape[1]))
    if paid and together.shape[1]:
        interval = paid_interval(together, budget, ledger, generator)
    own, target = interval.take(slice(numeric)), interval.take(slice(numeric, None))
    if isinstance(targets, NumberTargets):
        targets = NumberTargets(target.scale(targets.values))
    inputs = features(encoded, own)
    if descent is None:
        layers = least_squares(inputs, targets, row_norm(encoded), budget, ledger, generator)
    else:
        layers = gradient_descent(inputs, targets, descent, budget, ledger, generator, plan)
    return FittedModel(layers, own, target)


def check_worth_fitting(records: int, budget: Budget, ledger: Ledger) -> None:
    """Raise where hardly anything is left of the budget, or nothing could be told from its noise.

    Either is a function of public numbers: noise multipliers of one release.
    """
    whole = multiplier_of(calibrate(one_release(), budget, 1))
    left = multiplier_of(calibrate(one_release(), budget, 1, spent=ledger.counts))
    if whole**2 < _LEAST_LEFT * left**2:
        raise BudgetExceeded(
            f"the charges on the ledger leave less than {_LEAST_LEFT:.0%} of epsilon={budget.epsilon:g} "
            f"at delta={budget.delta:g}: a fit would need {left / whole:.3g} times the noise of one "
            "with all of it. Allow a larger epsilon: it is of all fits on the ledger together."
        )
    if left >= records:
        raise DataError(
            f"{records} records (n_samples={records}) are too few for epsilon={budget.epsilon:g} at "
            f"delta={budget.delta:g}: even the mean of one number in [-1, 1] would be released with "
            f"noise of standard deviation {left / records:.2g}. Use more records, or allow a larger "
            "epsilon."
        )


def features(encoded: Encoded, interval: Interval) -> Array:
    """Feature matrix of encoded columns, in [-1, 1]."""
    return np.hstack([interval.scale(encoded.numeric), encoded.categorical])
