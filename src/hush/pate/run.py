"""PATE from end to end: teachers on disjoint records, noisy votes on public inputs, a student."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hush.accounting.ledger.ledger import Ledger
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import Guarantee
from hush.core.ranges import check_count
from hush.noise import Gaussian
from hush.pate.argmax import NoisyMax, charged, covers_a_vote
from hush.pate.ask import ask
from hush.pate.confident import NO_ANSWER, Confident, Query, planned
from hush.pate.fit import Lesson, fit, predict
from hush.pate.folder import PateFolder
from hush.pate.partition import check_teachers
from hush.pate.per_instance import per_instance
from hush.pate.teachers import Network, opinions, train_teachers, votes
from hush.training import checkpoint
from hush.training.data import count
from hush.training.fingerprint import fingerprint

_USUAL = Lesson()


@dataclass(frozen=True, kw_only=True)
class PateRun:
    """What a run of PATE did and what it may be said to have kept private."""

    guarantee: Guarantee
    """For everything that was released, whatever the votes were; it may be published."""
    answered: int
    label_accuracy: float
    """The share of answers that are right; NaN if there is none."""
    student_accuracy: float
    per_instance: Guarantee | None
    """What it cost on these votes (sensitive); None for other noise than Gaussian."""
    teacher_accuracy: float
    """The share of their votes that is right (sensitive)."""


def pate(
    network: Network,
    data: tuple[Tensor, Tensor],
    public: tuple[Tensor, Tensor],
    evaluation: tuple[Tensor, Tensor],
    *,
    query: Query,
    teachers: int,
    classes: int,
    delta: float,
    directory: Path,
    answers: int | None = None,
    lesson: Lesson = _USUAL,
    processes: int = 1,
    resume: bool = False,
    generator: torch.Generator | None = None,
    done: Callable[[], None] = lambda: None,
) -> PateRun:
    """Train teachers on `data`, ask them about the inputs of `public`, train a student on the answers.

    **Guarantee.** `PateRun.guarantee`, for everything that leaves: the student, the answers, their
    number, the ledger. Neighbours differ by one record of `data`. `public` and `evaluation` are not
    protected; their targets serve to measure only. docs/guarantees/argmax.md.

    At most `answers` inputs are answered (all by default). A run that was killed goes on with
    `resume=True`: teachers that are finished and answers on the ledger are kept.
    """
    inputs, truth = public
    vote = query if isinstance(query, NoisyMax) else query.vote
    if not covers_a_vote(vote.moved):
        raise Unproved(
            f"moved={vote.moved!r} is less than one record can do: it may change its teacher's vote, "
            "which moves two counts by 1. Pass NoisyMax.of_teachers(noise=...).",
            key="moved",
        )
    asked = count(public)
    plans = planned(query, asked, asked if answers is None else answers)
    guarantee = charged(plans, delta, vote.neighbours, vote.unit)
    check_count("processes", processes, "somebody has to train the teachers", at_least=1)
    check_teachers(teachers, count(data))
    if isinstance(query, Confident) and query.threshold > teachers:
        raise InvalidValue(
            f"threshold={query.threshold:g} is more than the {teachers} votes there are: it would be "
            "reached by noise alone, and the answers tell nothing. Pass e.g. "
            f"threshold={0.6 * teachers:g}.",
            key="threshold",
        )
    settings = {
        "teachers": teachers,
        "query": query.to_plain(),
        "answers": answers,
        "public": fingerprint([inputs]),
        "network": str(network()),
        "lesson": lesson.to_plain(),
    }
    folder = PateFolder(directory, settings, {"records": count(data)}, resume=resume)
    with Ledger(folder.ledger) as ledger:
        folder.begin()
        train_teachers(folder.teachers, network, data, teachers, lesson, processes=processes, done=done)
        given = opinions(folder.teachers, network, teachers, inputs)
        scores = votes(given, classes)
        found = ask(query, scores, ledger, plans, generator)
    answered = found != NO_ANSWER
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(teachers)
        student = network()
        fit(student, inputs[answered], found[answered], lesson, seed=teachers)
    checkpoint.save_weights(folder.student, student)
    noises = {type(plan.noise) for plan in plans}
    return PateRun(
        guarantee=guarantee,
        answered=int(answered.sum()),
        label_accuracy=_share(found[answered] == truth[answered]),
        student_accuracy=_share(predict(student, evaluation[0]) == evaluation[1]),
        per_instance=per_instance(query, scores, delta, answers) if noises == {Gaussian} else None,
        teacher_accuracy=_share(given == truth),
    )


def _share(right: Tensor) -> float:
    """How many are; NaN of none."""
    return float(right.double().mean())
