"""PATE from end to end: teachers on disjoint records, noisy votes on public inputs, a student."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError, InvalidValue, LedgerError, Unproved
from hush.core.guarantee import RECORD, Adjacency, Guarantee, Neighbours, check_delta
from hush.core.plan import Plan
from hush.core.value import check_count
from hush.noise import Gaussian
from hush.pate.argmax import (
    NO_ANSWER,
    Confident,
    NoisyMax,
    Query,
    as_scores,
    charged,
    covers_a_vote,
    planned,
)
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
    votes,
)
from hush.training import checkpoint
from hush.training.data import count
from hush.training.distributed.processes import check_first_rank
from hush.training.fingerprint import fingerprint
from hush.training.run_folder import metrics_line
from hush.training.units import Owners, owner_ids

_LESSON = Lesson()


@dataclass(frozen=True, kw_only=True)
class PateRun:
    """Result of a PATE run: guarantees and accuracies."""

    guarantee: Guarantee
    """Guarantee of everything released, for any votes; it may be published."""
    answered: int
    label_accuracy: float
    """Accuracy of the answers; NaN if there are none."""
    student_accuracy: float
    per_instance: Guarantee | None
    """Per-instance guarantee on these votes (sensitive); None unless the noise is Gaussian."""
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
    """Train teachers, let them vote under noise on public inputs, and train a student on the answers.

    **Guarantee.** `PateRun.guarantee`, for everything released: the student, the answers and their
    number, the ledger. Neighbours differ by one record of `data`, added or removed; with `units` by one
    user with any number of records. `public` and `evaluation` are not protected; their targets only
    measure accuracies. docs/guarantees/argmax.md.

    Args:
        network: Factory of new teachers and students. Each is trained on its own deep copy, with its own
            seeds of torch's, Python's and NumPy's global generators; models that share a trainable
            parameter are refused.
        data: Private inputs and targets.
        public: Inputs to label, and targets to measure the answers with.
        evaluation: Inputs and targets to measure the student with.
        query: Noisy vote, with or without a test before it.
        teachers: Number of teachers, on disjoint records.
        classes: Number of classes.
        delta: Failure probability of the guarantee.
        directory: Folder of the run's files.
        answers: Largest number of inputs that are answered; None: all.
        units: Owner of each record, integers or names; all records of an owner go to one teacher.
        lesson: Hyperparameters of teachers and student.
        processes: Number of teachers trained at once.
        resume: Continue the run in `directory`, keeping its finished teachers and its answers.
        generator: Seed of the noise, for tests.
        done: Callback after each finished teacher.

    Returns:
        The guarantee and the accuracies; the student's weights are in `directory`.
    """
    check_first_rank("PATE")
    inputs, truth = public
    vote = query if isinstance(query, NoisyMax) else query.vote
    if not covers_a_vote(vote.moved):
        raise Unproved(
            f"moved={vote.moved!r} is less than one record can do: it may change its teacher's vote, "
            "which moves two counts by 1. Pass NoisyMax.of_teachers(noise=...).",
            key="moved",
        )
    if vote.neighbours is Neighbours.REPLACE:
        raise Unproved(
            f"neighbours={str(vote.neighbours)!r} is not what is charged: a record that is added or "
            "removed changes one teacher's vote, and one that is replaced two. Pass "
            "NoisyMax.of_teachers(noise=...).",
            key="neighbours",
        )
    asked = count(public)
    plans = planned(query, asked, asked if answers is None else answers)
    users = None if units is None else len(set(owner_ids(units)))
    adjacency = Adjacency(neighbours=vote.neighbours, per_unit=None if units is None else "all")
    unit = vote.unit if units is None else adjacency.unit
    check_delta(delta, count(data) if users is None else users, adjacency.unit, private=True)
    guarantee = charged(plans, delta, vote.neighbours, unit)
    check_count("processes", processes, "somebody has to train the teachers", at_least=1)
    assigned = teacher_of(*data, teachers, units)
    if isinstance(query, Confident) and query.threshold > teachers:
        raise InvalidValue(
            f"threshold={query.threshold:g} is more than the {teachers} votes there are: noise alone "
            "would reach it, and the answers would be meaningless. Pass e.g. "
            f"threshold={0.6 * teachers:g}.",
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
    # each record's teacher follows from its owner, and owners may be private
    private = {"records": count(data), "owners": None if units is None else fingerprint([assigned])}
    folder = PateFolder(directory, settings, private, resume=resume)
    with Ledger(folder.ledger) as ledger:
        folder.begin()
        ledger.store_delta(delta)
        train_teachers(
            folder.teachers,
            network,
            data,
            assigned,
            teachers,
            lesson,
            processes=processes,
            done=done,
        )
        predicted = predictions(folder.teachers, network, teachers, inputs)
        scores = votes(predicted, classes)
        labels = ask(query, scores, ledger, plans, generator, adjacency)
        guarantee = replace(guarantee, randomness=ledger.epsilon(delta).randomness)
    answered = labels != NO_ANSWER
    student = trained(network, inputs[answered], labels[answered], lesson, seed=teachers)
    checkpoint.save_weights(folder.student, student)
    measured = None
    if {type(plan.noise) for plan in plans} == {Gaussian}:
        measured = replace(per_instance(query, scores, delta, answers), unit=unit)
    run = PateRun(
        guarantee=guarantee,
        answered=int(answered.sum()),
        label_accuracy=_mean(labels[answered] == truth[answered]),
        student_accuracy=_mean(predict(student, evaluation[0]) == evaluation[1]),
        per_instance=measured,
        teacher_accuracy=_mean(predicted == truth),
    )
    folder.write_metrics(run, asked)
    return run


def _mean(correct: Tensor) -> float:
    """Share of true entries; NaN without entries."""
    return float(correct.double().mean())


def ask(
    query: Query,
    scores: Tensor,
    ledger: Ledger,
    counts: Mapping[Plan, int],
    generator: torch.Generator | None = None,
    adjacency: Adjacency = RECORD,
) -> Tensor:
    """Answers to the rows of `scores`, `NO_ANSWER` for rows without one.

    Rows are answered in order until a plan has run as often as `counts`, fixed beforehand, allows.
    Answers that are on the ledger are read back and not charged again.

    **Guarantee.** The guarantee of `counts`, for any answers (docs/guarantees/argmax.md, step 3): the
    charge, with the released answer, is on disk before the answer is returned.
    """
    check_first_rank("asking PATE's teachers")
    ledger.check_adjacency(adjacency)
    rows = as_scores(scores)
    vote = query if isinstance(query, NoisyMax) else query.vote
    answers = vote(rows, generator)
    passes = torch.ones(len(rows), dtype=torch.bool)
    if not isinstance(query, NoisyMax):
        passes = query.passes(rows, generator)
    outcomes = _recorded_outcomes(ledger)
    run, step = secrets.token_hex(8), 0

    def released(row: int, plan: Plan, outcome: str) -> str | None:
        """The released outcome, charged if it is new; None if its plan may not run again."""
        nonlocal step
        question = (row, outcome in ("passed", "failed"))
        if question not in outcomes:
            if ledger.counts.get(plan, 0) >= counts[plan]:
                return None
            step += 1
            ledger.charge(
                plan,
                run=run,
                step=step,
                release=f"{row}:{outcome}",
                randomness="secret" if generator is None else "seeded",
                adjacency=adjacency,
            )
            outcomes[question] = outcome
        return outcomes[question]

    labels = torch.full((len(rows),), NO_ANSWER)
    for row in range(len(rows)):
        if not isinstance(query, NoisyMax):
            verdict = released(row, query.test, "passed" if passes[row] else "failed")
            if verdict == "failed":
                continue
            if verdict is None:
                break
        answer = released(row, vote.plan, str(int(answers[row])))
        if answer is None:
            break
        labels[row] = int(answer)
    return labels


def _recorded_outcomes(ledger: Ledger) -> dict[tuple[int, bool], str]:
    """Outcomes on the ledger, by row and by whether they are of a test."""
    outcomes = {}
    for release in ledger.releases:
        row, _, outcome = release.partition(":")
        if not row.isdecimal():
            raise LedgerError(
                f"the ledger {ledger.path} holds {release!r}, which is no answer to a query: it "
                "belongs to another kind of run. Name another directory."
            )
        outcomes[int(row), outcome in ("passed", "failed")] = outcome
    return outcomes


class PateFolder:
    """Files of one run.

    `settings.json`, `ledger.jsonl` (with the answers), `metrics.jsonl` and `student.safetensors` may be
    published. `teachers/` and `private.json` are as secret as the records: the number of records
    distinguishes neighbours.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], private: dict[str, Any], *, resume: bool
    ) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"
        self.teachers = path / "teachers"
        self.student = path / "student.safetensors"
        self._settings = path / "settings.json"
        self._private = path / "private.json"
        self._contents = {
            self._private: json.dumps(private, indent=1),
            self._settings: json.dumps(settings, indent=1),
        }
        if resume and not self._settings.is_file():
            raise CheckpointError(
                f"there is no run in {path} to resume: a new run under a mistyped name would be charged "
                "again. Check the name, or start the run without resuming."
            )
        if self._settings.exists():
            self._check(resume=resume)
        elif self.teachers.exists():
            raise CheckpointError(
                f"{path} holds teachers without settings.json: trained on other shares of the records, "
                "two of them may have seen the same one. Restore the file, or name another directory."
            )

    def begin(self) -> None:
        """Write the settings, which mark that a run exists, after its ledger was created."""
        for path, content in self._contents.items():
            replace_file(path, content.encode(), secret=path == self._private)

    def write_metrics(self, run: PateRun, queries: int) -> None:
        """Write the measurements on unprotected records, and nothing sensitive."""
        line = metrics_line(
            run.guarantee,
            queries,
            answered=run.answered,
            label_accuracy=run.label_accuracy,
            accuracy=run.student_accuracy,
        )
        replace_file(self.path / "metrics.jsonl", line.encode())

    def _check(self, *, resume: bool) -> None:
        """Raise unless the existing run may continue with these settings."""
        if not resume:
            raise CheckpointError(
                f"{self.path} already holds a run: starting over would silently spend its budget a "
                "second time. Resume it, or name another directory."
            )
        differing = []
        for path, content in self._contents.items():
            try:
                recorded, current = json.loads(path.read_bytes()), json.loads(content)
            except (ValueError, OSError) as error:
                raise CheckpointError(
                    f"{path} is damaged or missing ({error}): what the ledger was charged for is "
                    "unknown. Restore it, or start a new run in a new directory."
                ) from None
            if not isinstance(recorded, dict):
                recorded = {}
            differing += [name for name in current if recorded.get(name) != current[name]]
        if differing:
            raise CheckpointError(
                f"{self.path} holds a run with other settings ({', '.join(differing)}): a run keeps "
                "what it was charged for. Resume with the same ones, or name another directory."
            )
        if not self.ledger.exists():
            raise LedgerError(
                f"{self.path} holds a run whose ledger is missing: its cost is unknown. Restore "
                "ledger.jsonl, or start a new run in a new directory."
            )
