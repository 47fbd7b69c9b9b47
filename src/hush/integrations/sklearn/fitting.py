"""Fit of encoded columns within one budget: scaling, then least squares or DP-SGD, on one ledger."""

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
from hush.integrations.sklearn.schema import Array, Encoded
from hush.noise import Gaussian
from hush.sampling import FullBatch
from hush.training.loop import train
from hush.training.methods.least_squares import NoisyLeastSquares
from hush.training.methods.moments import NoisyMoments
from hush.training.options import Randomness

Layers = list[tuple[Array, Array]]
"""Weight (outputs, inputs) and bias of each layer, tanh between them."""

_RELEASE = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=1.0))
"""One noisy sum of all records."""
_SCALING_SHARE = 0.1
"""Fraction of epsilon for the statistics of `scaling="paid"`. The fit gets the rest of the budget."""
_DEVIATIONS = 3.0
"""Distance from the mean, in standard deviations, at which `scaling="paid"` clamps."""
_LEAST_LEFT = 0.01
"""Smallest fraction of the budget's precision (inverse noise variance) that a fit accepts."""
_NUMERIC_SQUARE = 1 / 9
"""Assumed mean square of a scaled number in least squares: bounds at three standard deviations."""
_TARGET_NORM = 0.5
"""Scaled target at which a record of such a row keeps its full weight in least squares."""
_PRECISE = 0.002
"""Spectral norm of the Gram matrix noise per record, below which least squares is as accurate as DP-SGD
and takes a tenth of its time: docs/results/estimators.md."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of DP-SGD. They must not be chosen on the private records."""

    steps: int
    plan: Plan
    calibrated: bool
    """Whether the plan has its noise, as in a trial of `hush.tune`."""
    learning_rate: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Spending:
    """Budget of all charges on a ledger, and a seeded source of draws, for tests."""

    budget: Budget
    ledger: Ledger
    generator: torch.Generator | None

    def multiplier(self, plan: Plan, steps: int = 1) -> float:
        """Noise multiplier of a Gaussian plan for the rest of the budget."""
        return _multiplier(calibrate(plan, self.budget, steps, spent=self.ledger.counts))


@dataclass(frozen=True, eq=False)
class Targets:
    """Classes as indices, or one column of numbers that declared bounds scale to [-1, 1]."""

    values: npt.NDArray[Any]
    classes: int | None = None
    """Number of classes; None: numbers."""


@dataclass(frozen=True, eq=False)
class Interval:
    """Interval of each column within [-1, 1], to be mapped to [-1, 1]."""

    centre: Array
    half_width: Array

    def scale(self, values: Array) -> Array:
        """Map columns from the interval to [-1, 1] and clamp them, record by record."""
        return np.clip((values - self.centre) / self.half_width, -1.0, 1.0)


@dataclass(frozen=True, eq=False)
class FittedModel:
    """Linear model or network on encoded columns."""

    layers: Layers
    columns: Interval
    target: Interval
    """Interval of a numeric target. Empty for classes."""

    def __call__(self, encoded: Encoded) -> Array:
        """Outputs of shape (records, outputs); numeric targets in units of the declared bounds."""
        values = _features(encoded, self.columns)
        for place, (weight, bias) in enumerate(self.layers):
            values = (np.tanh(values) if place else values) @ weight.T + bias
        if len(self.target.centre):
            values = values * self.target.half_width + self.target.centre
        return values


def fit(
    encoded: Encoded, targets: Targets, spending: Spending, *, descent: Descent | None, paid: bool
) -> FittedModel:
    """Fit a model within the budget: least squares without a `descent`, else DP-SGD.

    `paid` scales by noisy moments instead of declared bounds.
    """
    _check_worth_fitting(len(encoded.numeric), spending)
    numeric, together = encoded.numeric.shape[1], encoded.numeric
    if targets.classes is None:
        together = np.hstack([encoded.numeric, targets.values])
    interval = Interval(np.zeros(together.shape[1]), np.ones(together.shape[1]))
    if paid and together.shape[1]:
        interval = _paid_interval(together, spending)
    own = Interval(interval.centre[:numeric], interval.half_width[:numeric])
    target = Interval(interval.centre[numeric:], interval.half_width[numeric:])
    if targets.classes is None:
        targets = Targets(target.scale(targets.values))
    inputs = _features(encoded, own)
    if descent is None:
        layers = _least_squares(inputs, targets, _row_norm(encoded), spending)
    else:
        layers = _gradient_descent(inputs, targets, descent, spending)
    return FittedModel(layers, own, target)


