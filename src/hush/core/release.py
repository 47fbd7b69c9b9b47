"""Release rules beside `Always`: selective release, and the best of a random number of runs."""

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
"""Largest probability that an update is given up because all of its trials were rejected."""
_WHY = {
    "rate": "it is the chance that a record takes part in the test, which is charged for it",
    "clip": "with no bound on a record's influence on the test no noise hides it",
    "multiplier": "without noise the verdict is a function of the records and nothing is private",
    "threshold": "the test compares it with a number of at most that size",
    "mean": "it is how many runs are expected, and a single run leaves no choice",
    "law": "a fixed number of trials costs as many times the budget",
    "shape": "it is the shape of the negative binomial law, 0 the logarithmic one",
    "score": "without noise the choice of the best trial reveals the held-out records",
}
MEAN = number(at_least=1.01, at_most=10_000, why=_WHY["mean"], example=10.0)
_CLIP = number(at_least=1e-12, at_most=1e15, why=_WHY["clip"], example=0.001)
_NOISE = number(at_least=1e-12, at_most=1e15, why=_WHY["multiplier"], example=1.3)
_THRESHOLD = number(at_least=-1e15, at_most=1e15, why=_WHY["threshold"], example=-1.0)
_SCORE = number(at_least=1e-3, at_most=1e15, why=_WHY["score"], example=10.0)
_SAMPLINGS = ("Poisson", "FullBatch")
_CHARGED = "the release that runs must be the one that is charged"


@dataclass(frozen=True, kw_only=True)
class Selective(Release):
    """Selective release: an update is released if a noisy loss difference on a fresh batch is small.

    **Guarantee.** docs/guarantees/selective.md, for both tests, with normal noise on any support;
    "published" accounting is none.

    Args:
        rate: Probability that a record is in the test's batch, the same for both models.
        clip: Bound on the loss difference: of each record in the summed test, of the mean in the other.
        multiplier: Noise multiplier, in units of the test's sensitivity.
        threshold: Accepted is a noisy difference below `threshold * clip`.
        accounting: Public verdicts, and the meaning of a step. "per-trial": a step is a trial, and every
            verdict is public. "per-acceptance": a step is an update, and its number of trials is secret.
            "published": the DPSUR paper's, which is not a guarantee. The last two are for the mean test.
        test: "summed": records' clipped differences are summed; the sensitivity is `clip`. "mean" (the
            DPSUR paper's): the sum over the expected batch size is clipped; one record can move it from
            one end to the other, so the sensitivity is `2 * clip`.
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
                f'accounting="{self.accounting}" is not proved for test="summed": a sum is not bounded, '
            )
            text += 'and neither are its trials. Pass accounting="per-trial", or test="mean".'
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
        """Limit of trials per step, after which an update is given up (probability 1e-30 at most)."""
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
        law: Law of their number, at least 1: "negative-binomial" (truncated), or "poisson" (given that
            it is not 0).
        shape: Shape of the negative binomial: 0 is logarithmic, 1 geometric. A larger one makes few
            trials rarer and costs more.
        score: Noise multiplier of each trial's score on held-out private records, in units of one
            record's largest score; None: the score follows from the released model and from records that
            need no protection.
    """

    runner: ClassVar[str] = "hush.training.release:WholeSelection"
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=_SAMPLINGS, clippings=("L2",), noises=("Gaussian",), releases=(), note="tuning.md"
        ),
    )

    steps: int = field(metadata=count("a trial takes and is charged for all of them", example=1000))
    mean: float = field(default=10.0, metadata=MEAN)
    law: TrialLaw = field(default="negative-binomial", metadata=one_of(TrialLaw, _WHY["law"]))
    shape: float = field(
        default=1.0, metadata=number(at_least=0, at_most=100, why=_WHY["shape"], example=1.0)
    )
    score: float | None = field(default=None, metadata=_SCORE)
