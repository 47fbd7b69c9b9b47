"""Copies of a ledger in other processes of one run: they count what its one writer has charged."""

from typing import Any

from hush.accounting.ledger.ledger import Ledger
from hush.accounting.ledger.state import LedgerState
from hush.core.errors import LedgerError
from hush.core.plan import Plan

Snapshot = tuple[list[bytes], str | None]
"""Lines of a compacted ledger, and why it is void."""


def snapshot_of(ledger: Ledger) -> Snapshot:
    """Everything on a ledger, for `mirror` in another process."""
    state = ledger._journal.state
    return list(state.folded_lines()), state.void


def mirror(ledger: Ledger, snapshot: Snapshot) -> None:
    """Make a ledger in memory a copy of one that another process writes; it takes no charge then.

    Args:
        ledger: one without charges, or a copy already.
        snapshot: of the ledger that is written.
    """
    journal = ledger._journal
    if ledger.path is not None or (ledger.counts and not ledger.mirrored):
        raise LedgerError(
            f"{journal.title} has charges or a file of its own, which a copy of another one would hide. "
            "Pass a new hush.Ledger()."
        )
    state = LedgerState()
    state.read(snapshot[0])
    state.void = snapshot[1]
    journal.state, journal.mirrored = state, True


def follow(ledger: Ledger, plan: Plan, *, run: str, step: int, release: str, **details: Any) -> None:
    """Count a charge that the process which writes the ledger has put on disk.

    Args:
        ledger: a copy.
        plan: of the step.
        run: name of the run.
        step: number of the step in the run.
        release: the released value, or a fingerprint of it.
        details: the other arguments of `Ledger.charge`.
    """
    if not ledger.mirrored:
        raise LedgerError(
            f"{ledger._journal.title} is no copy: a charge is put on it by `charge` alone, which "
            "returns when it is on disk."
        )
    ledger._journal.mirrored = False
    try:
        ledger.charge(plan, run=run, step=step, release=release, **details)
    finally:
        ledger._journal.mirrored = True
