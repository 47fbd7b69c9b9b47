"""Private linear models and small networks: noisy sufficient statistics, or DP-SGD."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.randomness import fresh_generator
from hush.integrations.sklearn.scaling import multiplier_of
from hush.integrations.sklearn.schema import Array, Encoded
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.loop import train
from hush.training.methods.least_squares import NoisyLeastSquares

Layers = list[tuple[Array, Array]]
"""Weight (outputs, inputs) and bias of each layer, tanh between them; they may be published."""

_NUMERIC_SQUARE = 1 / 9
"""Square of a scaled number that rows are assumed to have on average, in least squares: that of numbers
whose bounds are three standard deviations away. Longer rows get a smaller weight."""
_TARGET_NORM = 0.5
"""Scaled target up to which a record of such a row counts in full; larger ones get a smaller weight."""
_PRECISE = 0.002
"""Noise of the Gram matrix, in spectral norm and as a share of the records, below which least squares is
as accurate as DP-SGD and takes a tenth of its time: docs/results/estimators.md."""


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of DP-SGD; none may be chosen by looking at the records."""

    steps: int
    rate: float
    clip_norm: float
    learning_rate: float
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class ClassTargets:
    """Class of each record, as a number below `classes`."""

    places: npt.NDArray[np.int64]
    classes: int


@dataclass(frozen=True, eq=False)
class NumberTargets:
    """Targets of shape (records, 1), scaled to [-1, 1] by declared bounds."""

    values: Array


Targets = ClassTargets | NumberTargets


def row_norm(encoded: Encoded) -> float:
    """Norm of a row, with the constant 1, up to which it counts in full in least squares.

    Every categorical column has a single one; of numbers a typical size is assumed.

    Args:
        encoded: only the number of its columns counts.
    """
    return math.sqrt(1 + encoded.categories + _NUMERIC_SQUARE * encoded.numeric.shape[1])


def precise_statistics(encoded: Encoded, budget: Budget) -> bool:
    """Whether a Gram matrix released under this budget is nearly exact, from public numbers alone.

    Args:
        encoded: only the numbers of its rows and columns count.
        budget: of the release.
    """
    rows, columns = len(encoded.numeric), encoded.numeric.shape[1] + encoded.categorical.shape[1]
    release = NoisyLeastSquares(multiplier=1.0, row_norm=row_norm(encoded)).plan
    multiplier = multiplier_of(calibrate(release, budget, 1))
    # largest eigenvalue of a symmetric matrix of such noise, as it grows
    noise = math.sqrt(2 * columns) * multiplier * release.clipping.reference_norm
    return noise <= _PRECISE * rows


def least_squares(
    inputs: Array,
    targets: Targets,
    row_norm: float,
    budget: Budget,
    ledger: Ledger,
    generator: torch.Generator | None,
) -> Layers:
    """Linear model of one noisy release of the sufficient statistics, for the rest of the budget.

    Args:
        inputs: feature matrix.
        targets: numbers, or classes, whose centred indicators are the targets.
        row_norm: norm of a row, with the constant 1, up to which it counts in full.
        budget: most that everything on the ledger may cost.
        ledger: to charge.
        generator: seeds the noise: for tests.
    """
    values, norm = _regressed(targets)
    solver = NoisyLeastSquares(multiplier=1.0, row_norm=row_norm, target_norm=norm)
    plan = calibrate(solver.plan, budget, 1, spent=ledger.counts)
    solver = replace(solver, multiplier=multiplier_of(plan))
    ledger.store_delta(budget.delta)
    fitted = solver(torch.from_numpy(inputs), torch.from_numpy(values), ledger, generator=generator)
    weight, bias = fitted.coefficients.T, fitted.intercept
    if isinstance(targets, ClassTargets):  # centred indicators add up to 0, and noise does not
        weight, bias = weight - weight.mean(0), bias - bias.mean()
    return [(weight, bias)]


def _regressed(targets: Targets) -> tuple[Array, float]:
    """Targets of a regression, and the norm up to which they count in full."""
    if isinstance(targets, NumberTargets):
        return targets.values, _TARGET_NORM
    share = 1 / targets.classes
    return np.eye(targets.classes)[targets.places] - share, math.sqrt(1 - share)


def gradient_descent(
    inputs: Array,
    targets: Targets,
    descent: Descent,
    budget: Budget,
    ledger: Ledger,
    generator: torch.Generator | None,
    plan: Plan | None = None,
) -> Layers:
    """Linear model or network by DP-SGD (`hush.train`), for the rest of the budget.

    Args:
        inputs: feature matrix.
        targets: classes, or numbers.
        descent: its settings.
        budget: most that everything on the ledger may cost.
        ledger: to charge.
        generator: seeds the run: for tests.
        plan: of a trial; None: that of the settings, with noise for the rest of the budget.
    """
    if plan is None:
        plan = Plan(
            sampling=Poisson(rate=descent.rate),
            clipping=L2(norm=descent.clip_norm),
            noise=Gaussian(multiplier=1.0),
        )
        plan = calibrate(plan, budget, descent.steps, spent=ledger.counts)
    loss: nn.Module
    if isinstance(targets, NumberTargets):
        outputs, loss = 1, nn.MSELoss()
        desired = torch.from_numpy(targets.values.astype(np.float32))
    else:
        outputs, loss = targets.classes, nn.CrossEntropyLoss()
        desired = torch.from_numpy(targets.places)
    model = network([inputs.shape[1], *descent.hidden, outputs], generator)
    train(
        model,
        loss,
        torch.optim.SGD(model.parameters(), lr=descent.learning_rate, momentum=0.9),
        plan,
        (torch.from_numpy(inputs.astype(np.float32)), desired),
        budget=budget,
        steps=descent.steps,
        ledger=ledger,
        generator=generator,
    )
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [
        (layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy())
        for layer in linear
    ]


def network(widths: Sequence[int], generator: torch.Generator | None) -> nn.Sequential:
    """Linear layers with tanh between them; the last is zero, the others are random (public)."""
    source = fresh_generator() if generator is None else generator
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        with torch.no_grad():
            nn.init.normal_(layer.weight, std=inputs**-0.5, generator=source)
            nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    with torch.no_grad():
        layers[-2].weight.zero_()  # type: ignore[operator]
    return nn.Sequential(*layers[:-1])
