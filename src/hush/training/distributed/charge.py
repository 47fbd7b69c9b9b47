"""One ledger for all ranks: rank 0 writes and syncs a charge before any rank uses its release."""

import os
from typing import Any

from hush.accounting.ledger import Ledger, Snapshot
from hush.core.errors import LedgerError, ProcessFailed
from hush.core.guarantee import Adjacency
from hush.core.plan import Plan
from hush.training.distributed.group import Processes
from hush.training.run_folder import open_ledger

LedgerOrPath = Ledger | str | os.PathLike[str] | None


def open_ledger_for(
    ledger: LedgerOrPath, plan: Plan, adjacency: Adjacency, processes: Processes | None
) -> Ledger:
    """Rank 0's ledger; on the other ranks a copy of it in memory, which counts what rank 0 charges.

    Args:
        ledger: of rank 0. Of the others: nothing, the same path, or a ledger in memory without charges,
            which becomes the copy.
        plan: of the step.
        adjacency: what neighbours differ in.
        processes: the ranks; None: this process alone, whose ledger it is.
    """
    if processes is None:
        return open_ledger(ledger, plan, adjacency)
    own = isinstance(ledger, Ledger) and not ledger.mirrored and bool(ledger.path or ledger.counts)
    if own and processes.rank:
        raise LedgerError(
            f"rank {processes.rank} has a ledger of its own and charges are written by rank 0 alone: "
            "two ledgers would each hold a part of what was spent. Pass the path, or leave ledger out, "
            "on every rank but 0."
        )
    _check_first_has_path(ledger, processes)
    first: list[Ledger] = []

    def opened_by_first() -> Snapshot:
        first.append(open_ledger(ledger, plan, adjacency))
        return first[0].snapshot()

    snapshot = processes.broadcast_object("opening the ledger", opened_by_first)
    if first:
        return first[0]
    copy = ledger if isinstance(ledger, Ledger) else Ledger()
    copy.mirror(snapshot)
    return copy


def _check_first_has_path(ledger: LedgerOrPath, processes: Processes) -> None:
    """Raise on every rank where one but not rank 0, which alone writes, was given a ledger's path."""
    on_disk = ledger.path is not None if isinstance(ledger, Ledger) else ledger is not None
    said = processes.exchange("the ledger's path", on_disk)
    if any(said) and not said[0]:
        raise LedgerError(
            f"rank {said.index(True)} was given the path of a ledger and rank 0 was not: rank 0 alone "
            "writes charges, so that none would be on disk, and what was spent would be forgotten when "
            "the processes end. Nothing was drawn or charged. Pass ledger= on every rank, rank 0 first."
        )


def charge_together(
    processes: Processes,
    ledger: Ledger,
    plan: Plan,
    *,
    run: str,
    step: int,
    release: str,
    **details: Any,
) -> None:
    """Put a step on rank 0's ledger, on disk, and then on the copies of the others.

    Args:
        processes: the ranks.
        ledger: rank 0's, or a copy.
        plan: of the step.
        run: name of the run.
        step: number of the step.
        release: fingerprint of the release, as this rank has computed it.
        details: as `Ledger.charge` takes them.

    **Guarantee.** It returns on a rank only after the charge is on rank 0's disk, and only if every rank
    has the release that was charged: docs/guarantees/distributed.md, 5.
    """
    said = processes.exchange(f"the charge of step {step}", [[run, step, release], ledger.head])
    held = [each for each, _ in said]
    for rank, other in enumerate(held):
        if other != held[0]:
            raise ProcessFailed(
                # their fingerprints are of releases that nothing was charged for
                f"ranks 0 and {rank} do not have the same release to charge ({_named(held[0])} and "
                f"{_named(other)}; what they would release is not shown): a charge is for one release, "
                "and the models would part. Nothing was charged or applied. Run the same torch, drivers "
                "and kind of device on every rank, and resume all of them from one checkpoint."
            )
    if any(head != said[0][1] for _, head in said):  # rank 0 was charged for something of its own
        snapshot = processes.broadcast_object("the ledger", ledger.snapshot)
        if processes.rank:
            ledger.mirror(snapshot)
    processes.standing = (
        f"Step {step} is on the ledger." if processes.rank == 0 else f"Step {step} may be charged."
    )

    def charged() -> list[str | int]:
        ledger.charge(plan, run=run, step=step, release=release, **details)
        return [release, step, ledger.head]

    confirmed = processes.broadcast_message(f"the charge of step {step} on disk", charged)
    processes.standing = f"Step {step} is on the ledger."
    if processes.rank == 0:
        return
    ledger.follow(plan, run=run, step=step, release=release, **details)
    if confirmed != [release, step, ledger.head]:
        raise LedgerError(
            f"rank {processes.rank} counts other charges than the ledger of rank 0 after step {step}: "
            "what was spent would be told differently. Resume all ranks from the last checkpoint."
        )


def check_same_proposal(proposals: list[str]) -> None:
    """Raise on every rank unless all have the same proposal of a trial, which no charge names.

    Args:
        proposals: fingerprints, by rank.
    """
    for rank, other in enumerate(proposals):
        if other != proposals[0]:
            raise ProcessFailed(
                f"ranks 0 and {rank} do not have the same proposal to test (what they would release is "
                "not shown): a verdict is on one proposal, and the models would part. It was not "
                "applied. Run the same torch, drivers and kind of device on every rank, and resume all "
                "of them from one checkpoint."
            )


def _named(held: list[Any]) -> str:
    run, step, _ = held
    return f"step {step} of run {run}"
