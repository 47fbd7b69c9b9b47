"""Private first and second moments of the inputs: normalisation and whitening."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger import LedgerOrPath
from hush.clipping import L2
from hush.clipping.norms import NORM
from hush.core.errors import DataError
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.value import Value, check_kind, number
from hush.gradients.precision import vector_norms
from hush.gradients.rules.linear import outer_product_term
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense, Term
from hush.noise import Gaussian
from hush.noise.gaussian import MULTIPLIER
from hush.sampling import FullBatch
from hush.training.methods.statistics import ROUNDING, release

Statistics = TypeVar("Statistics")

_AT_ONCE = 1024
_CANCELLING = 2.0**10
"""Size of the terms of a mean, in clipping norms, above which the rounding of their sum matters."""
_FLOOR = number(above=0, at_most=1e12, why="noise can make a variance negative", example=1e-5)


@dataclass(frozen=True, kw_only=True)
class NoisySums(Value, ABC, Generic[Statistics]):
    """Two sums of clipped vectors over the records, released with Gaussian noise.

    **Guarantee.** docs/guarantees/baselines.md. The clipping norms must not depend on the records.
    """

    multiplier: float = field(metadata=MULTIPLIER)
    norm: float = field(default=1.0, metadata=NORM)
    square_norm: float = field(default=1.0, metadata=NORM)

    @property
    def plan(self) -> Plan:
        """Plan of each of the two releases, which have the same cost."""
        noise = Gaussian(multiplier=self.multiplier)
        return Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=noise)

    def guarantee(self, delta: float) -> Guarantee:
        """(epsilon, delta) guarantee of these two releases alone.

        Args:
            delta: Failure probability.
        """
        return epsilon(self.plan, 2, delta)

    @abstractmethod
    def _vectors(self, values: Tensor) -> tuple[Term, Term]:
        """Contributions of finite records (records, channels, places) to the two sums (sensitive)."""

    @abstractmethod
    def _statistics(self, means: list[Tensor], shape: torch.Size) -> Statistics:
        """Statistics from the two noisy means, by post-processing."""

    def __call__(
        self, inputs: Tensor, ledger: LedgerOrPath, *, generator: torch.Generator | None = None
    ) -> Statistics:
        """Charge the two releases and return the statistics of the inputs.

        Args:
            inputs: Records of shape (records, channels, places...).
            ledger: Ledger to charge, twice, or its path.
            generator: Seed of the noise, for tests.
        """
        check_kind("inputs", inputs, Tensor)
        if inputs.ndim < 2 or not inputs.numel() or not inputs.is_floating_point():
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} and type {inputs.dtype} must be floating-point "
                "numbers, records x channels x places, at least one of each. Pass e.g. inputs.float()."
            )
        sums, many = self._clipped_sums(inputs), len(inputs)
        means = release(self, self.plan, sums, ledger, records=many, generator=generator, divisor=many)
        return self._statistics(means, inputs.shape)

    def _clipped_sums(self, inputs: Tensor) -> Iterator[tuple[float, Tensor]]:
        """Norm with rounding slack, and clipped sum, of each of the two vectors (sensitive)."""
        norms = self.norm, self.square_norm
        totals = [torch.zeros((), dtype=torch.float64)] * 2
        for some in inputs.split(_AT_ONCE):
            flat = some.to(torch.float64).reshape(*some.shape[:2], -1)
            finite = flat.flatten(1).isfinite().all(1)
            values = flat.where(finite[:, None, None], 0.0)
            for place, rows in enumerate(self._vectors(values)):
                tape = GradientTape({"rows": rows}, values.device)
                totals[place] = totals[place] + L2(norm=norms[place]).clip(tape).total["rows"].cpu()
        yield from ((norm * (1 + ROUNDING), total) for norm, total in zip(norms, totals, strict=True))


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Mean and variance of each channel, which may be published."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, kw_only=True)
class NoisyMoments(NoisySums[Moments]):
    """Differentially private mean and variance of each channel over all records and places.

    The first sum is over each record's channel means, the second over its channel means of squares.

    Args:
        multiplier: Noise multiplier of both sums.
        norm: Clipping norm of a record's channel means.
        square_norm: Clipping norm of a record's mean squares.
        floor: Lower bound on the returned variances.

    **Guarantee.** See `NoisySums`; the floor must not depend on the records either.

    >>> print(NoisyMoments(multiplier=8.0).guarantee(delta=1e-5).epsilon)
    <= 0.63398 (and >= 0.63397)
    """

    floor: float = field(default=1e-5, metadata=_FLOOR)

    def _vectors(self, values: Tensor) -> tuple[Term, Term]:
        # if the terms of a mean cancel, its rounding may depend on other records: such means are scaled
        # down to 0 if the terms are above 1,000 times `norm`
        terms = vector_norms(values.abs().mean(2), 2.0)
        trust = (2 - terms / (_CANCELLING * self.norm)).clamp(min=0.0, max=1.0).nan_to_num()
        return Dense(values.mean(2) * trust[:, None]), Dense(values.square().mean(2))

    def _statistics(self, means: list[Tensor], shape: torch.Size) -> Moments:
        first, second = means
        return Moments(mean=first, variance=(second - first**2).clamp(min=self.floor))


class FrozenWhitening(nn.Module):
    """Frozen affine layer: subtracts a public mean and multiplies channels by a public matrix."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, mean: Tensor, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.to(torch.float32))
        self.register_buffer("matrix", matrix.to(torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        centred = (inputs - self.mean).reshape(*inputs.shape[:2], -1)
        return (self.matrix.to(centred.dtype) @ centred).view(inputs.shape)


@dataclass(frozen=True, kw_only=True)
class NoisyWhitening(NoisySums[FrozenWhitening]):
    """Whitening with a differentially private mean and covariance.

    The first sum is over each record's features, the second over its outer products of channels,
    averaged over places. Eigenvalues of the covariance are raised to at least the noise level.

    Args:
        multiplier: Noise multiplier of both sums.
        norm: Clipping norm of a record's features.
        square_norm: Clipping norm of a record's mean outer product.

    **Guarantee.** See `NoisySums`.
    """

    def _vectors(self, values: Tensor) -> tuple[Term, Term]:
        channels, places = values.shape[1:]
        products = outer_product_term(values.mT, values.mT / places, torch.Size([channels, channels]))
        return Dense(values.flatten(1)), products

    def _statistics(self, means: list[Tensor], shape: torch.Size) -> FrozenWhitening:
        mean, products = means
        records, channels, places = shape[0], shape[1], shape[2:].numel()
        centre = mean.view(channels, places)
        covariance = (products + products.T) / 2 - centre @ centre.T / places
        variances, directions = torch.linalg.eigh(covariance)
        # asymptotically the largest eigenvalue of a symmetric noise matrix
        noise = math.sqrt(2 * channels) * self.multiplier * self.square_norm / records
        matrix = directions * variances.clamp(min=noise).rsqrt() @ directions.T
        return FrozenWhitening(mean.view(shape[1:]), matrix)
