"""Exact noise of density proportional to exp(-|x|^beta), rounded to a public grid.

A draw is a real number of which only as many bits are drawn as it takes to round its sum with the
location (rejection from layers, Marsaglia and Tsang 2000; lazy bits, Karney 2016). What comes out is
the rounding of location + noise exactly: no statistical distance is left to be charged but that of the
random bits, and nothing can be read from the lowest bits of a floating-point sum.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from hush.core.randomness import Randomness, Stream, substream
from hush.noise import inverse_cdf
from hush.noise.exact_draw import settled
from hush.noise.ziggurat_cpu import Draws, draws

if TYPE_CHECKING:
    import torch

GRID = 2.0**-14
"""Spacing of the grid over the scale, before it is rounded down to a power of two."""
_PART = 1 << 18
"""Numbers that are drawn on a CPU at once: more take memory that the system has to clear every time."""
_OUTWARD = 1 + 2.0**-50
"""More noise costs no more: scales are rounded up."""


def around(location: "torch.Tensor", beta: float, scale: float, source: Randomness) -> "torch.Tensor":
    """`location` plus noise of density ~ exp(-(|x| / scale)^beta), on multiples of `grid(scale)`.

    In place where the location is in double precision; another type is rounded once more to that type.
    """
    import torch

    scale *= _OUTWARD
    if inverse_cdf.fits(location, beta, source):
        return inverse_cdf.around(location, beta, scale, source)
    if location.is_cuda and isinstance(source, torch.Generator):
        # a kernel makes the words of a stream
        source = Stream(location.device, substream(source).key)
    if isinstance(source, Stream) and _by_kernel(location, source):
        from hush.noise import ziggurat_kernel

        return ziggurat_kernel.around(location, beta, scale, grid(scale), source)
    for part in location.view(-1).split(_PART):
        _add(part, draws(beta, len(part), scale / grid(scale), source), scale, source)
    return location


def _add(location: "torch.Tensor", drawn: Draws, scale: float, source: Randomness) -> None:
    """Replace a flat location by its rounded sum with the draws, which are made on a CPU."""
    import torch

    here = location.device.type == "cpu" and location.dtype in (torch.float32, torch.float64)
    total = location.detach() if here else location.to("cpu", torch.float64)
    values, step = total.numpy(), grid(scale)
    for left in drawn.privatize(values, step, source):
        values[left.index] = settled(left.location, drawn.beta, scale, step, left, left.index)
    if not here:
        location.copy_(total)


def _by_kernel(location: "torch.Tensor", source: Stream) -> bool:
    """Whether a kernel on the GPU draws the noise: the words it reads are made there, too."""
    return location.is_cuda and source.made_on_gpu(location.numel()) and location.is_contiguous()


def prepare(
    beta: float, count: int, scale: float, source: Randomness, device: "torch.device"
) -> "Callable[[torch.Tensor], torch.Tensor]":
    """What `around` does for one flat location of `count` numbers; on a CPU the draws are made now."""
    if device.type != "cpu":
        return lambda location: around(location, beta, scale, source)
    scale *= _OUTWARD
    sizes = [min(_PART, count - first) for first in range(0, count, _PART)]
    unused = [[draws(beta, size, scale / grid(scale), source) for size in sizes]]

    def rounded(location: "torch.Tensor") -> "torch.Tensor":
        parts = unused.pop()  # two sums under one noise tell both
        for part, drawn in zip(location.split(_PART), parts, strict=True):
            _add(part, drawn, scale, source)
        return location

    return rounded


def grid(scale: float) -> float:
    """Spacing of the grid that noise of this scale is rounded to: a power of two below scale / 2**14."""
    return 2.0 ** math.floor(math.log2(scale * GRID))
