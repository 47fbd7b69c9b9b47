"""delta of one step with 40 digits, from the definition."""

import mpmath as mp

from hush.accounting.pld.privacy_loss import Direction
from hush.accounting.steps import PairedStep, SampledGaussian, SampledNoise


def exact(step: PairedStep, direction: Direction, epsilon: float) -> float:
    """delta of one step with 40 digits: the loss is monotone, so the best test is a half-line."""
    with mp.workdps(40):
        q, e, remove = mp.mpf(step.rate), mp.mpf(epsilon), direction is Direction.REMOVE
        inner = (mp.exp(e if remove else -e) - (1 - q)) / q
        aim, sign = mp.log(inner) if inner > 0 else -mp.inf, 1 if remove else -1
        if isinstance(step, SampledGaussian):
            null, moved = _gaussian(step, aim, sign)
        else:
            assert isinstance(step, SampledNoise)
            null, moved = _scalar(step, aim, sign)
        mixed = (1 - q) * null + q * moved
        first, second = (mixed, null) if remove else (null, mixed)
        return float(max(first - mp.exp(e) * second, 0, 1 - mp.exp(e)))


def _gaussian(step: SampledGaussian, aim: mp.mpf, sign: int) -> tuple[mp.mpf, mp.mpf]:
    """Mass of both laws beyond the outcome with the log-ratio `aim`."""
    s = mp.mpf(step.multiplier)
    place = s * s * aim + mp.mpf(1) / 2
    return mp.ncdf(-sign * place / s), mp.ncdf(-sign * (place - 1) / s)


def _scalar(step: SampledNoise, aim: mp.mpf, sign: int) -> tuple[mp.mpf, mp.mpf]:
    beta, scale = mp.mpf(step.beta), mp.mpf(step.scale)
    low, high = -scale * 800 ** (1 / beta), 1 + scale * 800 ** (1 / beta)

    def ratio(x: mp.mpf) -> mp.mpf:
        return (abs(x) / scale) ** beta - (abs(x - 1) / scale) ** beta

    def beyond(x: mp.mpf) -> mp.mpf:
        half = mp.gammainc(1 / beta, (abs(x) / scale) ** beta, mp.inf, regularized=True) / 2
        return half if x > 0 else 1 - half

    for _ in range(110):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) <= aim else (low, middle)
    return beyond(sign * low), beyond(sign * (low - 1))
