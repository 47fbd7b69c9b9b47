"""Privacy curve of a composition, by tilted convolution of lattices with the FFT.

The probability mass at loss l is multiplied by exp(tilt * l) before the convolution, and by the inverse
in the sum for delta. This is exact, and preserves relative accuracy at any delta.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from hush.accounting.numerics import UNIT, Array, log_sum_exp, log_sum_exp_scalar
from hush.accounting.pld.lattice import SNAP, Lattice
from hush.accounting.pld.privacy_loss import Direction, Step

# At most exp(-_LOG_OUTSIDE) of the tilted mass is outside the window on each side.
_LOG_OUTSIDE = 25.0
# If more mass is outside the window, it is extended to all losses, unless its length would double.
_MAX_OUTSIDE = 1e-3


@dataclass(frozen=True)
class Window:
    """Tilt, and interval of losses with nearly all the tilted mass."""

    tilt: float
    low: float
    high: float
    lower_exponent: float
    """Exponent of the Chernoff bound on the tilted mass below the window."""
    upper_exponent: float
    """Exponent of the Chernoff bound on the tilted mass above the window."""
    deviation: float
    """Standard deviation of the tilted loss."""
    log_delta: float


class Cumulants:
    """Cumulant generating function log E exp(t L) of the composed privacy loss L."""

    def __init__(self, counts: Mapping[Step, int], direction: Direction, tail: float) -> None:
        self._parts = [(count, *step.loss_quadrature(direction, tail)) for step, count in counts.items()]

    def __call__(self, exponents: Array) -> Array:
        total = np.zeros(len(exponents))
        for count, losses, weights in self._parts:
            total += count * log_sum_exp(weights + exponents[:, None] * losses)
        return total

    def moments(self, tilt: float) -> tuple[float, float]:
        """Mean and standard deviation (never zero) of the tilted loss."""
        mean = variance = 0.0
        for count, losses, weights in self._parts:
            terms = weights + tilt * losses
            masses = np.exp(terms - terms.max())
            masses /= masses.sum()
            centre = float(masses @ losses)
            mean += count * centre
            variance += count * float(masses @ (losses - centre) ** 2)
        return mean, max(math.sqrt(variance), 1e-9 * abs(mean), 1e-300)


def choose_window(cumulants: Cumulants, *, log_delta: float | None, epsilon: float) -> Window:
    """Choose the window for a target `log_delta`, or for `epsilon` if it is None."""
    # Larger tilts would overflow; losses this small have negligible cost.
    untilted = max(cumulants.moments(0.0)[1], 1e-150)

    def objective(tilts: Array) -> Array:
        if log_delta is None:
            return cumulants(tilts) - tilts * epsilon
        # conversion from Rényi divergence to epsilon, whose best order is near the saddle point
        return (cumulants(tilts) - log_delta - np.log1p(tilts)) / tilts + np.log(tilts) - np.log1p(tilts)

    lowest, highest = 1e-6 / untilted, 1e3 / untilted
    for points in (60, 12, 12):
        grid = np.geomspace(lowest, highest, points)
        best = int(np.argmin(objective(grid)))
        lowest, highest = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    tilt = float(math.sqrt(lowest * highest))
    mean, deviation = cumulants.moments(tilt)
    deviation = max(deviation, 1e-6 * untilted)
    log_mass = float(cumulants(np.array([tilt]))[0])
    # Chernoff bounds on the losses with at most exp(-_LOG_OUTSIDE) of the tilted mass beyond them
    exponents = np.geomspace(1e-2, 1e3, 80) / deviation
    highs = (cumulants(tilt + exponents) - log_mass + _LOG_OUTSIDE) / exponents
    lows = (log_mass - cumulants(tilt - exponents) - _LOG_OUTSIDE) / exponents
    upper, lower = int(np.argmin(highs)), int(np.argmax(lows))
    return Window(
        tilt=tilt,
        low=float(lows[lower]),
        high=float(highs[upper]),
        lower_exponent=float(exponents[lower]),
        upper_exponent=float(exponents[upper]),
        deviation=deviation,
        log_delta=log_mass - tilt * mean if log_delta is None else log_delta,
    )


# Fourier coefficients below exp(-NEGLIGIBLE) are set to zero and added to the error.
NEGLIGIBLE = 60.0


@dataclass(frozen=True, eq=False)
class PrivacyCurve:
    """Bounds on delta(epsilon) = exp(log_scale) sum t(l) exp(-tilt l) (1 - exp(epsilon - l))+.

    t(l) is the `tilted` mass at the grid point l = `start + k * width`.
    """

    start: float
    width: float
    tilt: float
    log_scale: float
    tilted: Array
    rounding: float
    """Rounding error of the sum, in units of tilted mass."""
    log_rounding: float
    """Rounding error of log(delta)."""
    mass_above: float
    """Tilted mass above the window."""
    mass_outside: float
    """Tilted mass above or below the window."""
    infinite_mass: float
    """Mass at infinite loss."""
    loss_error: float
    """Rounding error of the composed loss, and therefore of epsilon."""

    def epsilon(self, k: int) -> float:
        """Epsilon at grid point `k`."""
        return self.start + k * self.width

    @cached_property
    def _kernel(self) -> Array:
        # in place, because these arrays are as long as the window
        fall = np.arange(len(self.tilted), dtype=float)
        fall *= -self.width
        kernel: Array = np.expm1(fall)
        fall *= self.tilt
        kernel *= np.exp(fall, out=fall)
        return np.negative(kernel, out=kernel)

    def bound(self, k: int, *, upper: bool) -> float:
        """Bound on delta at grid point `k`."""
        # einsum instead of @, because multi-threading is slower here
        total = float(np.einsum("i,i", self.tilted[k:], self._kernel[: len(self.tilted) - k]))
        if upper:
            # mass above the window may have wrapped around below k
            wrapped = self.mass_above * math.exp(-self.tilt * self.width * (len(self.tilted) - k))
            total, log_error, rest = (
                total + self.rounding + wrapped,
                self.log_rounding,
                self.infinite_mass,
            )
        else:
            total, log_error, rest = total - self.rounding - self.mass_outside, -self.log_rounding, 0.0
        if total <= 0:
            return rest
        exponent = self.log_scale - self.tilt * self.epsilon(k) + math.log(total) + log_error
        return math.exp(min(exponent, 1.0)) + rest

    def epsilon_at(self, delta: float, *, upper: bool) -> float:
        """Bound on epsilon at `delta`, by inverting the bound on delta.

        The bound on delta is linear in exp(epsilon) between grid points. A lower bound is 0 far below
        the centre of the window, so the search starts from many points, and from the largest tilted
        probability.
        """
        bound, error = partial(self.bound, upper=upper), self.loss_error if upper else -self.loss_error
        last = len(self.tilted) - 1
        first = min(max(0, math.floor(-self.start / self.width)), last)
        peak = max(first, int(np.argmax(self.tilted)) - 1)
        starts = sorted({first + (last - first) * part // 16 for part in range(17)} | {peak})
        exceeding = [place for place, start in enumerate(starts) if bound(start) > delta]
        if not exceeding:
            # The upper bound is at most delta from `first` on; the lower bound is trivial.
            return self.epsilon(first) + error if upper else -math.inf
        if exceeding[-1] == len(starts) - 1:
            return math.inf if upper else self.epsilon(last) + error
        low, high = starts[exceeding[-1]], starts[exceeding[-1] + 1]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if bound(middle) > delta else (low, middle)
        share = (bound(low) - delta) / (bound(low) - bound(high))
        return self.epsilon(low) + math.log1p(share * math.expm1(self.width)) + error

    def delta_at(self, epsilon: float, *, upper: bool) -> float:
        """Bound on delta at `epsilon`, which is trivial outside the grid."""
        bound, trivial = partial(self.bound, upper=upper), float(upper)
        epsilon += -self.loss_error if upper else self.loss_error
        k = math.floor((epsilon - self.start) / self.width)
        last = len(self.tilted) - 1
        if k < 0:
            return max(trivial, bound(0))
        if k >= last:
            return min(trivial, bound(last))
        share = math.expm1(epsilon - self.epsilon(k)) / math.expm1(self.width)
        return (1 - share) * bound(k) + share * bound(k + 1)


def compose(parts: Sequence[tuple[Lattice, int]], window: Window) -> PrivacyCurve:
    """Privacy curve of `count` executions of each lattice. All lattices must have the same width."""
    width = parts[0][0].width
    origin = sum(count * lattice.origin for lattice, count in parts)
    first = math.floor((window.low - origin) / width)
    points = math.ceil((window.high - window.low) / width) + 2
    # lengths with a fast FFT
    power = 1 << max(points - 1, 1).bit_length()
    size = next(length for length in (power * 5 // 8, power * 3 // 4, power) if length >= points)
    low, high = origin + first * width, origin + (first + size) * width

    unit_error = 8 * UNIT * math.log2(size)
    log_scale = log_above = log_below = loss_error = log_rounding = infinite_mass = 0.0
    # Indices of the Fourier coefficients that are not negligible so far, and sums over the parts.
    indices = np.arange(size // 2 + 1)
    log_modulus, log_bound, relative, angle = (np.zeros(len(indices)) for _ in range(4))
    for lattice, count in parts:
        tilted, log_mass, upper_moment, lower_moment = _tilt(lattice, window)
        log_scale += count * log_mass
        log_above += count * upper_moment
        log_below += count * lower_moment
        max_loss = float(np.abs(lattice.losses[[0, -1]]).max())
        loss_error += count * (2 * SNAP + lattice.loss_rounding * (1 + max_loss))
        log_rounding += count * UNIT * (64 + 8 * window.tilt * max_loss)
        infinite_mass += count * lattice.infinite_mass
        # for cyclic convolution, masses are summed modulo the size
        places = (lattice.first + np.arange(len(tilted))) % size
        wrapped = np.bincount(places, weights=tilted, minlength=size)
        spectrum = np.fft.rfft(wrapped)[indices]
        modulus = np.abs(spectrum)
        log_bound += count * np.log(modulus + unit_error)
        large = log_bound > -NEGLIGIBLE
        indices, log_bound = indices[large], log_bound[large]
        spectrum, modulus = spectrum[large], modulus[large]
        log_modulus = log_modulus[large] + count * np.log(np.maximum(modulus, 1e-300))
        relative = relative[large] + count * (unit_error / (modulus + unit_error) + 16 * UNIT)
        angle = angle[large] + count * np.angle(spectrum)

    product = np.zeros(size // 2 + 1, dtype=complex)
    product[indices] = np.exp(log_modulus + 1j * angle)
    bound = np.exp(np.minimum(log_bound, 1.0))
    # later parts may increase the bound on a negligible coefficient by this exponent
    raised = 4 * unit_error * sum(count for _, count in parts)
    per_mass = 2 * float(bound @ (relative + unit_error)) / size + 2 * math.exp(raised - NEGLIGIBLE)
    circle = np.fft.irfft(product, size)
    del product
    masses = np.concatenate([circle[first % size :], circle[: first % size]])
    np.maximum(masses, 0.0, out=masses)
    kernel_sum = 1 / -math.expm1(-window.tilt * width) if window.tilt * width * size > 1 else size
    above = math.exp(min(log_above - window.upper_exponent * high, 0.0))
    below = math.exp(min(log_below + window.lower_exponent * low, 0.0))
    # With a large exponent, the Chernoff bound also counts losses on the grid, so extend the window to
    # all losses. A margin of half a grid width is robust to rounding.
    bottom = sum(count * float(lattice.losses[0]) for lattice, count in parts) + width / 2
    top = sum(count * float(lattice.losses[-1]) for lattice, count in parts) + width / 2
    if above > _MAX_OUTSIDE:
        if 0 <= top - high < high - low:
            return compose(parts, replace(window, high=top + 2 * width))
        above = 0.0 if top < high else above
    if below > _MAX_OUTSIDE:
        if 0 <= low - bottom < high - low:
            return compose(parts, replace(window, low=bottom - 2 * width))
        below = 0.0 if low < bottom else below
    return PrivacyCurve(
        start=low,
        width=width,
        tilt=window.tilt,
        log_scale=log_scale,
        tilted=masses,
        rounding=per_mass * kernel_sum,
        log_rounding=log_rounding,
        mass_above=above,
        mass_outside=above + below,
        infinite_mass=infinite_mass,
        loss_error=loss_error,
    )


def _tilt(lattice: Lattice, window: Window) -> tuple[Array, float, float, float]:
    """Normalised tilted masses, the log of their sum, and log-moments for the two Chernoff bounds."""
    losses = lattice.losses
    positive = lattice.masses > 0
    logs = np.full(len(losses), -np.inf)
    logs[positive] = np.log(lattice.masses[positive]) + window.tilt * losses[positive]
    log_mass = log_sum_exp_scalar(logs)
    logs -= log_mass
    upper_moment = log_sum_exp_scalar(logs + window.upper_exponent * losses)
    lower_moment = log_sum_exp_scalar(logs - window.lower_exponent * losses)
    return np.exp(logs), log_mass, upper_moment, lower_moment
