"""Draws of density proportional to exp(-|x|^beta), layer by layer (Marsaglia and Tsang 2000)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hush.core.randomness import Randomness, random_bits, uniform
from hush.noise import fused

if TYPE_CHECKING:
    import torch

_LAYER_BITS = 10
_LAYERS = 1 << _LAYER_BITS
# What is left of 64 random bits once they have chosen a layer: a sign, and a place in the layer.
_PLACE_BITS = 63 - _LAYER_BITS
# On the CPU as many at a time as stay in its cache; elsewhere few calls are worth more.
_CHUNK_CPU, _CHUNK = 1 << 16, 1 << 24


@dataclass(frozen=True)
class Layers:
    """Slices of equal area under exp(-x^beta), as tensors with one entry a layer.

    Slice k > 0 is what lies under the curve in a rectangle of width `outer[k]`; up to `inner[k]` the
    rectangle is all under the curve. Slice 0 is the rectangle up to `inner[0]` and the tail beyond.
    """

    beta: float
    outer: "torch.Tensor"
    inner: "torch.Tensor"


def standard(
    beta: float, shape: Sequence[int], *, generator: Randomness, dtype: "torch.dtype"
) -> "torch.Tensor":
    """A tensor of independent draws of density proportional to exp(-|x|^beta), beta >= 1.

    **Guarantee.** The law is exact but for rounding in `dtype` (float64 where that is float64, else
    float32): docs/guarantees/sampling.md. A draw is a multiple of 2**-53 of its layer's width before
    it is rounded, and the tail is reached by further draws, so neither the middle nor the tail is
    coarser than `dtype` itself. How long it takes depends on the draws alone.
    """
    import torch

    working = dtype if dtype == torch.float64 else torch.float32
    drawn = torch.empty(math.prod(shape), dtype=working, device=generator.device)
    _fill(drawn, _layers(beta, working, generator.device), generator)
    return drawn.view(torch.Size(shape)).to(dtype)


def around(location: "torch.Tensor", beta: float, scale: float, generator: Randomness) -> "torch.Tensor":
    """A draw around `location`, each entry on its own, of density proportional to
    exp(-(|x| / scale)^beta)."""
    if fused.fits(location, beta, generator):
        return fused.around(location, beta, scale, generator)
    noise = standard(beta, location.shape, generator=generator, dtype=location.dtype)
    return location.add_(noise.to(location.device), alpha=scale)


def _fill(drawn: "torch.Tensor", layers: Layers, generator: Randomness) -> None:
    """Fill a flat tensor with draws."""
    import torch

    chunk = _CHUNK_CPU if drawn.device.type == "cpu" else _CHUNK
    above, layer = zip(*(_inside(part, layers, generator) for part in drawn.split(chunk)), strict=True)
    where = torch.cat([k * chunk + each for k, each in enumerate(above)])
    if len(where):
        drawn[where] = _beside(drawn[where].double(), torch.cat(layer), layers, generator)


def _inside(
    drawn: "torch.Tensor", layers: Layers, generator: Randomness
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Fill a flat tensor with places in random layers; return which may be beside the curve, with
    their layers."""
    import torch

    bits = random_bits(len(drawn), generator)
    layer = bits & _LAYERS - 1
    torch.mul(bits.bitwise_right_shift_(_LAYER_BITS), layers.outer.index_select(0, layer), out=drawn)
    above = (drawn.abs() >= layers.inner.index_select(0, layer)).nonzero().squeeze(1)
    return above, layer[above]


def _beside(
    places: "torch.Tensor", layer: "torch.Tensor", layers: Layers, generator: Randomness
) -> "torch.Tensor":
    """What becomes of places that may be beside the curve: kept, moved to the tail, or drawn again."""
    import torch

    beyond = layer == 0
    far = tail(layers.beta, float(layers.inner[0]), int(beyond.sum()), generator)
    places[beyond] = far.copysign(places[beyond])
    # A place is kept if a random height of its rectangle is under the curve there.
    kept = beyond | (_height(layers, layer, generator) < places.abs().pow(layers.beta).neg().exp())
    again = torch.empty(int((~kept).sum()), dtype=layers.outer.dtype, device=places.device)
    if len(again):
        _fill(again, layers, generator)
    places[~kept] = again.double()
    return places.to(layers.outer.dtype)


def _height(layers: Layers, layer: "torch.Tensor", generator: Randomness) -> "torch.Tensor":
    """A random height in each of these layers' rectangles."""
    outer = (layers.outer[layer].double() * 2.0**_PLACE_BITS).pow(layers.beta).neg().exp()
    inner = layers.inner[layer].double().pow(layers.beta).neg().exp()
    return outer + (inner - outer) * uniform(len(layer), generator)


def tail(beta: float, edge: float, count: int, generator: Randomness) -> "torch.Tensor":
    """Draws conditioned to lie beyond `edge` > 0, in double precision.

    -x^beta is concave, so beyond the edge it is below its tangent there: an exponential draw is
    kept with the probability that is missing.
    """
    slope = beta * edge ** (beta - 1)
    excess = uniform(count, generator).neg().log1p().div(-slope)
    drawn = excess.add(edge)
    gap = drawn.pow(beta) - edge**beta - slope * excess
    rejected = uniform(count, generator) >= gap.neg().exp()
    if rejected.any():
        drawn[rejected] = tail(beta, edge, int(rejected.sum()), generator)
    return drawn


@lru_cache(maxsize=64)
def _layers(beta: float, dtype: "torch.dtype", device: "torch.device") -> Layers:
    """The layers, worked out in double precision; widths are in units of the random places."""
    import torch

    found = torch.tensor(edges(beta), dtype=torch.float64)
    outer = (found[:-1] * 2.0**-_PLACE_BITS).to(device, dtype)
    return Layers(beta, outer, found[1:].to(device, dtype))


def edges(beta: float) -> list[float]:
    """The widths of the layers from the lowest to the highest, and 0.

    Bisection on where the tail begins: the farther out, the smaller the layers, the lower the stack.
    """
    low, high = 0.0, 50.0  # exp(-50): no layer is as thin
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _stack(beta, middle)[1] >= 1 else (low, middle)
    return [*_stack(beta, high)[0], 0.0]


def _stack(beta: float, power: float) -> tuple[list[float], float]:
    """Widths of layers of equal area, and how high they reach: beyond the peak of 1 no more are added.

    The tail begins where the curve is exp(-power) high.
    """
    from scipy.special import gamma, gammaincc

    last, height = power ** (1 / beta), math.exp(-power)
    area = last * height + gamma(1 + 1 / beta) * gammaincc(1 / beta, power)
    widths = [area / height]
    width = last
    while len(widths) < _LAYERS and height < 1:
        widths.append(width)
        height += area / width
        width = max(-math.log(height), 0.0) ** (1 / beta)
    return widths, height
