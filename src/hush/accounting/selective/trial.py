"""The mechanism of a selective plan: a sampled Gaussian training step and a noisy test."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scipy.special import log_ndtr, ndtr

from hush.core.release import GIVEN_UP, Accounting

if TYPE_CHECKING:
    from hush.accounting.mechanism import SampledGaussian


@dataclass(frozen=True)
class Trial:
    """A sampled Gaussian training step, and a noisy test of a number that lies within one unit.

    Any record may move the number by the whole unit; `test.multiplier` and `threshold` are in that
    unit, the threshold from the middle of the range. A step is a trial, or all the trials until one
    is accepted, as `accounting` says.
    """

    train: "SampledGaussian"
    test: "SampledGaussian"
    threshold: float
    accounting: Accounting = "per-trial"

    @property
    def rate(self) -> float:
        """The probability that a record takes part in a step, in the training or the test."""
        if self.accounting != "per-trial":
            return 1.0
        return self.train.rate + (1 - self.train.rate) * self.test.rate

    @property
    def nontermination(self) -> float:
        """An upper bound on the probability that hidden trials end without an accepted update."""
        return 0.0 if self.accounting == "per-trial" else GIVEN_UP

    @property
    def log_acceptance_range(self) -> tuple[float, float]:
        """The logs of the least and the largest acceptance probability, m and M."""
        low, high = ((self.threshold + side) / self.test.multiplier for side in (-0.5, 0.5))
        return float(log_ndtr(low)), float(log_ndtr(high))

    @property
    def acceptance(self) -> tuple[float, float]:
        """The least and the largest acceptance probability, m and M."""
        low, high = self.log_acceptance_range
        return math.exp(low), math.exp(high)

    @property
    def min_rejection(self) -> float:
        """The least rejection probability, 1 - M."""
        return float(ndtr(-(self.threshold + 0.5) / self.test.multiplier))


@dataclass(frozen=True)
class TrainAndTest:
    """Two sampled Gaussian steps with independent draws, both results released."""

    train: "SampledGaussian"
    test: "SampledGaussian"
