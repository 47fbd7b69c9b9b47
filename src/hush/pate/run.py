"""PATE pipeline: teachers on disjoint records, noisy votes on public inputs, and a student."""

import itertools
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError, InvalidValue, LedgerError, Unproved
from hush.core.guarantee import RECORD, Adjacency, Guarantee, Secrecy, check_delta
from hush.core.plan import Plan
from hush.core.value import check_count
from hush.noise import Gaussian
from hush.pate.argmax import NO_ANSWER, Confident, NoisyMax, Query, as_scores, charged, planned
from hush.pate.per_instance import per_instance
from hush.pate.teachers import (
    Lesson,
    Network,
    new_network,
    predict,
    predictions,
    teacher_of,
    train_teachers,
    trained,
)
from hush.training import checkpoint
from hush.training.data import count
from hush.training.distributed.processes import check_first_rank
from hush.training.fingerprint import fingerprint
from hush.training.run_folder import metrics_line, metrics_of
from hush.training.units import Owners, owner_ids

_LESSON = Lesson()
_SETTINGS, _PRIVATE, _TEACHERS, _LEDGER = "settings.json", "private.json", "teachers", "ledger.jsonl"


@dataclass(frozen=True, kw_only=True)
class PateRun:
    """Result of a PATE run: guarantees and accuracies."""

    guarantee: Guarantee
    """Data-independent guarantee of the released student, answers and ledger."""
    answered: int
    label_accuracy: float
    """Accuracy of the answers; NaN if no query was answered."""
    student_accuracy: float
    per_instance: Guarantee | None
    """Per-instance guarantee for these votes (sensitive); None unless the noise is Gaussian."""
    teacher_accuracy: float
    """Accuracy of the teachers' votes (sensitive)."""


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
    units: Owners | None = None,
    lesson: Lesson = _LESSON,
    processes: int = 1,
    resume: bool = False,
    generator: torch.Generator | None = None,
    done: Callable[[], None] = lambda: None,
) -> PateRun:
    """Train teachers, answer public queries by noisy votes, and train a student on the answers.

    **Guarantee.** `PateRun.guarantee` covers all releases: the student, the answers, their number, and
    the ledger. Neighbours differ in one record of `data` (added or removed). If `units` is given, they
    differ in one user with any number of records. Proof: docs/guarantees/argmax.md.

    Args:
        network: Factory of networks for teachers and student.
        data: Private inputs and targets.
        public: Public inputs to label, and targets to evaluate the answers.
        evaluation: Public inputs and targets to evaluate the student.
        query: Noisy vote (`NoisyMax`), optionally with a threshold test (`Confident`).
        teachers: Number of teachers.
        classes: Number of classes.
        delta: Failure probability of the guarantee.
        directory: Folder of the run. `teachers/` and `private.json` must stay secret, like the records;
            the other files may be published.
        answers: Maximum number of answers; by default all queries.
        units: User id of each record. All records of a user are assigned to one teacher.
        lesson: Hyperparameters of teachers and student.
        processes: Number of processes that train teachers.
        resume: Whether to resume the run in `directory` with its finished teachers and answers.
        generator: Source of the noise seed, for tests.
        done: Callback after each finished teacher.
    """
    check_first_rank("PATE")
    inputs, truth = public
    vote = query.vote
    if vote != NoisyMax.of_teachers(noise=vote.noise):
        raise Unproved(
            f"{vote!r} has the wrong sensitivity for teachers: a record may change one vote, and so "
            "two counts by 1. Pass NoisyMax.of_teachers(noise=...).",
            key="query",
        )
    asked = count(public)
    plans = planned(query, asked, asked if answers is None else answers)
    users = None if units is None else len(set(owner_ids(units)))
    adjacency = Adjacency(neighbours=vote.neighbours, per_unit=None if units is None else "all")
    check_delta(delta, count(data) if users is None else users, adjacency.unit, private=True)
    guarantee = replace(charged(vote, plans, delta), unit=adjacency.unit)
    check_count("processes", processes, "it is the number of processes", at_least=1)
    assigned = teacher_of(*data, teachers, units)
    if isinstance(query, Confident) and query.threshold > teachers:
        raise InvalidValue(
            f"threshold={query.threshold:g} is more than the {teachers} votes, so it could only be "
            f"reached by noise. Pass e.g. threshold={0.6 * teachers:g}.",
            key="threshold",
        )
    settings = {
        "teachers": teachers,
        "query": query.to_plain(),
        "answers": answers,
        "planned": [{"plan": plan.to_plain(), "steps": steps} for plan, steps in plans.items()],
        "public": fingerprint([inputs]),
        "network": str(new_network(network)),
        "lesson": lesson.to_plain(),
        "per_unit": adjacency.per_unit,
    }
    # the assignment of records to teachers depends on the user ids, which may be private
    private = {"records": count(data), "owners": None if units is None else fingerprint([assigned])}
    contents: dict[str, dict[str, Any]] = {_PRIVATE: private, _SETTINGS: settings}
    _check_folder(directory, contents, resume=resume)
    folder = directory / _TEACHERS
    with Ledger(directory / _LEDGER) as ledger:
        for name, content in contents.items():
            text = json.dumps(content, indent=1)
            replace_file(directory / name, text.encode(), secret=name == _PRIVATE)
        ledger.store_delta(delta)
        train_teachers(folder, network, data, assigned, teachers, lesson, processes=processes, done=done)
        predicted = predictions(folder, network, teachers, inputs)
        scores = nn.functional.one_hot(predicted, classes).sum(0).double()
        labels = ask(query, scores, ledger, plans, generator, adjacency)
        guarantee = replace(guarantee, randomness=ledger.epsilon(delta).randomness)
    answered = labels != NO_ANSWER
    student = trained(network, inputs[answered], labels[answered], lesson, seed=teachers)
    checkpoint.save_weights(directory / "student.safetensors", student)
    measured = None
    if {type(plan.noise) for plan in plans} == {Gaussian}:
        measured = replace(per_instance(query, scores, delta, answers), unit=adjacency.unit)
    correct = {
        "label_accuracy": labels[answered] == truth[answered],
        "student_accuracy": predict(student, evaluation[0]) == evaluation[1],
        "teacher_accuracy": predicted == truth,
    }
    shares = {name: float(each.double().mean()) for name, each in correct.items()}
    run = PateRun(guarantee=guarantee, answered=int(answered.sum()), per_instance=measured, **shares)
    said = {"answered": run.answered, "label_accuracy": run.label_accuracy}
    entry = metrics_of(asked, run.guarantee, **said, accuracy=run.student_accuracy)
    replace_file(directory / "metrics.jsonl", metrics_line(entry).encode())
    return run


