"""Asking: charged first, kept over a crash, never more than was planned."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

import hush
from hush.accounting.ledger import Ledger
from hush.core.errors import LedgerError
from hush.core.guarantee import RECORD, Adjacency
from hush.pate.argmax import NoisyMax
from hush.pate.ask import ask
from hush.pate.confident import NO_ANSWER, Confident, planned

VOTE = NoisyMax.of_teachers(noise=hush.Gaussian(multiplier=3.0))
CONFIDENT = Confident(vote=VOTE, threshold=25.0, noise=hush.Laplace(multiplier=2.0))
SCORES = torch.tensor([[40.0, 0.0, 0.0], [14.0, 13.0, 13.0], [0.0, 0.0, 40.0]] * 10)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("query", [VOTE, CONFIDENT])
def test_what_is_charged_is_what_was_asked(query: NoisyMax | Confident) -> None:
    ledger = Ledger()
    plans = planned(query, 30, 30)
    answers = ask(query, SCORES, ledger, plans, seeded())
    answered = int((answers != NO_ANSWER).sum())
    if isinstance(query, Confident):
        assert 15 <= answered < 30
        assert ledger.counts == {query.test: 30, VOTE.plan: answered}
    else:
        assert ledger.counts == {VOTE.plan: 30}
    assert answers[::3].eq(0).sum() == 10
    assert answers[2::3].eq(2).sum() == 10


def test_no_more_answers_than_planned() -> None:
    ledger = Ledger()
    answers = ask(CONFIDENT, SCORES, ledger, planned(CONFIDENT, 30, 5), seeded())
    assert int((answers != NO_ANSWER).sum()) == 5
    assert ledger.counts[VOTE.plan] == 5
    assert ledger.counts[CONFIDENT.test] < 30
    assert int((ask(VOTE, SCORES, Ledger(), planned(VOTE, 30, 4)) != NO_ANSWER).sum()) == 4


class Killed(Exception):
    pass


class DyingLedger(Ledger):
    """Dies right after, or right before, a charge is on disk."""

    remaining = 0
    after = True

    def charge(
        self,
        plan: hush.Plan,
        *,
        run: str,
        step: int,
        release: str,
        dimension: int | None = None,
        arithmetic: Literal["proved", "assumed"] = "proved",
        randomness: Literal["secret", "seeded"] = "secret",
        records: int | None = None,
        adjacency: Adjacency = RECORD,
    ) -> None:
        self.remaining -= 1
        if self.remaining < 0 and not self.after:
            raise Killed
        super().charge(plan, run=run, step=step, release=release, adjacency=adjacency)
        if self.remaining < 0:
            raise Killed


@pytest.mark.parametrize("query", [VOTE, CONFIDENT])
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
        if query is VOTE:
            assert ledger.counts == {VOTE.plan: 30}
            assert torch.equal(answers[: moment + after], whole[: moment + after])
        repeated = ask(query, SCORES, ledger, plans)
        assert torch.equal(repeated, answers)


def test_a_torn_charge_counts_against_the_plan(tmp_path: Path) -> None:
    path, plans = tmp_path / "ledger.jsonl", planned(VOTE, 30, 30)
    with Ledger(path) as ledger:
        ask(VOTE, SCORES[:5], ledger, plans)
    path.write_bytes(path.read_bytes()[:-9])
    with Ledger(path) as ledger:
        answers = ask(VOTE, SCORES, ledger, plans)
        assert ledger.counts == {VOTE.plan: 30}
    assert int((answers != NO_ANSWER).sum()) == 29


def test_the_answer_is_on_disk_before_it_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        answers = ask(VOTE, SCORES, ledger, planned(VOTE, 30, 30))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["release"] for line in lines[2:]] == [
        f"{i}:{a}" for i, a in enumerate(answers.tolist())
    ]


def test_a_ledger_of_another_kind_of_run_is_refused() -> None:
    ledger = Ledger()
    ledger.charge(VOTE.plan, run="a", step=1, release="00ff")
    with pytest.raises(LedgerError, match="no answer to a query"):
        ask(VOTE, SCORES, ledger, planned(VOTE, 30, 30))
