"""Release rules other than `Always`: selective release, and private selection of the best trial."""

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
"""Upper bound on the probability that an update is abandoned because all its trials are rejected."""
_WHY = {
    "rate": "it is the sampling rate of the test, which the privacy cost depends on",
    "clip": "no noise gives privacy unless each record's influence on the test is bounded",
    "multiplier": "without noise the result of the test is a function of the records and not private",
    "threshold": "the test statistic cannot exceed this limit",
    "mean": "it is the expected number of runs, and selection needs more than one",
    "law": "the privacy cost depends on the distribution and is much larger for a fixed number",
    "shape": "it is the shape of the negative binomial distribution; 0 is the logarithmic distribution",
    "score": "without noise the choice of the best trial reveals the held-out records",
}
MEAN = number(at_least=1.01, at_most=10_000, why=_WHY["mean"], example=10.0)
_CLIP = number(at_least=1e-12, at_most=1e15, why=_WHY["clip"], example=0.001)
_NOISE = number(at_least=1e-12, at_most=1e15, why=_WHY["multiplier"], example=1.3)
_THRESHOLD = number(at_least=-1e15, at_most=1e15, why=_WHY["threshold"], example=-1.0)
_SCORE = number(at_least=1e-3, at_most=1e15, why=_WHY["score"], example=10.0)
_SAMPLINGS = ("Poisson", "FullBatch")
_CHARGED = "the accounting must match the executed release"


@dataclass(frozen=True, kw_only=True)
class Selective(Release):
    """Selective release: release an update if its noisy loss difference on a fresh batch is small.

    **Guarantee.** Proved in docs/guarantees/selective.md for both tests and for Gaussian noise on any
    support. "published" accounting is not a guarantee.

    Args:
        rate: Sampling rate of the test batch. Both models are evaluated on the same batch.
        clip: Bound on the loss difference: of each record for test="summed", of the mean for
            test="mean".
        multiplier: Noise multiplier, in units of the test's sensitivity.
        threshold: The test accepts a noisy difference below `threshold * clip`.
        accounting: "per-trial": a step is a trial, and the result of every test is public.
            "per-acceptance": a step is an update, and its number of trials is secret. "published": the
            accounting of the DPSUR paper, which is not a guarantee. The last two require test="mean".
        test: "summed": the sum of the clipped differences, with sensitivity `clip`. "mean": the sum
            divided by the expected batch size and then clipped, with sensitivity `2 * clip`, as in the
            DPSUR paper.
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
                f'accounting="{self.accounting}" is not proved for test="summed": neither its sum nor '
            )
            text += 'the number of trials is bounded. Pass accounting="per-trial", or test="mean".'
            raise InvalidPlan(text, key="accounting")

    def acceptance(self, expected: float) -> tuple[float, float]:
        """Smallest and largest probability that an update is accepted.

        Args:
            expected: Expected number of records in the test.
        """
        ends = 1.0 if self.test == "mean" else expected
        scale = self.multiplier * (2 if self.test == "mean" else 1)
        low, high = (self.threshold - ends) / scale, (self.threshold + ends) / scale
        # normal cdf with high relative accuracy in the lower tail
        return math.erfc(-low / math.sqrt(2)) / 2, math.erfc(-high / math.sqrt(2)) / 2

    @property
    def most_trials(self) -> float:
        """Maximum number of trials per step; more are needed with probability at most 1e-30."""
        if self.accounting == "per-trial":
            return 1
        log_rejection = -math.log1p(-self.acceptance(0.0)[0])
        return math.ceil(-math.log(GIVEN_UP) / log_rejection) if log_rejection > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class BestOf(Release):
    """Private selection: release the best of a random number of trials.

    A trial is a complete training run. Only the best trial is released. One step of a plan with this
    release rule is a complete selection, which `hush.tune` runs.

    **Guarantee.** Proved in docs/guarantees/tuning.md.

    Args:
        steps: Number of training steps of one trial.
        mean: Expected number of trials.
        law: Distribution of the number of trials: "negative-binomial" (truncated), or "poisson"
            (conditioned on at least 1).
        shape: Shape of the negative binomial distribution: 0 is logarithmic, 1 is geometric. A larger
            shape makes a small number of trials less likely and increases the privacy cost.
        score: Noise multiplier of each trial's score on held-out private records, in units of the
            largest score of a record; None if scores use only the released model and public records.
    """

    runner: ClassVar[str] = "hush.training.release:WholeSelection"
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=_SAMPLINGS, clippings=("L2",), noises=("Gaussian",), releases=(), note="tuning.md"
        ),
    )

    steps: int = field(metadata=count("the privacy cost of a trial covers all its steps", example=1000))
    mean: float = field(default=10.0, metadata=MEAN)
    law: TrialLaw = field(default="negative-binomial", metadata=one_of(TrialLaw, _WHY["law"]))
    shape: float = field(
        default=1.0, metadata=number(at_least=0, at_most=100, why=_WHY["shape"], example=1.0)
    )
    score: float | None = field(default=None, metadata=_SCORE)
