"""Release by a noisy test: only proposals that seem to lower the loss leave the room."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from hush.core.errors import InvalidPlan, short_repr
from hush.core.parts import Proof, Release
from hush.core.ranges import number

Accounting = Literal["per-trial", "per-acceptance", "published"]
Test = Literal["mean", "summed"]

# How likely it may be that an update is given up because every one of its trials was rejected.
GIVEN_UP = 1e-30


@dataclass(frozen=True, kw_only=True)
class Selective(Release):
    """A proposal is released if a noisy number says that it lowers the loss enough.

    Each record is in the test's batch with chance `rate`; both models see the same batch.

    `test="mean"` (the DPSUR paper's): the sum of the loss differences over the expected batch size,
    held within `clip`; a record may move it from one end to the other, so the noise has deviation
    `multiplier` times 2 `clip`. `test="summed"`: each record's difference is held within `clip` and
    they are summed; a record moves the sum by `clip` at most, and the noise has deviation `multiplier`
    times `clip`. Accepted is what falls below `threshold` times `clip`.

    `accounting` says what is public and what a step is. "per-trial": a step is a trial, and every
    verdict is public. "per-acceptance": a step is an update, and how many trials it took is secret.
    "published": as the paper charges it, which is not a guarantee (`hush claims`). The last two are
    for the mean test alone. docs/guarantees/selective.md.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("Poisson", "FullBatch"),
            clippings=("L2",),
            noises=("Gaussian",),
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
    test: Test = "mean"

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
        """The least and the largest chance of acceptance, with `expected` records in the test."""
        ends = 1.0 if self.test == "mean" else expected
        scale = self.multiplier * (2 if self.test == "mean" else 1)
        return _normal((self.threshold - ends) / scale), _normal((self.threshold + ends) / scale)

    @property
    def most_trials(self) -> float:
        """How many trials a step may take: beyond, an update is given up (chance 1e-30 at most)."""
        if self.accounting == "per-trial":
            return 1
        stays = -math.log1p(-self.acceptance(0.0)[0])
        return math.ceil(-math.log(GIVEN_UP) / stays) if stays > 0 else math.inf


def _normal(x: float) -> float:
    """The standard normal cdf, with relative accuracy in the lower tail."""
    return math.erfc(-x / math.sqrt(2)) / 2
