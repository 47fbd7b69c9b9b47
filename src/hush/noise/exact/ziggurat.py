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
from hush.noise.exact import inverse_cdf
from hush.noise.exact.exact_draw import exact_sum
from hush.noise.exact.ziggurat_cpu import PendingDraws, pending_draws

if TYPE_CHECKING:
    import torch

RELATIVE_SPACING = 2.0**-14
"""Spacing of the grid in units of the noise scale, before it is rounded down to a power of two."""
_PART = 1 << 18
"""Numbers that are drawn on a CPU at once: more take memory that the system has to clear every time."""
_OUTWARD = 1 + 2.0**-50
"""More noise costs no more: scales are rounded up."""


def add_noise(location: "torch.Tensor", beta: float, scale: float, source: Randomness) -> "torch.Tensor":
    """`location` plus noise of density ~ exp(-(|x| / scale)^beta), rounded to `grid_spacing(scale)`.

    In place; another type than single or double precision is rounded once more to that type.
    """
    import torch

    scale *= _OUTWARD
    if inverse_cdf.fits(location, beta, source):
        return inverse_cdf.add_noise(location, beta, scale, source)
    if location.is_cuda and isinstance(source, torch.Generator):
        # a kernel makes the words of a stream
        source = Stream(location.device, substream(source).key)
    if isinstance(source, Stream) and _by_kernel(location, source):
        from hush.noise.exact import ziggurat_gpu

        return ziggurat_gpu.add_noise(location, beta, scale, grid_spacing(scale), source)
    for part in location.view(-1).split(_PART):
        _add(part, pending_draws(beta, len(part), scale / grid_spacing(scale), source), scale, source)
    return location


def _add(location: "torch.Tensor", drawn: PendingDraws, scale: float, source: Randomness) -> None:
    """Replace a flat location by its rounded sum with draws that were made on a CPU."""
    import torch

    in_place = location.device.type == "cpu" and location.dtype in (torch.float32, torch.float64)
    total = location.detach() if in_place else location.to("cpu", torch.float64)
    values, step = total.numpy(), grid_spacing(scale)
    for undecided in drawn.add_to(values, step, source):
        index = undecided.index
        values[index] = exact_sum(undecided.location, drawn.beta, scale, step, undecided, index)
    if not in_place:
        location.copy_(total)


def _by_kernel(location: "torch.Tensor", source: Stream) -> bool:
    """Whether a kernel on the GPU draws the noise: the words it reads are made there, too."""
    return location.is_cuda and source.made_on_gpu(location.numel()) and location.is_contiguous()


def prepare(
    beta: float, count: int, scale: float, source: Randomness, device: "torch.device"
) -> "Callable[[torch.Tensor], torch.Tensor]":
    """`add_noise` to one flat location of `count` numbers, as a function; on a CPU it is drawn now."""
    if device.type != "cpu":
        return lambda location: add_noise(location, beta, scale, source)
    scale *= _OUTWARD
    sizes = [min(_PART, count - first) for first in range(0, count, _PART)]
    unused = [[pending_draws(beta, size, scale / grid_spacing(scale), source) for size in sizes]]

    def rounded(location: "torch.Tensor") -> "torch.Tensor":
        parts = unused.pop()  # two sums under the same noise reveal their difference
        for part, drawn in zip(location.split(_PART), parts, strict=True):
            _add(part, drawn, scale, source)
        return location

    return rounded


def grid_spacing(scale: float) -> float:
    """Spacing of the grid that noise of this scale is rounded to: a power of two below scale / 2**14."""
    return 2.0 ** math.floor(math.log2(scale * RELATIVE_SPACING))
