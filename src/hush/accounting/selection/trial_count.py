"""Laws of the number of trials of a private selection: generating functions, and exact draws.

With f the probability generating function of the number of trials, `weight` is w(s) = f'(1 - s): the
density of the released output against that of one trial, where one trial is better with chance s.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np

from hush.accounting.numerics import OUTWARD, Array, bisect
from hush.core.best_of import BestOf

DRAW_DISTANCE = 1e-30
"""Total variation distance between the law that is drawn and the law that is charged, at most."""
_DIGITS, _WORKING_DIGITS = 40, 70


@dataclass(frozen=True)
class TrialCount(ABC):
    """The law of the number of trials, which is at least 1."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Expected number of trials f'(1), rounded up."""

    @abstractmethod
    def weight(self, better: Array) -> Array:
        """w(s) = f'(1 - s) at each probability s that one trial is better; it decreases in s."""

    @abstractmethod
    def probabilities(self) -> Iterator[Decimal]:
        """Probabilities of 1, 2, 3, ... trials, to `_WORKING_DIGITS` digits."""

    def draw(self, randbelow: Callable[[int], int]) -> int:
        """A number of trials, by inversion of the distribution function in decimal arithmetic.

        Args:
            randbelow: Uniform whole number below its argument: `secrets.randbelow`.
        """
        with localcontext() as context:
            context.prec = _WORKING_DIGITS
            uniform = Decimal(randbelow(10**_DIGITS)) / 10**_DIGITS
            cumulative = Decimal(0)
            for number, probability in enumerate(self.probabilities(), start=1):
                cumulative += probability
                # beyond that many digits the rest is never drawn
                if uniform < cumulative or 1 - cumulative < Decimal(10) ** -_DIGITS:
                    return number
        raise AssertionError("probabilities sum to 1")


@dataclass(frozen=True)
class TruncatedNegativeBinomial(TrialCount):
    """P(k) proportional to (1 - stop)^k (shape)_k / k! for k >= 1: Papernot and Steinke 2022, Def. 1.

    Logarithmic at shape 0, geometric at shape 1.
    """

    shape: float
    stop: float
    """gamma of the paper."""

    @property
    def mean(self) -> float:
        return OUTWARD * _negative_binomial_mean(self.shape, self.stop)

    def weight(self, better: Array) -> Array:
        share = self.stop / (self.stop + (1 - self.stop) * better)
        weights: Array = self.mean * share ** (self.shape + 1)
        return weights

    def probabilities(self) -> Iterator[Decimal]:
        shape, stop = Decimal(self.shape), Decimal(self.stop)
        odds = (stop**-shape - 1) / shape if self.shape else -stop.ln()
        probability = (1 - stop) / odds
        number = 1
        while True:
            yield probability
            probability *= (1 - stop) * (number + shape) / (number + 1)
            number += 1


@dataclass(frozen=True)
class TruncatedPoisson(TrialCount):
    """Poisson law of this rate, given that it is not 0."""

    rate: float

    @cached_property
    def mean(self) -> float:
        return OUTWARD * self.rate / -math.expm1(-self.rate)

    def weight(self, better: Array) -> Array:
        weights: Array = self.mean * np.exp(-self.rate * better)
        return weights

    def probabilities(self) -> Iterator[Decimal]:
        rate = Decimal(self.rate)
        probability = rate / (rate.exp() - 1)
        number = 1
        while True:
            yield probability
            number += 1
            probability *= rate / number


def trial_count(release: BestOf) -> TruncatedNegativeBinomial | TruncatedPoisson:
    """The law of the number of trials that a release asks for: of its law and shape, with its mean."""
    if release.law == "poisson":
        rate, _ = bisect(lambda rate: TruncatedPoisson(rate).mean <= release.mean, 1e-9, release.mean)
        return TruncatedPoisson(rate)
    stop, _ = bisect(
        lambda stop: _negative_binomial_mean(release.shape, stop) <= release.mean, 1 - 1e-6, 1e-12
    )
    return TruncatedNegativeBinomial(release.shape, stop)


def _negative_binomial_mean(shape: float, stop: float) -> float:
    log_stop = math.log(stop)
    if shape == 0:
        return (1 - stop) / stop / -log_stop
    return shape * (1 - stop) / stop / -math.expm1(shape * log_stop)
