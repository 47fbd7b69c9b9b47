"""Private selection: of a random number of training runs the best one is released, and nothing else."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from hush.core.errors import InvalidPlan, short_repr
from hush.core.parts import Proof, Release
from hush.core.value import check_count, number

TrialLaw = Literal["negative-binomial", "poisson"]
MEAN = number(
    at_least=1.01,
    at_most=10_000,
    why="it is how many runs are expected, and a number that is always 1 selects nothing",
    example=10.0,
)


@dataclass(frozen=True, kw_only=True)
class BestOf(Release):
    """Best of a random number of trials, each a whole run of the plan's steps; the others stay hidden.

    One step of a plan with this release is a whole selection: `hush.tune` runs it.

    **Guarantee.** docs/guarantees/tuning.md.

    Args:
        steps: Number of training steps of one trial.
        mean: Expected number of trials.
        law: Law of their number, at least 1: "negative-binomial" (truncated), or "poisson" (given that
            it is not 0).
        shape: Of the negative binomial: 0 is logarithmic, 1 geometric. A larger one makes few trials
            rarer and costs more.
        score: Noise multiplier of each trial's score on held-out private records, in units of one
            record's largest score; None: the score follows from the released model and from records that
            need no protection.
    """

    runner: ClassVar[str] = "hush.training.release:WholeSelection"
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("Poisson", "FullBatch"),
            clippings=("L2",),
            noises=("Gaussian",),
            releases=(),
            note="tuning.md",
        ),
    )

    steps: int
    mean: float = field(default=10.0, metadata=MEAN)
    law: TrialLaw = "negative-binomial"
    shape: float = field(
        default=1.0,
        metadata=number(
            at_least=0,
            at_most=100,
            why="it is the shape of the negative binomial law, 0 the logarithmic one",
            example=1.0,
        ),
    )
    score: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "a trial takes them all, and is charged for them"
        object.__setattr__(self, "steps", check_count("steps", self.steps, why, at_least=1))
        if not isinstance(self.law, str) or self.law not in get_args(TrialLaw):
            raise InvalidPlan(
                f"law={short_repr(self.law)} must be one of {', '.join(get_args(TrialLaw))}: a fixed "
                'number of trials costs as many times the budget. Pass e.g. law="negative-binomial".',
                key="law",
            )
        if self.score is not None:
            object.__setattr__(self, "score", _SCORE["range"].check("score", self.score))


_SCORE = number(
    at_least=1e-3,
    at_most=1e15,
    why="without noise the choice of the best trial reveals the held-out records",
    example=10.0,
)
