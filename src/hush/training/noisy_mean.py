"""Noisy mean of a clipped sum: add noise to each block, and divide by the expected batch size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from hush.core.parts import Noise, SensitivitySet
from hush.core.plan import Plan
from hush.core.randomness import RandomSource
from hush.gradients.public_basis import PublicBasis
from hush.gradients.terms import ROUNDING

_DOUBLE_ROUNDING = 2.0**-12
"""Relative rounding slack on the sensitivity of a clipped sum in double precision."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of the flat gradient: parameters, clipping blocks and their noise."""

    parameters: dict[str, nn.Parameter]
    sensitivity: Sequence[SensitivitySet]
    """Sensitivity set of each clipping block."""
    block_sizes: list[int]
    """Number of coordinates in each clipping block."""
    rounding: float
    """Relative rounding slack on the sensitivity of the clipped sum."""
    noises: Sequence[tuple[Noise, float]]
    """Noise and clipping norm of each block."""


class PastNoise:
    """Noise of the last steps of a run, for correlated noise (secret).

    The noise w_t of step t satisfies c_0 w_t + c_1 w_{t-1} + ... = z_t, with independent noise z_t. The
    noise before the first step is zero.
    """

    def __init__(self, correlation: Sequence[float]) -> None:
        self.correlation = correlation
        self.vectors = torch.zeros(len(correlation), 0, dtype=torch.float64)
        """Ring buffer in units of the clipped sum: row t mod (number of coefficients) is w_t."""

    def clear(self) -> None:
        """Clear past noise, so the noise of a new run is independent of it."""
        self.vectors = self.vectors[:, :0]

    def mix(self, total: Tensor, step: int) -> None:
        """Replace a clipped sum x by c_0 x - c_1 w_{t-1} - ..., before z_t is added to it."""
        if self.vectors.shape[1] != len(total):  # other parameters are trained: restart the correlation
            self.vectors = total.new_zeros(len(self.correlation), len(total))
        # a repeated step overwrites its row
        torch.neg(total, out=self._row(step))
        self._subtract(total.mul_(self.correlation[0]), step)

    def _subtract(self, total: Tensor, step: int) -> Tensor:
        for lag, coefficient in enumerate(self.correlation[1:], start=1):
            total.sub_(self._row(step - lag), alpha=coefficient)
        return total

    def carried(self, step: int) -> Tensor:
        """c_1 w_{t-1} + c_2 w_{t-2} + ...; empty before the first step."""
        return self._subtract(torch.zeros_like(self.vectors[0]), step).neg_()

    def settle(self, total: Tensor, step: int) -> None:
        """Scale the mixed sum plus z_t to x + w_t, and store w_t."""
        self._row(step).add_(total.div_(self.correlation[0]))

    def _row(self, step: int) -> Tensor:
        return self.vectors[step % len(self.correlation)]


@dataclass(eq=False)
class NoisyMean:
    """Function from the clipped sum of one step to the noisy mean."""

    plan: Plan
    layout: Layout
    basis: PublicBasis | None
    """Public basis of the sums; None: the standard basis."""
    expected: float
    """Public expected batch size, over all ranks."""
    source: RandomSource
    past: PastNoise | None = None
    """Noise of past steps; None if the noise is independent."""
    step: int = 0
    """Number of the step, from 0."""

    def __call__(self, total: Tensor) -> Tensor:
        """Compute the noisy mean of a clipped sum, in place."""
        # scale down by the rounding slack, so the noise covers it; additive noise allows scaling back
        share = 1 - self.layout.rounding
        total.mul_(share)
        if self.past is not None:
            self.past.mix(total, self.step)
        blocks = total.split(self.layout.block_sizes)
        for block, (noise, norm) in zip(blocks, self.layout.noises, strict=True):
            if block.numel():  # this rank may own no coordinates of the block
                private = noise.privatize(block, norm=norm, generator=self.source)
                if private is not block:
                    block.copy_(private)
        if self.past is not None:
            self.past.settle(total, self.step)
        total = total if self.basis is None else self.basis.to_parameters(total)
        undone = share if self.plan.noise.additive else 1.0
        return total.div_(undone * self.expected)


def rounding_of(parameters: Iterable[Tensor]) -> float:
    """Relative rounding slack on the sensitivity of the clipped sum."""
    double = all(value.dtype == torch.float64 for value in parameters)
    return _DOUBLE_ROUNDING if double else ROUNDING


def split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat vector into views with the shapes of the parameters."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def set_gradients(parameters: Sequence[nn.Parameter], update: Tensor) -> None:
    """Set the gradients of the parameters from a flat vector, in each parameter's dtype."""
    for precision in set(map(attrgetter("dtype"), parameters)):
        copy = update.to(precision, copy=True)
        gradients = torch._utils._unflatten_dense_tensors(copy, parameters)  # one call for all
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.dtype == precision:
                parameter.grad = gradient
