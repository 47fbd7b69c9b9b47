"""PATE from end to end, on the bundled digits; asking under a ledger."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hush
from hush.accounting.ledger import Ledger
from hush.core.errors import CheckpointError, DataError, InvalidValue, PrivacyWarning, Unproved
from hush.core.guarantee import Neighbours
from hush.data import load, tensors
from hush.models import build
from hush.pate.argmax import NO_ANSWER, Confident, NoisyMax, planned
from hush.pate.run import PateRun, ask, pate
from hush.pate.teachers import Lesson
from hush.report.facts import run_facts

X, Y, X_TEST, Y_TEST = tensors(load("digits"))
VOTE = NoisyMax.of_teachers(noise=hush.Gaussian(4.0))


def run(directory: Path, **changed: Any) -> PateRun:
    usual: dict[str, Any] = {
        "network": partial(build, "logistic", classes=10, shape=(1, 8, 8)),
        "data": (X, Y),
        "public": (X_TEST[:60], Y_TEST[:60]),
        "query": VOTE,
        "teachers": 20,
        "delta": 1e-5,
        "lesson": Lesson(epochs=15, rate=0.05),
        "generator": torch.Generator().manual_seed(0),
    }
    return pate(
        evaluation=(X_TEST[60:], Y_TEST[60:]), classes=10, directory=directory, **{**usual, **changed}
    )


def test_a_run_learns_and_says_what_it_cost(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    assert result.answered == 60
    assert result.label_accuracy > 0.8
    assert result.student_accuracy > 0.6
    assert 0.5 < result.teacher_accuracy < result.label_accuracy + 0.1
    assert result.guarantee.epsilon.upper == VOTE.guarantee(60, 1e-5).epsilon.upper
    assert not result.guarantee.sensitive
    assert result.per_instance is not None
    assert result.per_instance.sensitive
    assert result.per_instance.epsilon.upper <= result.guarantee.epsilon.upper
    spent = Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True)
    assert spent.counts == {VOTE.plan: 60}
    assert spent.epsilon().epsilon == result.guarantee.epsilon, "the noisy scores are not released"
    assert spent.epsilon().epsilon.lower == 0
    assert str(result.guarantee.neighbours) == str(spent.epsilon().neighbours) == "add/remove"
    assert spent.delta == 1e-5
    assert (tmp_path / "run" / "student.safetensors").is_file()
    facts = run_facts(tmp_path / "run")
    assert (facts.kind, facts.finished) == ("PATE", True)
    assert facts.guarantee == result.guarantee
    assert facts.accuracy == result.student_accuracy
    (measured,) = facts.metrics
    assert (measured["answered"], measured["label_accuracy"]) == (60, result.label_accuracy)
    assert not any("teacher" in name for name in measured), "how teachers do is sensitive"


def test_a_killed_run_keeps_its_teachers_and_its_answers(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    finished = 0

    def stop() -> None:
        nonlocal finished
        finished += 1
        if finished == 8:
            raise Stopped

    whole = run(tmp_path / "whole")
    folder = tmp_path / "stopped"
    with pytest.raises(Stopped):
        run(folder, done=stop)
    files = sorted((folder / "teachers").iterdir())
    assert len(files) == 8
    written = [file.stat().st_mtime_ns for file in files]
    assert run(folder, resume=True) == whole
    assert [file.stat().st_mtime_ns for file in files] == written
    ledger = (folder / "ledger.jsonl").read_bytes()
    assert run(folder, resume=True, generator=None) == whole
    assert (folder / "ledger.jsonl").read_bytes() == ledger


def test_nothing_to_publish_depends_on_the_number_of_records(tmp_path: Path) -> None:
    sizes = (300, 299)
    for size in sizes:
        run(tmp_path / str(size), data=(X[:size], Y[:size]))
    published = [(tmp_path / str(size) / "settings.json").read_bytes() for size in sizes]
    assert published[0] == published[1]
    with pytest.raises(CheckpointError, match=r"other settings \(records\)"):
        run(tmp_path / "300", data=(X[:299], Y[:299]), resume=True)
    (tmp_path / "300" / "private.json").unlink()
    with pytest.raises(CheckpointError, match=r"private.json is damaged or missing"):
        run(tmp_path / "300", data=(X[:300], Y[:300]), resume=True)


def test_other_noise_and_a_threshold(tmp_path: Path) -> None:
    laplace = NoisyMax.of_teachers(noise=hush.Laplace(4.0))
    query = Confident(vote=laplace, threshold=15.0, noise=hush.Gaussian(3.0))
    result = run(tmp_path / "run", query=query, answers=20)
    assert 5 < result.answered <= 20
    assert result.per_instance is None
    spent = Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True)
    allowed = planned(query, 60, 20)
    assert all(count <= allowed[plan] for plan, count in spent.counts.items())
    assert spent.epsilon(1e-5).epsilon.upper <= result.guarantee.epsilon.upper


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"teachers": 2000}, DataError, "teachers=2000 is more than the 1437 records"),
        ({"public": (X_TEST[:0], Y_TEST[:0])}, DataError, "no records"),
        ({"answers": 0}, InvalidValue, "answers=0"),
        ({"delta": 0.0}, InvalidValue, "delta=0"),
        ({"processes": 0}, InvalidValue, "processes=0"),
        (
            {"query": Confident(vote=VOTE, threshold=21.0, noise=hush.Gaussian(1.0))},
            InvalidValue,
            "threshold=21 is more than the 20 votes",
        ),
        ({"resume": True}, CheckpointError, "no run in .* to resume"),
    ],
)
def test_bad_input_is_named_before_any_work(
    changed: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path / "run", **changed)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "query",
    [
        replace(VOTE, moved=hush.Entries(changed=1)),
        replace(VOTE, neighbours=Neighbours.REPLACE),
        NoisyMax.of_votes(noise=hush.Gaussian(4.0)),
    ],
)
def test_only_what_one_record_of_a_teacher_can_do_is_charged(query: NoisyMax, tmp_path: Path) -> None:
    with pytest.raises(Unproved, match=r"may change one vote, and so two counts.*of_teachers"):
        run(tmp_path / "run", query=query)
    assert not (tmp_path / "run").exists()


def test_a_delta_above_one_over_the_records_is_warned_of_in_private(tmp_path: Path) -> None:
    with pytest.warns(PrivacyWarning, match=rf"above 1/{len(X)} .*private number: do not publish it"):
        run(tmp_path / "run", delta=0.01, lesson=Lesson(epochs=1, rate=0.05))
    with pytest.warns(PrivacyWarning, match=r"all data of one user of the 200 users outright"):
        run(
            tmp_path / "users",
            delta=0.01,
            units=[record % 200 for record in range(len(Y))],
            lesson=Lesson(epochs=1, rate=0.05),
        )


def test_a_run_of_users_protects_one_user_with_any_number_of_records(tmp_path: Path) -> None:
    owners = [f"user {record % 200}" for record in range(len(Y))]
    fewer = [owner != "user 7" for owner in owners]
    result = run(tmp_path / "run", units=owners)
    assert result.guarantee.unit == "one user"
    assert result.guarantee.epsilon == VOTE.guarantee(60, 1e-5).epsilon
    assert result.per_instance is not None
    assert result.per_instance.unit == "one user"
    assert Ledger(tmp_path / "run" / "ledger.jsonl", read_only=True).epsilon(1e-5).unit == "one user"
    remaining = [owner for owner in owners if owner != "user 7"]
    run(tmp_path / "fewer", units=remaining, data=(X[fewer], Y[fewer]))
    published = [(tmp_path / name / "settings.json").read_bytes() for name in ("run", "fewer")]
    assert published[0] == published[1]
    for changed, said in (
        ({"units": ["user 1", *owners[1:]]}, r"other settings \(owners\)"),
        ({"units": None}, r"other settings \((owners, per_unit|per_unit, owners)\)"),
    ):
        with pytest.raises(CheckpointError, match=said):
            run(tmp_path / "run", resume=True, **changed)
    assert run(tmp_path / "run", resume=True, units=owners) == result


ASKED = NoisyMax.of_teachers(noise=hush.Gaussian(3.0))
CONFIDENT = Confident(vote=ASKED, threshold=25.0, noise=hush.Laplace(2.0))
SCORES = torch.tensor([[40.0, 0.0, 0.0], [14.0, 13.0, 13.0], [0.0, 0.0, 40.0]] * 10)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("query", [ASKED, CONFIDENT])
def test_what_is_charged_is_what_was_asked(query: NoisyMax | Confident) -> None:
    ledger = Ledger()
    plans = planned(query, 30, 30)
    answers = ask(query, SCORES, ledger, plans, seeded())
    answered = int((answers != NO_ANSWER).sum())
    if isinstance(query, Confident):
        assert 15 <= answered < 30
        assert ledger.counts == {query.test: 30, ASKED.plan: answered}
    else:
        assert ledger.counts == {ASKED.plan: 30}
    assert answers[::3].eq(0).sum() == 10
    assert answers[2::3].eq(2).sum() == 10


class Killed(Exception):
    pass


class DyingLedger(Ledger):
    """Dies right after, or right before, a charge is on disk."""

    remaining = 0
    after = True

    def charge(self, *arguments: Any, **named: Any) -> None:
        self.remaining -= 1
        if self.remaining < 0 and not self.after:
            raise Killed
        super().charge(*arguments, **named)
        if self.remaining < 0:
            raise Killed


@pytest.mark.parametrize("query", [ASKED, CONFIDENT])
@pytest.mark.parametrize("moment", range(0, 28, 3))
@pytest.mark.parametrize("after", [True, False])
def test_a_killed_run_goes_on(
    query: NoisyMax | Confident, moment: int, after: bool, tmp_path: Path
) -> None:
    plans = planned(query, 30, 30)
    whole = ask(query, SCORES, Ledger(), plans, seeded())
    with DyingLedger(tmp_path / "ledger.jsonl") as dying:
        dying.remaining, dying.after = moment, after
        with pytest.raises(Killed):
            ask(query, SCORES, dying, plans, seeded())
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert len(ledger.releases) == moment + after
        recorded = list(ledger.releases)
        # Other noise: what is on the ledger is not asked again, and nothing is charged twice.
        answers = ask(query, SCORES, ledger, plans)
        assert list(ledger.releases)[: len(recorded)] == recorded
        assert sum(ledger.counts.values()) <= sum(plans.values())
        if query is ASKED:
            assert ledger.counts == {ASKED.plan: 30}
            assert torch.equal(answers[: moment + after], whole[: moment + after])
        repeated = ask(query, SCORES, ledger, plans)
        assert torch.equal(repeated, answers)


def test_a_torn_charge_counts_against_the_plan(tmp_path: Path) -> None:
    path, plans = tmp_path / "ledger.jsonl", planned(ASKED, 30, 30)
    with Ledger(path) as ledger:
        ask(ASKED, SCORES[:5], ledger, plans)
    path.write_bytes(path.read_bytes()[:-9])
    with Ledger(path) as ledger:
        answers = ask(ASKED, SCORES, ledger, plans)
        assert ledger.counts == {ASKED.plan: 30}
    assert int((answers != NO_ANSWER).sum()) == 29


def test_the_answer_is_on_disk_before_it_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        answers = ask(ASKED, SCORES, ledger, planned(ASKED, 30, 30))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["release"] for line in lines[2:]] == [
        f"{i}:{a}" for i, a in enumerate(answers.tolist())
    ]
