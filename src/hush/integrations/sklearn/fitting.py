"""Private fits on encoded columns, by least squares or DP-SGD, within one budget."""

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
"""Weight (outputs, inputs) and bias of each layer; activations are tanh."""

_RELEASE = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=1.0))
"""Plan of one noisy sum of all records."""
_LEAST_LEFT = 0.01
"""Minimum precision (inverse noise variance) of a fit, relative to a fit with the whole budget."""
_NUMERIC_SQUARE = 1 / 9
"""Assumed mean square of a scaled number in least squares, for bounds at three standard deviations."""
_TARGET_NORM = 0.5
"""Clipping norm of scaled targets in least squares."""
_PRECISE = 0.002
"""Maximum spectral norm of the Gram matrix noise per record for least squares. Up to it, least squares
is as accurate as DP-SGD, in a tenth of the time: docs/results/estimators.md."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of DP-SGD, which must not depend on the private records."""

    steps: int
    plan: Plan
    calibrated: bool
    """Whether the noise is already calibrated, as in a trial of `hush.tune`."""
    learning_rate: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Spending:
    """Budget of all charges on a ledger, and an optional seeded generator for tests."""

    budget: Budget
    ledger: Ledger
    generator: torch.Generator | None
    fits: int | None = None
    """Number of fits, including this fit, that share the remaining budget; None: this fit spends it."""

    def calibrated(self, plan: Plan, steps: int = 1) -> Plan:
        """Plan with noise calibrated to this fit's part of the remaining budget."""
        return calibrate(plan, self.budget, steps * (self.fits or 1), spent=self.ledger.counts)

    def multiplier(self, plan: Plan) -> float:
        """Noise multiplier of one release of a Gaussian plan."""
        return _multiplier(self.calibrated(plan))


@dataclass(frozen=True, eq=False)
class Targets:
    """Class indices, or a column of numbers scaled to [-1, 1] by declared bounds."""

    values: npt.NDArray[Any]
    classes: int | None = None
    """Number of classes; None for numbers."""


@dataclass(frozen=True, eq=False)
class FittedModel:
    """Linear model or network on encoded columns."""

    layers: Layers

    def __call__(self, encoded: Encoded) -> Array:
        """Outputs of shape (records, outputs); numeric outputs are scaled to [-1, 1]."""
        values = encoded.features
        for place, (weight, bias) in enumerate(self.layers):
            values = (np.tanh(values) if place else values) @ weight.T + bias
        return values


def fit(
    encoded: Encoded, targets: Targets, spending: Spending, *, descent: Descent | None
) -> FittedModel:
    """Fit a model within the budget: by DP-SGD, or by least squares if `descent` is None."""
    _check_worth_fitting(len(encoded.numeric), spending)
    if descent is None:
        layers = _least_squares(encoded.features, targets, _row_norm(encoded), spending)
    else:
        layers = _gradient_descent(encoded.features, targets, descent, spending)
    return FittedModel(layers)


def precise_statistics(encoded: Encoded, budget: Budget) -> bool:
    """Whether a Gram matrix released under this budget is nearly exact; uses only public numbers."""
    rows, columns = len(encoded.numeric), encoded.numeric.shape[1] + encoded.categorical.shape[1]
    release = NoisyLeastSquares(multiplier=1.0, row_norm=_row_norm(encoded)).plan
    # asymptotic largest eigenvalue of a symmetric noise matrix
    multiplier = _multiplier(calibrate(release, budget, 1))
    noise = math.sqrt(2 * columns) * multiplier * release.clipping.reference_norm
    return noise <= _PRECISE * rows


def _check_worth_fitting(records: int, spending: Spending) -> None:
    """Raise if the noise of one release would exceed the signal; uses only public numbers."""
    budget, left = spending.budget, spending.multiplier(_RELEASE)
    whole = _multiplier(calibrate(_RELEASE, budget, 1))
    if spending.fits is None and whole**2 < _LEAST_LEFT * left**2:
        raise BudgetExceeded(
            f"the charges on the ledger leave less than {_LEAST_LEFT:.0%} of epsilon={budget.epsilon:g} "
            f"at delta={budget.delta:g}: a fit would need {left / whole:.3g} times the noise of a fit "
            "with the whole budget. Allow a larger epsilon for all fits on the ledger."
        )
    if left >= records:
        raise DataError(
            f"{records} records (n_samples={records}) are too few for epsilon={budget.epsilon:g} at "
            f"delta={budget.delta:g}: the mean of one number in [-1, 1] would have noise of standard "
            f"deviation {left / records:.2g}. Use more records, or allow a larger epsilon."
        )


def _least_squares(inputs: Array, targets: Targets, row_norm: float, spending: Spending) -> Layers:
    """Fit a linear model by one noisy release of sufficient statistics, within the remaining budget."""
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
    if targets.classes is not None:  # centred indicators sum to 0; remove the sum of the noise
        weight, bias = weight - weight.mean(0), bias - bias.mean()
    return [(weight, bias)]


def _gradient_descent(inputs: Array, targets: Targets, descent: Descent, spending: Spending) -> Layers:
    """Fit a linear model or a network with tanh activations by DP-SGD, within the remaining budget.

    The last weight is initialised to zero, and the other weights are initialised at random.
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
    """Clipping norm of a row, including the constant 1, in least squares."""
    return math.sqrt(1 + encoded.categories + _NUMERIC_SQUARE * encoded.numeric.shape[1])


def _multiplier(plan: Plan) -> float:
    noise = plan.noise
    assert isinstance(noise, Gaussian)
    return noise.multiplier
