"""Release rules other than `Always`: selective release, and the best of a random number of runs."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hush.core.errors import InvalidPlan
from hush.core.parts import Proof, Release
from hush.core.value import count, number, one_of

Accounting = Literal["per-trial", "per-acceptance", "published"]
Test = Literal["summed", "mean"]
TrialLaw = Literal["negative-binomial", "poisson"]
GIVEN_UP = 1e-30
"""Upper bound on the probability that all trials of an update are rejected and it is abandoned."""
_WHY = {
    "rate": "it is the sampling rate of the test, which the privacy cost depends on",
    "clip": "without a bound on a record's influence on the test no noise gives privacy",
    "multiplier": "without noise the verdict is a function of the records and not private",
    "threshold": "the test statistic is not larger than that",
    "mean": "it is how many runs are expected, and a single run leaves no choice",
    "law": "the privacy cost depends on the law; a fixed number of trials would multiply it",
    "shape": "it is the shape of the negative binomial law; 0 is the logarithmic law",
    "score": "without noise the choice of the best trial reveals the held-out records",
}
MEAN = number(at_least=1.01, at_most=10_000, why=_WHY["mean"], example=10.0)
_CLIP = number(at_least=1e-12, at_most=1e15, why=_WHY["clip"], example=0.001)
_NOISE = number(at_least=1e-12, at_most=1e15, why=_WHY["multiplier"], example=1.3)
_THRESHOLD = number(at_least=-1e15, at_most=1e15, why=_WHY["threshold"], example=-1.0)
_SCORE = number(at_least=1e-3, at_most=1e15, why=_WHY["score"], example=10.0)
_SAMPLINGS = ("Poisson", "FullBatch")
_CHARGED = "the executed release must be the one that is charged"


@dataclass(frozen=True, kw_only=True)
class Selective(Release):
    """Selective release: release an update if its noisy loss difference on a fresh batch is small.

    **Guarantee.** docs/guarantees/selective.md, for both tests and Gaussian noise on any support;
    "published" accounting is not a guarantee.

    Args:
        rate: Sampling rate of the test batch, which is the same for both models.
        clip: Bound on the loss difference: per record for the summed test, of the mean for the mean
            test.
        multiplier: Noise multiplier, in units of the test's sensitivity.
        threshold: The test accepts a noisy difference below `threshold * clip`.
        accounting: "per-trial": a step is a trial, and every verdict is public. "per-acceptance": a step
            is an update, and its number of trials is secret. "published": the DPSUR paper's accounting,
            which is not a guarantee. The last two need the mean test.
        test: "summed": the sum of clipped differences, with sensitivity `clip`. "mean" (the DPSUR
            paper's): the sum divided by the expected batch size and clipped, with sensitivity `2 *
            clip`.
    """

    runner: ClassVar[str] = "hush.training.methods.selective:Trials"
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=_SAMPLINGS,
            clippings=("L2", "Linf", "L2Linf"),
            noises=("Gaussian", "Rectified", "Quantized", "StochasticSign", "Truncated"),
            releases=(),
            note="selective.md",
        ),
    )

    rate: float = field(metadata=number(at_least=1e-9, at_most=1, why=_WHY["rate"], example=0.005))
    clip: float = field(metadata=_CLIP)
    multiplier: float = field(metadata=_NOISE)
    threshold: float = field(default=-1.0, metadata=_THRESHOLD)
    accounting: Accounting = field(default="per-trial", metadata=one_of(Accounting, _CHARGED))
    test: Test = field(default="summed", metadata=one_of(Test, _CHARGED))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test == "summed" and self.accounting != "per-trial":
            text = (
                f'accounting="{self.accounting}" is not proved for test="summed": its sum is unbounded, '
            )
            text += 'and neither is the number of trials. Pass accounting="per-trial", or test="mean".'
            raise InvalidPlan(text, key="accounting")

    def acceptance(self, expected: float) -> tuple[float, float]:
        """Smallest and largest probability of acceptance.

        Args:
            expected: Expected number of records in the test.
        """
        ends = 1.0 if self.test == "mean" else expected
        scale = self.multiplier * (2 if self.test == "mean" else 1)
        low, high = (self.threshold - ends) / scale, (self.threshold + ends) / scale
        # the normal cdf, with relative accuracy in the lower tail
        return math.erfc(-low / math.sqrt(2)) / 2, math.erfc(-high / math.sqrt(2)) / 2

    @property
    def most_trials(self) -> float:
        """Maximum number of trials per step, reached with probability at most 1e-30."""
        if self.accounting == "per-trial":
            return 1
        log_rejection = -math.log1p(-self.acceptance(0.0)[0])
        return math.ceil(-math.log(GIVEN_UP) / log_rejection) if log_rejection > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class BestOf(Release):
    """Private selection: the best of a random number of trials, each a whole run of the plan's steps.

    The other trials stay hidden. One step of a plan with this release is a whole selection: `hush.tune`
    runs it.

    **Guarantee.** docs/guarantees/tuning.md.

    Args:
        steps: Number of training steps of one trial.
        mean: Expected number of trials.
        law: Law of the number of trials: "negative-binomial" (truncated), or "poisson" (conditioned on
            at least 1).
        shape: Shape of the negative binomial: 0 is logarithmic, 1 is geometric. With a larger shape few
            trials are less likely, and the privacy cost increases.
        score: Noise multiplier of each trial's score on held-out private records, in units of a record's
            largest score; None if scores use only the released model and public records.
    """

    runner: ClassVar[str] = "hush.training.release:WholeSelection"
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=_SAMPLINGS, clippings=("L2",), noises=("Gaussian",), releases=(), note="tuning.md"
        ),
    )

    steps: int = field(metadata=count("each trial is charged for all of them", example=1000))
    mean: float = field(default=10.0, metadata=MEAN)
    law: TrialLaw = field(default="negative-binomial", metadata=one_of(TrialLaw, _WHY["law"]))
    shape: float = field(
        default=1.0, metadata=number(at_least=0, at_most=100, why=_WHY["shape"], example=1.0)
    )
    score: float | None = field(default=None, metadata=_SCORE)
