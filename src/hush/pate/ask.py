"""Answers to queries under a ledger: every test and answer is charged before it is used."""

import secrets
from collections.abc import Mapping

import torch
from torch import Tensor

from hush.accounting.ledger import Ledger
from hush.core.errors import LedgerError
from hush.core.guarantee import RECORD, Adjacency
from hush.core.plan import Plan
from hush.pate.argmax import NoisyMax, as_scores
from hush.pate.confident import NO_ANSWER, Query
from hush.training.distributed.process_group import check_first_rank


def ask(
    query: Query,
    scores: Tensor,
    ledger: Ledger,
    counts: Mapping[Plan, int],
    generator: torch.Generator | None = None,
    adjacency: Adjacency = RECORD,
) -> Tensor:
    """The answer to each row of `scores`, `NO_ANSWER` where there is none.

    Rows are answered in order until a plan has run as often as `counts`, fixed beforehand, allows.
    Answers that the ledger already holds are returned from it and not charged again.

    **Guarantee.** The guarantee of `counts`, for any answers, docs/guarantees/argmax.md, step 3: a
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
        """The released outcome, charged unless it was before; None if its plan may not run again."""
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
    """Outcomes on the ledger, by row and whether it was a test."""
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
