"""Fit of encoded columns within one budget, by least squares or DP-SGD, on one ledger."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.core.errors import BudgetExceeded, DataError
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.randomness import fresh_generator
from hush.noise import Gaussian
from hush.sampling import FullBatch
from hush.schema import Array, Encoded
from hush.training.loop import train
from hush.training.methods.least_squares import NoisyLeastSquares
from hush.training.options import Logging, Randomness

Layers = list[tuple[Array, Array]]
"""Weight (outputs, inputs) and bias of each layer, tanh between them."""

_RELEASE = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=1.0))
"""One noisy sum of all records."""
_LEAST_LEFT = 0.01
"""Smallest fraction of the budget's precision (inverse noise variance) that a fit accepts."""
_NUMERIC_SQUARE = 1 / 9
"""Assumed mean square of a scaled number in least squares: bounds at three standard deviations."""
_TARGET_NORM = 0.5
"""Bound on scaled targets for full weight in least squares."""
_PRECISE = 0.002
"""Spectral norm of the Gram matrix noise per record below which least squares is as accurate as DP-SGD,
in a tenth of the time: docs/results/estimators.md."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of DP-SGD. They must not be chosen on the private records."""

    steps: int
    plan: Plan
    calibrated: bool
    """Whether the noise is already calibrated, as in a trial of `hush.tune`."""
    learning_rate: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Spending:
    """Budget of all charges on a ledger, and a seeded source of draws, for tests."""

    budget: Budget
    ledger: Ledger
    generator: torch.Generator | None
    fits: int | None = None
    """Number of fits, with this one, that share the rest of the budget; None: this fit spends it."""

    def calibrated(self, plan: Plan, steps: int = 1) -> Plan:
        """The plan with noise for this fit's part of the rest of the budget."""
        return calibrate(plan, self.budget, steps * (self.fits or 1), spent=self.ledger.counts)

    def multiplier(self, plan: Plan) -> float:
        """Noise multiplier of one release of a Gaussian plan."""
        return _multiplier(self.calibrated(plan))


@dataclass(frozen=True, eq=False)
class Targets:
    """Classes as indices, or one column of numbers that declared bounds scale to [-1, 1]."""

    values: npt.NDArray[Any]
    classes: int | None = None
    """Number of classes; None: numbers."""


@dataclass(frozen=True, eq=False)
class FittedModel:
    """Linear model or network on encoded columns."""

    layers: Layers

    def __call__(self, encoded: Encoded) -> Array:
        """Outputs of shape (records, outputs); numeric targets in units of the declared bounds."""
        values = encoded.features
        for place, (weight, bias) in enumerate(self.layers):
            values = (np.tanh(values) if place else values) @ weight.T + bias
        return values


def fit(
    encoded: Encoded, targets: Targets, spending: Spending, *, descent: Descent | None
) -> FittedModel:
    """Fit a model within the budget: least squares without a `descent`, else DP-SGD."""
    _check_worth_fitting(len(encoded.numeric), spending)
    if descent is None:
        layers = _least_squares(encoded.features, targets, _row_norm(encoded), spending)
    else:
        layers = _gradient_descent(encoded.features, targets, descent, spending)
    return FittedModel(layers)


def precise_statistics(encoded: Encoded, budget: Budget) -> bool:
    """Whether a Gram matrix released under this budget is nearly exact. Uses public numbers only."""
    rows, columns = len(encoded.numeric), encoded.numeric.shape[1] + encoded.categorical.shape[1]
    release = NoisyLeastSquares(multiplier=1.0, row_norm=_row_norm(encoded)).plan
    # asymptotic largest eigenvalue of a symmetric matrix of such noise
    multiplier = _multiplier(calibrate(release, budget, 1))
    noise = math.sqrt(2 * columns) * multiplier * release.clipping.reference_norm
    return noise <= _PRECISE * rows


