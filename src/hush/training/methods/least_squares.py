"""Differentially private linear least squares from noisy sufficient statistics."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger import LedgerOrPath
from hush.clipping import L2
from hush.clipping.norms import clipping_weights
from hush.core.errors import DataError
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.value import Value, number
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.methods.statistics import ROUNDING, release

Array = npt.NDArray[np.float64]

_AT_ONCE = 1024
_PRIORS = np.concatenate([[0.0], np.geomspace(1e-8, 1e4, 97)])
"""Candidate variances of the coefficients, in squared target norms."""
_RESIDUALS = np.geomspace(1e-8, 1.0, 25)
"""Candidate variances of the residuals, in squared target norms."""
_NORM = number(
    at_least=1e-3,
    at_most=1e3,
    why="it bounds the norm of a record: scale columns by declared bounds",
    example=1.0,
)


@dataclass(frozen=True, kw_only=True)
class LinearFit:
    """Affine function `inputs @ coefficients + intercept`, which may be published."""

    coefficients: Array
    """Coefficients of shape (columns, targets)."""
    intercept: Array
    """Intercept of shape (targets,)."""


@dataclass(frozen=True, kw_only=True)
class NoisyLeastSquares(Value):
    """Linear least squares from one Gaussian release of the sufficient statistics.

    A record with row x (including a constant 1) and targets t contributes w x x^T and w x t^T. The
    weight w is 1 if sqrt(|x|^2 (|x|^2 + (row_norm / target_norm)^2 |t|^2)) is at most sqrt(2)
    row_norm^2, and smaller otherwise. Records within both norms have weight 1.

    Args:
        multiplier: Noise multiplier.
        row_norm: Clipping norm of a row, including the constant.
        target_norm: Clipping norm of the targets of a record.

    **Guarantee.** See docs/guarantees/least-squares.md. The norms and the scale of the columns must not
    depend on the records.

    >>> solver = NoisyLeastSquares(multiplier=4.0, row_norm=2.0)
    >>> print(solver.guarantee(delta=1e-5).epsilon)
    <= 0.92635 (and >= 0.92634)
    """

    multiplier: float = field(metadata=MULTIPLIER)
    row_norm: float = field(metadata=_NORM)
    target_norm: float = field(default=1.0, metadata=_NORM)

    @property
    def plan(self) -> Plan:
        """Plan of the release, for the ledger."""
        clipping, noise = L2(norm=math.sqrt(2) * self.row_norm**2), Gaussian(multiplier=self.multiplier)
        return Plan(sampling=FullBatch(), clipping=clipping, noise=noise)

    def guarantee(self, delta: float) -> Guarantee:
        """(epsilon, delta) guarantee of this release alone.

        Args:
            delta: Delta of the guarantee.
        """
        return epsilon(self.plan, 1, delta)

    def __call__(
        self,
        inputs: Tensor,
        targets: Tensor,
        ledger: LedgerOrPath,
        *,
        generator: torch.Generator | None = None,
    ) -> LinearFit:
        """Charge the release, and return the empirical Bayes fit of the noisy statistics.

        Args:
            inputs: Inputs of shape (records, columns), without a constant column.
            targets: Targets of shape (records, targets).
            ledger: Ledger, or its path; one release is charged.
            generator: Seed of the noise, for tests.
        """
        shapes = tuple(inputs.shape), tuple(targets.shape)
        matrices = inputs.ndim == targets.ndim == 2 and len(inputs) == len(targets)
        if not matrices or not inputs.numel() or not targets.numel():
            raise DataError(
                f"inputs of shape {shapes[0]} and targets of shape {shapes[1]} must be two matrices "
                "with one row per record. Pass e.g. targets[:, None] for one target."
            )
        rows, values = (part.detach().to("cpu", torch.float64) for part in (inputs, targets))
        if not bool(rows.isfinite().all()) or not bool(values.isfinite().all()):
            raise DataError(
                "some inputs or targets are not finite (the records are private and not shown). Fix or "
                "drop each such record independently."
            )
        size, outputs = rows.shape[1] + 1, values.shape[1]
        norm = self.plan.clipping.reference_norm * (1 + ROUNDING)
        sums = ((norm, self._clipped_sum(*part)) for part in [(rows, values)])
        (noisy,) = release(self, self.plan, sums, ledger, records=len(rows), generator=generator)
        triangle, moments = np.split(noisy.numpy(), [size * (size + 1) // 2])
        upper = np.zeros((size, size))
        upper[np.triu_indices(size)] = triangle
        above = np.triu(upper, 1) / math.sqrt(2)
        deviation, factor = self.multiplier * norm, self.row_norm / self.target_norm
        return posterior_mean(
            gram=above + above.T + np.diag(np.diag(upper)),
            moments=moments.reshape(size, outputs) / factor,
            gram_deviation=deviation,
            moment_deviation=deviation / factor,
            records=len(rows),
            target_norm=self.target_norm,
        )

    def _clipped_sum(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Flat weighted sum over the records, in double precision (sensitive).

        The vector of a record consists of the upper triangle of x x^T and of x t^T, scaled by row_norm /
        target_norm. Off-diagonal entries are scaled by sqrt(2), so the norm of the triangle is |x|^2.
        """
        limit = self.plan.clipping.reference_norm
        size = inputs.shape[1] + 1
        gram = torch.zeros(size, size, dtype=torch.float64)
        moments = torch.zeros(size, targets.shape[1], dtype=torch.float64)
        for some, values in zip(inputs.split(_AT_ONCE), targets.split(_AT_ONCE), strict=True):
            rows = torch.cat([torch.ones(len(some), 1, dtype=torch.float64), some], 1)
            scaled = values * (self.row_norm / self.target_norm)  # both parts have the same bound
            lengths = torch.linalg.vector_norm(rows, dim=1)
            norms = lengths * torch.linalg.vector_norm(torch.cat([rows, scaled], 1), dim=1)
            weighted = (clipping_weights(limit, norms)[:, None] * rows).T
            gram += weighted @ rows
            moments += weighted @ scaled
        first, second = torch.triu_indices(size, size)
        isometry = torch.full((len(first),), math.sqrt(2), dtype=torch.float64)
        isometry[first == second] = 1.0
        return torch.cat([gram[first, second] * isometry, moments.flatten()])


