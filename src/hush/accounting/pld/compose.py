"""The privacy curve of many steps: a tilted convolution of lattices by Fourier transform.

Mass at loss l is weighted by exp(tilt * l) and normalised before it is convolved, and weighted
back when delta is summed. That is exact, and it keeps relative accuracy at any delta.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hush.accounting.pld.lattice import SNAP, Lattice
from hush.accounting.pld.privacy_loss import UNIT, Array
from hush.accounting.pld.tilting import Window

# Fourier coefficients below exp(-FAINT) are taken as zero; their size is added to the error.
FAINT = 60.0


@dataclass(frozen=True, eq=False)
class Curve:
    """Bounds on delta as a function of epsilon, at the grid points `start + k * width`.

    With the tilted masses t: delta(epsilon) = exp(log_scale) sum t(l) exp(-tilt l) (1 -
    exp(epsilon - l))+. The errors are in units of tilted mass: `rounding` of that sum, mass
    `above` the window, mass `outside` it on either side.
    """

    start: float
    width: float
    tilt: float
    log_scale: float
    tilted: Array
    rounding: float
    log_rounding: float
    above: float
    outside: float
    infinite: float
    drift: float

    def epsilon(self, k: int) -> float:
        """The epsilon of grid point `k`."""
        return self.start + k * self.width

    def upper(self, k: int) -> float:
        """No less than delta at grid point `k`."""
        # What wrapped around from above the window may have landed below k; weigh it as it was.
        lost = self.above * math.exp(-self.tilt * self.width * (len(self.tilted) - k))
        total = self._sum(k) + self.rounding + lost
        return self._delta(k, total, self.log_rounding) + self.infinite

    def lower(self, k: int) -> float:
        """No more than delta at grid point `k`."""
        return self._delta(k, self._sum(k) - self.rounding - self.outside, -self.log_rounding)

    @cached_property
    def _kernel(self) -> Array:
        # in place: these arrays are as long as the window
        fall = np.arange(len(self.tilted), dtype=float)
        fall *= -self.width
        kernel: Array = np.expm1(fall)
        fall *= self.tilt
        kernel *= np.exp(fall, out=fall)
        return np.negative(kernel, out=kernel)

    def _sum(self, k: int) -> float:
        # einsum, not @: threads of a linear algebra library cost more here than they save
        return float(np.einsum("i,i", self.tilted[k:], self._kernel[: len(self.tilted) - k]))

    def _delta(self, k: int, total: float, log_error: float) -> float:
        if total <= 0:
            return 0.0
        exponent = self.log_scale - self.tilt * self.epsilon(k) + math.log(total) + log_error
        return math.exp(min(exponent, 1.0))


def compose(parts: Sequence[tuple[Lattice, int]], window: Window) -> Curve:
    """The curve of `count` independent draws from each lattice; all have the same width."""
    width = parts[0][0].width
    origin = sum(count * lattice.origin for lattice, count in parts)
    first = math.floor((window.bottom - origin) / width)
    size = _fast_length(math.ceil((window.top - window.bottom) / width) + 2)
    bottom, top = origin + first * width, origin + (first + size) * width

    unit_error = 8 * UNIT * math.log2(size)
    log_scale = log_above = log_below = drift = log_rounding = infinite = 0.0
    # Of the coefficients that are not faint after the parts so far: which, and sums over the parts.
    kept = np.arange(size // 2 + 1)
    log_size, log_bound, relative, angle = (np.zeros(len(kept)) for _ in range(4))
    for lattice, count in parts:
        tilted, log_mass, rising, falling = _tilt(lattice, window)
        log_scale += count * log_mass
        log_above += count * rising
        log_below += count * falling
        farthest = float(np.abs(lattice.losses[[0, -1]]).max())
        drift += count * (2 * SNAP + 32 * UNIT * (1 + farthest))
        log_rounding += count * UNIT * (64 + 8 * window.tilt * farthest)
        infinite += count * lattice.infinite
        spectrum = np.fft.rfft(_wrapped(tilted, lattice.first, size))[kept]
        modulus = np.abs(spectrum)
        log_bound += count * np.log(modulus + unit_error)
        some = log_bound > -FAINT
        kept, log_bound, spectrum, modulus = kept[some], log_bound[some], spectrum[some], modulus[some]
        log_size = log_size[some] + count * np.log(np.maximum(modulus, 1e-300))
        relative = relative[some] + count * (unit_error / (modulus + unit_error) + 16 * UNIT)
        angle = angle[some] + count * np.angle(spectrum)

    product = np.zeros(size // 2 + 1, dtype=complex)
    product[kept] = np.exp(log_size + 1j * angle)
    bound = np.exp(np.minimum(log_bound, 1.0))
    # parts that came after a coefficient had become faint may have raised its bound by so much
    later = 4 * unit_error * sum(count for _, count in parts)
    per_mass = 2 * float(bound @ (relative + unit_error)) / size + 2 * math.exp(later - FAINT)
    turned = np.fft.irfft(product, size)
    del product
    masses = np.concatenate([turned[first % size :], turned[: first % size]])
    np.maximum(masses, 0.0, out=masses)
    kernel_sum = 1 / -math.expm1(-window.tilt * width) if window.tilt * width * size > 1 else size
    above = math.exp(min(log_above - window.rising * top, 0.0))
    below = math.exp(min(log_below + window.falling * bottom, 0.0))
    return Curve(
        start=bottom,
        width=width,
        tilt=window.tilt,
        log_scale=log_scale,
        tilted=masses,
        rounding=per_mass * kernel_sum,
        log_rounding=log_rounding,
        above=above,
        outside=above + below,
        infinite=infinite,
        drift=drift,
    )


def _wrapped(masses: Array, first: int, size: int) -> Array:
    """The masses, the first one at place `first`, added up on a circle of `size` places."""
    circle = np.zeros(size)
    start = 0
    while start < len(masses):
        place = (first + start) % size
        stop = min(start + size - place, len(masses))
        circle[place : place + stop - start] += masses[start:stop]
        start = stop
    return circle


def _tilt(lattice: Lattice, window: Window) -> tuple[Array, float, float, float]:
    """The tilted masses, the log of their sum, and log-moments for the tails of the tilted sum."""
    losses = lattice.losses
    some = lattice.masses > 0
    logs = np.full(len(losses), -np.inf)
    logs[some] = np.log(lattice.masses[some]) + window.tilt * losses[some]
    log_mass = _log_sum(logs)
    logs -= log_mass
    rising = _log_sum(logs + window.rising * losses)
    falling = _log_sum(logs - window.falling * losses)
    return np.exp(logs), log_mass, rising, falling


def _log_sum(logs: Array) -> float:
    peak = float(logs.max())
    return peak + math.log(float(np.exp(logs - peak).sum()))


def _fast_length(least: int) -> int:
    """A length of at least `least` for which the transform is fast."""
    power = 1 << max(least - 1, 1).bit_length()
    return next(size for size in (power * 5 // 8, power * 3 // 4, power) if size >= least)
