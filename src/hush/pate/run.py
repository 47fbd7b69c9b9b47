"""PATE from end to end: teachers on disjoint records, noisy votes on public inputs, a student."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError, InvalidValue, LedgerError, Unproved
from hush.core.guarantee import Adjacency, Guarantee, Neighbours, check_delta
from hush.core.value import check_count
from hush.noise import Gaussian
from hush.pate.argmax import NoisyMax, charged, covers_a_vote
from hush.pate.ask import ask
from hush.pate.confident import NO_ANSWER, Confident, Query, planned
from hush.pate.per_instance import per_instance
from hush.pate.teachers import (
    Lesson,
    Network,
    fit,
    predict,
    predictions,
    teacher_of,
    train_teachers,
    votes,
)
from hush.training import checkpoint
from hush.training.data import count
from hush.training.distributed.process_group import check_first_rank
from hush.training.phases.private_gradient import fingerprint
from hush.training.run_folder import metrics_line
from hush.training.units import Owners, owner_ids

_LESSON = Lesson()


@dataclass(frozen=True, kw_only=True)
class PateRun:
    """Result of a PATE run: guarantees and accuracies."""

    guarantee: Guarantee
    """Of everything that was released, for any votes; it may be published."""
    answered: int
    label_accuracy: float
    """The share of answers that are right; NaN if there is none."""
    student_accuracy: float
    per_instance: Guarantee | None
    """Per-instance guarantee on these votes (sensitive); None for other noise than Gaussian."""
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
    units: Owners | None = None,
    lesson: Lesson = _LESSON,
    processes: int = 1,
    resume: bool = False,
    generator: torch.Generator | None = None,
    done: Callable[[], None] = lambda: None,
) -> PateRun:
    """Train teachers, let them vote under noise on public inputs, train a student on the answers.

    **Guarantee.** `PateRun.guarantee`, for everything released: the student, the answers, their
    number, the ledger. Neighbours differ by one record of `data`, added or removed; with `units` by one
    user, whatever number of records that user has. `public` and `evaluation` are not protected; their
    targets serve to measure only. docs/guarantees/argmax.md.

    Args:
        network: makes a new teacher or student.
        data: private inputs and targets.
        public: inputs to label, and targets to measure the answers with.
        evaluation: inputs and targets to measure the student with.
        query: the noisy vote, with or without a test before it.
        teachers: how many, on disjoint records.
        classes: number of classes.
        delta: of the guarantee.
        directory: of the run's files.
        answers: the most inputs that are answered; None: all.
        units: the owner of each record, integers or names: all records of an owner go to one teacher.
        lesson: hyperparameters of teachers and student.
        processes: teachers trained at once.
        resume: go on with the run in `directory`; finished teachers and answers on the ledger stay.
        generator: seeds the noise, for tests.
        done: called as each teacher is finished.

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
            f"neighbours={str(vote.neighbours)!r} is not what is charged: what is added or removed "
            "changes one teacher's vote, and what is replaced two. Pass "
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
            f"threshold={query.threshold:g} is more than the {teachers} votes there are: it would be "
            "reached by noise alone, and the answers tell nothing. Pass e.g. "
            f"threshold={0.6 * teachers:g}.",
            key="threshold",
        )
    settings = {
        "teachers": teachers,
        "query": query.to_plain(),
        "answers": answers,
        "planned": [{"plan": plan.to_plain(), "steps": steps} for plan, steps in plans.items()],
        "public": fingerprint([inputs]),
        "network": str(network()),
        "lesson": lesson.to_plain(),
        "per_unit": adjacency.per_unit,
    }
    # whose teacher each record is follows from the owners, who may be private
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(teachers)
        student = network()
        fit(student, inputs[answered], labels[answered], lesson, seed=teachers)
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
    """Share of the entries that are true; NaN of none."""
    return float(correct.double().mean())


class PateFolder:
    """The files of one run.

    `settings.json`, `ledger.jsonl` (with the answers), `metrics.jsonl` and `student.safetensors` may be
    published;
    `teachers/` and `private.json` are as secret as the records: how many records there are tells
    neighbours apart that differ by one.
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
                f"there is no run in {path} to resume: starting one under a mistyped name would pay for "
                "everything again. Check the name, or start the run without resuming."
            )
        if self._settings.exists():
            self._check(resume=resume)
        elif self.teachers.exists():
            raise CheckpointError(
                f"{path} holds teachers without settings.json: trained on other shares of the records, "
                "two of them may have seen the same one. Restore the file, or name another directory."
            )

    def begin(self) -> None:
        """Write the settings, which mark that a run exists; its ledger must exist already."""
        for path, content in self._contents.items():
            replace_file(path, content.encode(), secret=path == self._private)

    def write_metrics(self, run: PateRun, queries: int) -> None:
        """Write what was measured on records without protection, and nothing sensitive."""
        line = metrics_line(
            run.guarantee,
            queries,
            answered=run.answered,
            label_accuracy=run.label_accuracy,
            accuracy=run.student_accuracy,
        )
        replace_file(self.path / "metrics.jsonl", line.encode())

    def _check(self, *, resume: bool) -> None:
        """Raise unless the run that is there may go on with these settings."""
        if not resume:
            raise CheckpointError(
                f"{self.path} already holds a run: starting over would spend its budget a second time "
                "without saying so. Resume it, or name another directory."
            )
        differing = []
        for path, content in self._contents.items():
            try:
                recorded, current = json.loads(path.read_bytes()), json.loads(content)
            except (ValueError, OSError) as error:
                raise CheckpointError(
                    f"{path} is damaged or missing ({error}): what the ledger was charged for is not "
                    "known. Restore it, or start a new run in a new directory."
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
                f"{self.path} holds a run whose ledger is missing: what it spent is not known. Restore "
                "ledger.jsonl, or start a new run in a new directory."
            )
