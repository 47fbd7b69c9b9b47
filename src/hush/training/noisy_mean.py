"""Noisy mean of a clipped sum: layout, noise of each block, division by the batch size."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hush.core.parts import Noise, SensitivitySet
from hush.core.plan import Plan
from hush.core.randomness import RandomSource
from hush.gradients.public_basis import PublicBasis
from hush.gradients.terms import ROUNDING

T = TypeVar("T")
BlockNoise = list[Callable[[Tensor], Tensor]]
"""Functions that privatize the blocks of a clipped sum, one per block."""

_BACKGROUND_SIZE = 2**17
"""Number of trained parameters from which drawing noise takes longer than starting a thread."""
_DOUBLE_ROUNDING = 2.0**-12
"""Relative rounding slack on the sensitivity of a clipped sum in double precision."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Flat gradient of one step: trainable parameters one after another, in blocks of the clipping."""

    parameters: dict[str, nn.Parameter]
    sensitivity: Sequence[SensitivitySet]
    """Sensitivity set of each block of the clipping."""
    block_sizes: list[int]
    """Number of coordinates in each block of the clipping."""
    rounding: float
    """Relative rounding slack on the sensitivity of the clipped sum."""
    noises: Sequence[tuple[Noise, float]]
    """Noise and clipping norm of each block."""


@dataclass(eq=False)
class NoisyMean:
    """Noise of one step, and the division by the expected batch size."""

    plan: Plan
    layout: Layout
    basis: PublicBasis | None
    """Public basis of the sums; None: the basis of the parameters."""
    expected: float
    """Expected batch size of all ranks, which is public."""
    coordinates: bool
    """Whether the gradients draw the coordinates that take part."""
    source: RandomSource
    device: torch.device

    def __call__(self, total: Tensor, drawn: BlockNoise | None = None) -> Tensor:
        """Noisy mean from a clipped sum, in place.

        Args:
            total: Clipped sum, block after block.
            drawn: Noise from `early`; None: noise is drawn from the source now.
        """
        # scaled down by the rounding slack so that the noise covers it, and up again unless the result
        # would leave the noise's support
        share = 1 - self.layout.rounding
        blocks = total.mul_(share).split(self.layout.block_sizes)
        if drawn is not None:
            for block, privatize in zip(blocks, drawn, strict=True):
                block.copy_(privatize(block))
        else:
            for block, (noise, norm) in zip(blocks, self.layout.noises, strict=True):
                if block.numel():  # empty on a rank that holds no part of the block
                    private = noise.privatize(block, norm=norm, generator=self.source)
                    if private is not block:
                        block.copy_(private)
        total = total if self.basis is None else self.basis.to_parameters(total)
        undone = share if self.plan.noise.additive else 1.0
        return total.div_(undone * self.expected)

    def early(self) -> AbstractContextManager[Callable[[], BlockNoise | None]]:
        """Context that draws the noise in the background while gradients are computed.

        Returns:
            Context of a function that returns the noise, or None if it has to be drawn after the sum:
            drawing is fast, or gradients draw from the same source.
        """
        small = self.device.type != "cpu" or sum(self.layout.block_sizes) < _BACKGROUND_SIZE
        if small or self.coordinates:
            return nullcontext(lambda: None)
        return run_in_background(self.draw)

    def draw(self) -> BlockNoise:
        """Noise of each block of the clipping, drawn before the sum is known."""
        return [
            noise.prepare(size, norm=norm, generator=self.source, device=self.device)
            if size
            else torch.clone  # an empty block, of a slice that another rank holds
            for size, (noise, norm) in zip(self.layout.block_sizes, self.layout.noises, strict=True)
        ]


def rounding_of(parameters: Iterable[Tensor]) -> float:
    """Relative rounding slack on the sensitivity of the clipped sum."""
    double = all(value.dtype == torch.float64 for value in parameters)
    return _DOUBLE_ROUNDING if double else ROUNDING


def split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector in the shapes of the parameters."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def set_gradients(parameters: Sequence[nn.Parameter], update: Tensor) -> None:
    """Set the gradients of the parameters from a copy of a flat vector, each in its own precision."""
    for precision in set(map(attrgetter("dtype"), parameters)):
        copy = update.to(precision, copy=True)
        gradients = torch._utils._unflatten_dense_tensors(copy, parameters)  # one call for all
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.dtype == precision:
                parameter.grad = gradient


@contextmanager
def run_in_background(work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Context that runs the work in another thread if there is a spare core, and before it otherwise.

    The work is finished when the context ends, also after an error.

    Yields:
        Function that returns the result of the work.
    """
    if not spare_core():
        result = work()
        yield lambda: result
        return
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            yield future.result
        finally:
            _finish(future)


def _finish(work: "Future[Any]") -> None:
    """Wait for the work even after an interrupt: two threads must not draw from one generator."""
    interrupt = None
    while not work.done():
        try:
            wait([work])
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def spare_core() -> bool:
    """Whether this process may use more cores than torch does."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    return cores > torch.get_num_threads()
