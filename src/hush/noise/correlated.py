"""Gaussian noise that is correlated between the steps of a run: banded matrix factorization."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from hush.core.errors import InvalidValue, short_repr
from hush.core.parts import Noise
from hush.core.value import Range, as_list, check_count, number
from hush.noise.gaussian import MULTIPLIER, ExponentialPower, Gaussian

Array = npt.NDArray[np.float64]
_WHY = "it is a coefficient of the noise, relative to the others"
_COEFFICIENT = number(at_least=-1e6, at_most=1e6, why=_WHY, example=0.5)["check"]
_MOST_BANDS, _MOST_STEPS = 1024, 10**6
_DIGITS = 8
"""Decimals of a coefficient; more digits change nothing and make plans long."""
_UNIT = 1 - 1e-4
"""Smallest column norm that is not scaled."""
_STABLE = 1 - 1e-6
"""Smallest modulus of a root of the coefficients: below 1 the noise of later steps grows."""
_MOMENTUM = Range(at_least=0, below=1, why="the optimizer's memory fades", example=0.9)
_DECAY = Range(at_least=0, at_most=1, why="it is learning rate times weight decay", example=1e-4)


def _normalized(name: str, strategy: Sequence[float]) -> tuple[float, ...]:
    """The coefficients scaled to a Euclidean norm of at most 1, verified in exact arithmetic."""
    values = [_COEFFICIENT(name, value) for value in as_list(name, strategy)]
    if len(values) > _MOST_BANDS or not values[0] > 0:
        raise InvalidValue(
            f"{name}={short_repr(strategy)} must have 1 to {_MOST_BANDS} coefficients, the first one "
            "positive: every step needs fresh noise. Pass e.g. strategy=(1.0, 0.5).",
            key=name,
        )
    norm = math.hypot(*values)
    if not norm >= _UNIT or _exceeds_one(values):
        # toward zero: the norm must not exceed 1
        unit = 10**_DIGITS
        values = [math.trunc(value / norm * unit) / unit for value in values]
        if _exceeds_one(values):  # decimals such as 0.8, 0.6: binary rounding may increase the norm
            largest = max(range(len(values)), key=lambda place: abs(values[place]))
            values[largest] -= math.copysign(1 / unit, values[largest])
    if not values[0] or _exceeds_one(values):
        raise InvalidValue(
            f"{name}={short_repr(strategy)} cannot be scaled to norm 1: the first coefficient is too "
            "small. Pass e.g. strategy=(1.0, 0.5).",
            key=name,
        )
    if _smallest_root(tuple(values)) < _STABLE:
        raise InvalidValue(
            f"{name}={short_repr(strategy)} makes the noise of later steps grow without bound: a root "
            "of its polynomial is inside the unit circle. Pass decreasing positive coefficients.",
            key=name,
        )
    return tuple(values)


@lru_cache(maxsize=64)
def _smallest_root(values: tuple[float, ...]) -> float:
    """Smallest modulus of a root of c_0 + c_1 u + ...; infinite if it has none."""
    return float(np.abs(np.roots(values[::-1])).min(initial=np.inf))


def _exceeds_one(values: Sequence[float]) -> bool:
    """Whether the Euclidean norm of these floats exceeds 1, exactly."""
    return sum(Fraction(value) ** 2 for value in values) > 1


@dataclass(frozen=True, kw_only=True)
class Banded(ExponentialPower, Noise):
    """Gaussian noise that later steps partly cancel: banded matrix factorization (BandMF).

    Step t adds w_t to the clipped sum, where c_0 w_t + c_1 w_{t-1} + ... = z_t is independent noise of
    standard deviation `multiplier` times the clipping norm. A period of `CyclicPoisson` sampling costs
    one Poisson-sampled step with `multiplier`, if it has at least as many steps as there are
    coefficients. Sums of many updates then have less noise at equal cost. Reference: Choquette-Choo et
    al., (Amplified) Banded Matrix Factorization, NeurIPS 2023.

    Args:
        multiplier: Noise multiplier.
        strategy: Coefficients c_0, c_1, ..., one per band; they are scaled to a Euclidean norm of 1.
            `Banded.optimal` computes them.
    """

    # not exact: the clipped sums of earlier steps, and so their rounding, enter the noise of later ones
    exact: ClassVar[bool] = False

    multiplier: float = field(metadata=MULTIPLIER)
    strategy: Sequence[float] = field(metadata={"check": _normalized})

    @classmethod
    def optimal(
        cls, *, bands: int, multiplier: float, steps: int, momentum: float = 0.0, decay: float = 0.0
    ) -> Self:
        """Noise with the least root mean square error of the weights, over the steps of a run.

        The error is computed for `torch.optim.SGD` with a constant learning rate, without records.

        Args:
            bands: Number of coefficients, at most the cycle of the sampling.
            multiplier: Noise multiplier.
            steps: Public number of steps of the run.
            momentum: Momentum of the optimizer.
            decay: Learning rate times weight decay.

        >>> noise = Banded.optimal(bands=4, multiplier=1.0, steps=1000)
        >>> [round(value, 3) for value in noise.strategy]
        [0.587, 0.504, 0.468, 0.427]
        >>> round(noise.relative_error(1000), 3)  # a run with independent noise has 1
        0.511
        """
        bands = check_count("bands", bands, "each band is a coefficient", 1, 8)
        steps = check_count("steps", steps, "the error is computed for them", 1)
        if max(bands / _MOST_BANDS, steps / _MOST_STEPS) > 1:
            raise InvalidValue(
                f"bands={bands} and steps={steps} must be at most {_MOST_BANDS} and {_MOST_STEPS}: the "
                "optimization takes too long. Pass the coefficients as strategy=.",
                key="bands",
            )
        workload = impulse_response(steps, momentum, decay)
        return cls(multiplier=multiplier, strategy=optimal_strategy(min(bands, steps), workload))

    @property
    def correlation(self) -> Sequence[float]:
        return self.strategy

    def dominating_noise(self, reference_norm: float) -> Gaussian:
        return Gaussian(self.multiplier)

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return Gaussian(self.multiplier).exponential_power(norm)

    def relative_error(self, steps: int, momentum: float = 0.0, decay: float = 0.0) -> float:
        """Root mean square error of the weights over a run, relative to independent noise.

        Args:
            steps: Number of steps.
            momentum: Momentum of the optimizer.
            decay: Learning rate times weight decay.

        Returns:
            The ratio at equal multipliers; below 1 if the correlation helps.
        """
        steps = check_count("steps", steps, "the error is computed for them", 1)
        workload = impulse_response(steps, momentum, decay)
        return math.sqrt(_squared_error(self.strategy, workload) / _squared_error((1.0,), workload))


def impulse_response(steps: int, momentum: float = 0.0, decay: float = 0.0) -> Array:
    """Change of the weights 1, 2, ... steps after a gradient of -1, for SGD with learning rate 1."""
    from scipy.signal import lfilter

    momentum, decay = _MOMENTUM.check("momentum", momentum), _DECAY.check("decay", decay)
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(lfilter([1.0], [1.0, decay - 1 - momentum, momentum], impulse))


def square_root_strategy(bands: int, workload: Array) -> Array:
    """First coefficients of the square root of a series that begins with 1.

    For prefix sums it is the factorization of Fichtenberger, Henzinger and Upadhyay (2023).
    """
    root = np.zeros(bands)
    root[0] = 1.0
    for k in range(1, bands):
        root[k] = (workload[k] - root[1:k] @ root[k - 1 : 0 : -1]) / 2
    return root


def optimal_strategy(bands: int, workload: Array) -> list[float]:
    """Coefficients with the least mean squared error of a workload at equal privacy.

    With coefficients c, the weights have the error of the series workload / c, and the cost fixes the
    noise relative to the norm of c: the product is minimized from the square root, by L-BFGS.
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    steps = len(workload)
    weights = np.arange(steps, 0, -1) / steps

    def loss(rest: Array) -> tuple[float, Array]:
        c = np.append(1.0, rest)
        with np.errstate(over="ignore", invalid="ignore"):
            error = lfilter([1.0], c, workload)
            slope = lfilter([1.0], c, error)
            weighted = weights * error
            total, norm = float(weighted @ error), float(c @ c)
        if not np.isfinite(slope).all() or not math.isfinite(total):
            return 1e6, np.zeros_like(rest)  # the noise grows: the search turns back
        moved = [weighted[j:] @ slope[: steps - j] for j in range(1, bands)]
        return math.log(total * norm), 2 * (rest / norm - np.array(moved) / total)

    start = square_root_strategy(bands, workload)
    if bands == 1:
        return [1.0]
    options: dict[str, Any] = {"maxiter": 500, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(loss, start[1:], jac=True, method="L-BFGS-B", options=options)
    return [1.0, *map(float, found.x)]


def _squared_error(strategy: Sequence[float], workload: Array) -> float:
    """Mean over the steps of the variance of the weights, for independent noise of variance 1."""
    from scipy.signal import lfilter

    error = lfilter([1.0], strategy, workload)
    return float((np.arange(len(error), 0, -1) / len(error)) @ error**2)