def precise_statistics(encoded: Encoded, budget: Budget) -> bool:
    """Whether a Gram matrix released under this budget is nearly exact. Uses public numbers only."""
    rows, columns = len(encoded.numeric), encoded.numeric.shape[1] + encoded.categorical.shape[1]
    release = NoisyLeastSquares(multiplier=1.0, row_norm=_row_norm(encoded)).plan
    # asymptotic largest eigenvalue of a symmetric matrix of such noise
    multiplier = _multiplier(calibrate(release, budget, 1))
    noise = math.sqrt(2 * columns) * multiplier * release.clipping.reference_norm
    return noise <= _PRECISE * rows


def _check_worth_fitting(records: int, spending: Spending) -> None:
    """Raise if the noise of one release would drown the records. Uses public numbers only."""
    budget, left = spending.budget, spending.multiplier(_RELEASE)
    whole = _multiplier(calibrate(_RELEASE, budget, 1))
    if whole**2 < _LEAST_LEFT * left**2:
        raise BudgetExceeded(
            f"the charges on the ledger leave less than {_LEAST_LEFT:.0%} of epsilon={budget.epsilon:g} "
            f"at delta={budget.delta:g}: a fit would need {left / whole:.3g} times the noise of one "
            "with the whole budget. Allow a larger epsilon for all fits on the ledger."
        )
    if left >= records:
        raise DataError(
            f"{records} records (n_samples={records}) are too few for epsilon={budget.epsilon:g} at "
            f"delta={budget.delta:g}: the mean of one number in [-1, 1] would get noise of standard "
            f"deviation {left / records:.2g}. Use more records, or allow a larger epsilon."
        )


def _paid_interval(values: Array, spending: Spending) -> Interval:
    """Mean plus and minus three standard deviations of each column, from noisy moments on the ledger.

    **Guarantee.** The interval is post-processing of `NoisyMoments`. A row of c numbers in [-1, 1] and
    the row of their squares have norms of at most sqrt(c).
    """
    records, columns = values.shape
    share = Budget(_SCALING_SHARE * spending.budget.epsilon, spending.budget.delta)
    # spend at most a quarter of the rest
    left = spending.multiplier(_RELEASE, 2)
    multiplier = max(_multiplier(calibrate(_RELEASE, share, 2)), 2 * left)
    norm = math.sqrt(columns)
    # smaller variances are indistinguishable from noise
    floor = max(1e-6, 2 * multiplier * norm / records)
    moments = NoisyMoments(multiplier=multiplier, norm=norm, square_norm=norm, floor=min(floor, 1.0))
    columns_of = torch.from_numpy(values)[:, :, None]
    released = moments(columns_of, spending.ledger, generator=spending.generator)
    half_width = np.minimum(_DEVIATIONS * np.sqrt(released.variance.numpy()), 1.0)
    room = 1.0 - half_width
    return Interval(np.clip(released.mean.numpy(), -room, room), half_width)


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

    Layers have tanh between them. The last weight begins at zero, the others are random.
    """
    plan, ledger, generator = descent.plan, spending.ledger, spending.generator
    if not descent.calibrated:
        plan = calibrate(plan, spending.budget, descent.steps, spent=ledger.counts)
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
        randomness=Randomness(generator=generator),
    )
    weights = [parameter.detach().double().numpy() for parameter in model.parameters()]
    return list(zip(weights[::2], weights[1::2], strict=True))


def _features(encoded: Encoded, interval: Interval) -> Array:
    return np.hstack([interval.scale(encoded.numeric), encoded.categorical])


def _row_norm(encoded: Encoded) -> float:
    """Largest norm, including the constant 1, of a row with full weight in least squares."""
    return math.sqrt(1 + encoded.categories + _NUMERIC_SQUARE * encoded.numeric.shape[1])


def _multiplier(plan: Plan) -> float:
    noise = plan.noise
    assert isinstance(noise, Gaussian)
    return noise.multiplier
