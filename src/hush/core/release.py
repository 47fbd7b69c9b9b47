"""Selective release: an update is applied and published if a noisy test of its loss accepts it."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from hush.core.errors import InvalidPlan, short_repr
from hush.core.parts import Proof, Release
from hush.core.value import number

Accounting = Literal["per-trial", "per-acceptance", "published"]
Test = Literal["mean", "summed"]

# Probability that an update is given up because every one of its trials was rejected, at most.
GIVEN_UP = 1e-30


@dataclass(frozen=True, kw_only=True)
class Selective(Release):
    """An update is released if a noisy loss difference on a fresh Poisson batch is low enough.

    **Guarantee.** docs/guarantees/selective.md, for both tests, with normal noise on any support;
    "published" accounting is none.

    Args:
        rate: Probability that a record is in the test's batch, the same for both models.
        clip: Bound on the loss difference: of each record in the summed test, of the mean in the other.
        multiplier: Noise multiplier, in units of the test's sensitivity.
        threshold: Accepted is a noisy difference below `threshold * clip`.
        accounting: What is public, and what a step is. "per-trial": a step is a trial, and every verdict
            is public. "per-acceptance": a step is an update, and how many trials it took is secret.
            "published": as the DPSUR paper charges it, which is not a guarantee (`hush claims`). The
            last two are for the mean test alone.
        test: "summed": records' clipped differences are summed; the sensitivity is `clip`. "mean" (the
            DPSUR paper's): the sum over the expected batch size is clipped; a record may move it from
            one end to the other, so that the sensitivity is `2 * clip`.
    """

    runner: ClassVar[str] = "hush.training.methods.selective:Trials"
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("Poisson", "FullBatch"),
            clippings=("L2", "Linf", "L2Linf"),
            noises=("Gaussian", "Rectified", "Quantized", "StochasticSign", "Truncated"),
            releases=(),
            note="selective.md",
        ),
    )

    rate: float = field(
        metadata=number(
            at_least=1e-9,
            at_most=1,
            why="it is the chance that a record takes part in the test, which is charged for it",
            example=0.005,
        )
    )
    clip: float = field(
        metadata=number(
            at_least=1e-12,
            at_most=1e15,
            why="with no bound on a record's influence on the test no noise hides it",
            example=0.001,
        )
    )
    multiplier: float = field(
        metadata=number(
            at_least=1e-12,
            at_most=1e15,
            why="without noise the verdict is a function of the records and nothing is private",
            example=1.3,
        )
    )
    threshold: float = field(
        default=-1.0,
        metadata=number(
            at_least=-1e15,
            at_most=1e15,
            why="the test compares it with a number of at most that size",
            example=-1.0,
        ),
    )
    accounting: Accounting = "per-trial"
    test: Test = "summed"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("accounting", get_args(Accounting)), ("test", get_args(Test))):
            chosen = getattr(self, name)
            if not isinstance(chosen, str) or chosen not in allowed:
                raise InvalidPlan(
                    f"{name}={short_repr(chosen)} must be one of {', '.join(allowed)}: what is "
                    f'charged must be what runs. Pass e.g. {name}="{allowed[0]}".',
                    key=name,
                )
        if self.test == "summed" and self.accounting != "per-trial":
            raise InvalidPlan(
                f'accounting="{self.accounting}" is not proved for test="summed": a sum has no end, so '
                "neither has the number of trials until it is accepted. Pass accounting="
                '"per-trial", or test="mean".',
                key="accounting",
            )

    def acceptance(self, expected: float) -> tuple[float, float]:
        """Smallest and largest probability of acceptance.

        Args:
            expected: Expected number of records in the test.
        """
        ends = 1.0 if self.test == "mean" else expected
        scale = self.multiplier * (2 if self.test == "mean" else 1)
        return _normal((self.threshold - ends) / scale), _normal((self.threshold + ends) / scale)

    @property
    def most_trials(self) -> float:
        """Limit of trials per step, after which an update is given up (probability 1e-30 at most)."""
        if self.accounting == "per-trial":
            return 1
        log_rejection = -math.log1p(-self.acceptance(0.0)[0])
        return math.ceil(-math.log(GIVEN_UP) / log_rejection) if log_rejection > 0 else math.inf


def _normal(x: float) -> float:
    """The standard normal cdf, with relative accuracy in the lower tail."""
    return math.erfc(-x / math.sqrt(2)) / 2