def posterior_mean(
    *,
    gram: Array,
    moments: Array,
    gram_deviation: float,
    moment_deviation: float,
    records: int,
    target_norm: float,
) -> LinearFit:
    """Posterior mean of the coefficients given noisy sufficient statistics (post-processing).

    `gram` is X^T W X, of shape (1 + columns, 1 + columns), and `moments` is X^T W T, of shape (1 +
    columns, targets), with weights W. The first column of X is 1. The noise on the diagonal of `gram`
    has the standard deviation `gram_deviation`, and the noise on other entries has `gram_deviation` /
    sqrt(2).

    The columns and targets are centred by their noisy means, so the intercept is not shrunk. Let a be an
    eigenvalue of the centred Gram matrix (0 if it is negative). In the eigenbasis, a moment is a beta
    plus noise with three parts: sampling error of variance `residual` a, noise of the released moments
    of variance `moment_noise`, and noise of the Gram matrix times the coefficients, of variance
    `gram_noise` columns `prior`. If coefficients have variance `prior`, the posterior mean of beta is
    prior a / (prior a^2 + noise) times the moment. `prior` and `residual` maximise the marginal
    likelihood of the released moments (empirical Bayes).
    """
    noise = gram_deviation**2 / 2
    total = min(max(gram[0, 0], gram_deviation, 1.0), records)
    means, target_means = gram[0, 1:] / total, moments[0] / total
    eigenvalues, directions = np.linalg.eigh(gram[1:, 1:] - total * np.outer(means, means))
    along = np.maximum(eigenvalues, 0.0)
    rotated = directions.T @ (moments[1:] - total * np.outer(means, target_means))
    squares = float(np.mean(means**2))
    moment_noise = moment_deviation**2 * (1 + squares) + noise * np.mean(target_means**2)
    gram_noise = noise * (1 + 2 * squares)
    grid = np.meshgrid(_PRIORS, _RESIDUALS, indexing="ij")
    prior, residual = (target_norm**2 * variances.ravel() for variances in grid)
    error = np.outer(residual, along) + (moment_noise + gram_noise * len(along) * prior)[:, None]
    variance = np.outer(prior, along**2) + error
    likelihood = -(rotated.shape[1] * np.log(variance) + (rotated**2).sum(1) / variance).sum(1)
    best = int(likelihood.argmax())
    shrunk = prior[best] * along / variance[best]
    coefficients = directions @ (shrunk[:, None] * rotated)
    return LinearFit(coefficients=coefficients, intercept=target_means - means @ coefficients)