def _check_worth_fitting(records: int, spending: Spending) -> None:
    """Raise if the noise of one release would exceed the signal. Uses public numbers only."""
    budget, left = spending.budget, spending.multiplier(_RELEASE)
    whole = _multiplier(calibrate(_RELEASE, budget, 1))
    if spending.fits is None and whole**2 < _LEAST_LEFT * left**2:
        raise BudgetExceeded(
            f"the charges on the ledger leave less than {_LEAST_LEFT:.0%} of epsilon={budget.epsilon:g} "
            f"at delta={budget.delta:g}: a fit would need {left / whole:.3g} times the noise of one "
            "with the whole budget. Allow a larger epsilon for all fits on the ledger."
        )
    if left >= records:
        raise DataError(
            f"{records} records (n_samples={records}) are too few for epsilon={budget.epsilon:g} at "
            f"delta={budget.delta:g}: the mean of one number in [-1, 1] would have noise of standard "
            f"deviation {left / records:.2g}. Use more records, or allow a larger epsilon."
        )


def _least_squares(inputs: Array, targets: Targets, row_norm: float, spending: Spending) -> Layers:
    """Linear model from one noisy release of the sufficient statistics, for the rest of the budget."""
    values, norm = targets.values, _TARGET_NORM
    if targets.classes is not None:  # centred indicators
        share = 1 / targets.classes
        values, norm = np.eye(targets.classes)[targets.values] - share, math.sqrt(1 - share)
    solver = NoisyLeastSquares(multiplier=1.0, row_norm=row_norm, target_norm=norm)
    solver = replace(solver, multiplier=spending.multiplier(solver.plan))
    ledger, table = spending.ledger, (torch.from_numpy(inputs), torch.from_numpy(values))
    ledger.store_delta(spending.budget.delta)
    fitted = solver(*table, ledger, generator=spending.generator)
    weight, bias = fitted.coefficients.T, fitted.intercept
    if targets.classes is not None:  # centred indicators sum to 0, the noise does not
        weight, bias = weight - weight.mean(0), bias - bias.mean()
    return [(weight, bias)]


def _gradient_descent(inputs: Array, targets: Targets, descent: Descent, spending: Spending) -> Layers:
    """Linear model or network by DP-SGD, for the rest of the budget.

    Layers have tanh between them. The last weight is initialised to zero, the others at random.
    """
    plan, ledger, generator = descent.plan, spending.ledger, spending.generator
    if not descent.calibrated:
        plan = spending.calibrated(plan, descent.steps)
    desired = torch.from_numpy(targets.values)
    if targets.classes is None:
        desired = desired.float()
    linear, source = [], generator or fresh_generator()
    for widths in pairwise([inputs.shape[1], *descent.hidden, targets.classes or 1]):
        linear.append(nn.utils.skip_init(nn.Linear, *widths))
        nn.init.normal_(linear[-1].weight, std=widths[0] ** -0.5, generator=source)
        nn.init.zeros_(linear[-1].bias)
    nn.init.zeros_(linear[-1].weight)
    model = nn.Sequential(*[part for layer in linear for part in (layer, nn.Tanh())][:-1])
    train(
        model,
        nn.MSELoss() if targets.classes is None else nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=descent.learning_rate, momentum=0.9),
        plan,
        (torch.from_numpy(inputs.astype(np.float32)), desired),
        budget=spending.budget,
        steps=descent.steps,
        ledger=ledger,
        logging=Logging(progress=False),
        randomness=Randomness(generator=generator),
    )
    weights = [parameter.detach().double().numpy() for parameter in model.parameters()]
    return list(zip(weights[::2], weights[1::2], strict=True))


def _row_norm(encoded: Encoded) -> float:
    """Largest norm, including the constant 1, of a row with full weight in least squares."""
    return math.sqrt(1 + encoded.categories + _NUMERIC_SQUARE * encoded.numeric.shape[1])


def _multiplier(plan: Plan) -> float:
    noise = plan.noise
    assert isinstance(noise, Gaussian)
    return noise.multiplier