def ask(
    query: Query,
    scores: Tensor,
    ledger: Ledger,
    counts: Mapping[Plan, int],
    generator: torch.Generator | None = None,
    adjacency: Adjacency = RECORD,
) -> Tensor:
    """Answer the rows of `scores` by noisy votes; unanswered rows are `NO_ANSWER`.

    Rows are answered in order until the charges reach `counts`, which is fixed in advance. Answers from
    the ledger are reused without another charge.

    **Guarantee.** The privacy cost is that of `counts`, for any answers (docs/guarantees/argmax.md, step
    3). An answer is returned only after its charge is on disk.
    """
    check_first_rank("asking PATE's teachers")
    ledger.check_adjacency(adjacency)
    rows = as_scores(scores)
    answers = query.vote(rows, generator)
    passes = None if isinstance(query, NoisyMax) else query.passes(rows, generator)
    outcomes = {}
    """Outcomes on the ledger, by row and kind (test or answer)."""
    for release in ledger.releases:
        number, _, outcome = release.partition(":")
        outcomes[int(number), outcome in ("passed", "failed")] = outcome
    secrecy: Secrecy = "secret" if generator is None else "seeded"
    charge = partial(ledger.charge, run=secrets.token_hex(8), randomness=secrecy, adjacency=adjacency)
    steps = itertools.count(1)

    def released(row: int, plan: Plan, outcome: str) -> str | None:
        """Released outcome, charged if it is new; None if the charges of the plan are used up."""
        question = (row, outcome in ("passed", "failed"))
        if question not in outcomes:
            if ledger.counts.get(plan, 0) >= counts[plan]:
                return None
            charge(plan, step=next(steps), release=f"{row}:{outcome}")
            outcomes[question] = outcome
        return outcomes[question]

    labels = torch.full((len(rows),), NO_ANSWER)
    for row in range(len(rows)):
        if passes is not None and not isinstance(query, NoisyMax):
            verdict = released(row, query.test, "passed" if passes[row] else "failed")
            if verdict == "failed":
                continue
            if verdict is None:
                break
        answer = released(row, query.vote.plan, str(int(answers[row])))
        if answer is None:
            break
        labels[row] = int(answer)
    return labels


def _check_folder(directory: Path, contents: dict[str, dict[str, Any]], *, resume: bool) -> None:
    """Raise `CheckpointError` unless a run with these settings can start or resume in the folder."""
    if not resume:
        if any((directory / name).exists() for name in (_SETTINGS, _TEACHERS)):
            raise CheckpointError(
                f"{directory} already contains a run: a restart would spend its budget a second time. "
                "Resume it (--resume), or use another directory (--run-dir)."
            )
        return
    if not (directory / _SETTINGS).is_file():
        raise CheckpointError(
            f"there is no run in {directory} to resume. Check the name, or start without resuming."
        )
    differing = []
    for name, content in contents.items():
        try:
            recorded = json.loads((directory / name).read_bytes())
            current = json.loads(json.dumps(content))
            differing += [entry for entry in current if recorded[entry] != current[entry]]
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory / name} is damaged or missing ({error!r}). Restore it, or start a new run "
                "in a new directory."
            ) from None
    if differing:
        raise CheckpointError(
            f"{directory} contains a run with other settings ({', '.join(differing)}). Resume with the "
            "same settings, or use another directory."
        )
    if not (directory / _LEDGER).exists():
        raise LedgerError(
            f"{directory} contains a run without its ledger: the privacy cost is unknown. Restore "
            "ledger.jsonl, or start a new run in a new directory."
        )
