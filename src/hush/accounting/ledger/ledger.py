"""The privacy ledger: one line for each charge, on disk before the update is used.

A run that resumes from a checkpoint repeats the steps after it with the same randomness: the same
release costs nothing new, and another release under the same noise would reveal the difference of the
two, so it is refused.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Self

from hush.accounting.epsilon import compose
from hush.accounting.ledger import checks
from hush.accounting.ledger.journal import Journal
from hush.accounting.ledger.run_charges import another_release
from hush.accounting.ledger.state import LedgerState, head_of
from hush.core.errors import LedgerError
from hush.core.guarantee import DELTA, RECORD, Adjacency, Arithmetic, Guarantee, Neighbours, Secrecy
from hush.core.plan import Plan
from hush.core.value import SingleOwner, as_path, check_count, check_kind

_MIN_FOLDED = 1000
"""Fewer lines than this are read in less time than it takes to replace a file."""


class Ledger(SingleOwner):
    """Append-only record of all charges; without a path it lives in memory only.

    Args:
        path: The file, which is created if there is none. An empty file is refused: charges were lost.
        read_only: Read the file without locking or mending it, also while a run is writing to it.

    **Guarantee.** `charge` returns only after the charge is on disk, so an update that is applied
    after it can never be missing from the file. docs/guarantees/ledger.md has the argument.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self.path = None if path is None else as_path("path", path)
        if self.path is not None and self.path.is_dir():
            raise LedgerError(
                f"{self.path} is a folder, and a ledger is a file: charges are appended to it. Pass "
                f"e.g. {self.path / 'ledger.jsonl'}."
            )
        self._stream_labels = 0
        """How many labels of random streams were handed out."""
        self._journal = Journal(self.path, read_only)

    @property
    def _state(self) -> LedgerState:
        return self._journal.state

    @property
    def counts(self) -> Mapping[Plan, int]:
        """Number of charged steps of each plan."""
        return self._by_plan({})

    @property
    def sequence(self) -> Sequence[tuple[Plan, int]]:
        """Plans in the order of their charges, each with its number of charges in a row.

        Charges whose order is not on record (folded, or cut short) come first. Runs that took turns on
        one ledger come one after the other.
        """
        ordered = [digest for run in self._state.runs.values() for digest in run.plans]
        first = Counter(self._state.counts)
        first.subtract(ordered)
        lengths = [(digest, count) for digest, count in first.items() if count > 0]
        lengths += [(digest, len(list(group))) for digest, group in groupby(ordered)]
        return [(self._state.plans[digest], count) for digest, count in lengths]

    @property
    def releases(self) -> Sequence[str]:
        """Fingerprints of each run's releases, in order; not those that were cut short or folded."""
        return [release for run in self._state.runs.values() for release in run.releases]

    @property
    def dimensions(self) -> Mapping[Plan, int]:
        """Largest number of parameters trained under each plan whose cost grows with it."""
        return {self._state.plans[digest]: size for digest, size in self._state.dimensions.items()}

    @property
    def identity(self) -> str:
        """The digest of the first line, which holds a random number: no two ledgers share it."""
        return self._state.identity

    @property
    def head(self) -> str:
        """Digest of the newest line: two ledgers that share it hold the same charges."""
        return self._state.chain

    @property
    def voided(self) -> str | None:
        """Why the guarantee no longer holds; None while it does."""
        return self._state.void

    @property
    def adjacency(self) -> Adjacency:
        """What neighbours differ in, for every charge on this ledger."""
        return self._state.adjacency

    @property
    def delta(self) -> float | None:
        """Delta of the budget that the newest run on this ledger keeps; None if none was stored."""
        return self._state.delta

    def epsilon(
        self,
        delta: float | None = None,
        *,
        group: int = 1,
        neighbours: Neighbours | None = None,
        uncharged: Adjacency | None = None,
    ) -> Guarantee:
        """The (epsilon, delta) guarantee of everything charged so far, under all plans together.

        Args:
            delta: Delta of the guarantee; None: the one that was stored.
            group: Number of units of privacy that change together.
            neighbours: Adjacency relation; None: the one that the run was charged for.
            uncharged: What neighbours differ in while nothing is charged; None: a record, zero-out.

        Returns:
            The guarantee of the composition.

        Raises:
            LedgerError: The ledger was declared void, or no delta was passed and none is stored.
        """
        self._journal.check_not_void()
        records = max(self._state.records.values(), default=None)
        chosen = checks.delta_or_stored(delta, self.delta, records, self._journal.title)
        stored = self.adjacency if self._state.counts else uncharged or self.adjacency
        adjacency = checks.adjacency_or_stored(group, neighbours, stored, records)
        guarantee = compose(self.counts, chosen, self.dimensions, adjacency)
        return replace(
            guarantee,
            arithmetic="assumed" if self._state.assumed else guarantee.arithmetic,
            randomness="seeded" if self._state.seeded else "secret",
            records=records,
        )

    def store_delta(self, delta: float) -> None:
        """Put the delta of a run's budget on record: nothing is charged, and the last one counts.

        Args:
            delta: Delta that epsilon is answered at, chosen without looking at the records.
        """
        delta = DELTA["range"].check("delta", delta)
        self._journal.check_writable()
        if delta != self._state.delta:
            self._journal.append({"delta": delta})

    def stream_label(self) -> bytes:
        """Label of a new run's random stream, distinct among all runs charged to this ledger.

        Empty for the first label of a new ledger. Two runs with one seed would otherwise draw
        the same noise: docs/guarantees/ledger.md, 11.
        """
        lines = self._state.lines + (self.path is None)  # the first line of a file is its name
        first = lines <= 1 and not self._stream_labels
        label = b"" if first else b"%d:%d" % (lines, self._stream_labels)
        self._stream_labels += 1
        return label

    def last_step(self, run: str) -> int:
        """The last step charged for a run; 0 if there is none.

        Args:
            run: Name of the run, as charged.
        """
        return self._state.runs[run].last if run in self._state.runs else 0

    def digest_at(self, run: str, step: int) -> str | None:
        """Digest of the hash chain just after a step was charged; None if not, or no longer, on record.

        A checkpoint that stores it can tell whether a ledger still holds all charges up to that step.

        Args:
            run: Name of the run, as charged.
            step: Number of the step in the run.
        """
        return self._state.runs[run].digest_at(step) if run in self._state.runs else None

    def check_charged(self, run: str, steps: int, digest: str | None) -> None:
        """Raise unless all charges up to a checkpoint are here, as they were when it was written.

        Args:
            run: The checkpoint's run.
            steps: How many steps it has taken; more on the ledger are fine, as they are repeated.
            digest: `digest_at` of that step when the checkpoint was written.
        """
        recorded = self.digest_at(run, steps)
        checks.check_charges(self._journal.title, run, steps, self.last_step(run), recorded, digest)

    def counts_repeating(self, plan: Plan, run: str, step: int) -> Mapping[Plan, int]:
        """`counts` without the torn charges that a repeated charge of this step replaces.

        A search for the steps that a budget allows counts such a charge once: ledger.md, 4.

        Args:
            plan: Plan of the repeated step.
            run: Name of the run, as charged.
            step: Number of the step in the run.
        """
        self._journal.check_not_void()
        return self._by_plan(self._state.replaced_torn(head_of(plan.digest, run, step)))

    def check_adjacency(self, adjacency: Adjacency = RECORD) -> None:
        """Raise `LedgerError` unless charges for these neighbours may follow: before anything is drawn.

        Args:
            adjacency: What neighbours differ in.
        """
        stored = self._state.adjacency if self._state.counts else None
        checks.check_adjacency(adjacency, stored, self._journal.title)

    def charge(
        self,
        plan: Plan,
        *,
        run: str,
        step: int,
        release: str,
        dimension: int | None = None,
        arithmetic: Arithmetic = "proved",
        randomness: Secrecy = "secret",
        records: int | None = None,
        adjacency: Adjacency = RECORD,
    ) -> None:
        """Put one step of `plan` on disk; the very same release again costs nothing.

        Args:
            plan: Plan of the step.
            run: Name of the run, which stands for its randomness: another run draws other noise.
            step: Number of the step in the run; steps are charged one after the other.
            release: The released value, or a fingerprint of it.
            dimension: Number of parameters, needed where the cost grows with it.
            arithmetic: Whether the rounding of sums and noise is part of the proof.
            randomness: Whether the noise is from the operating system or from a given seed.
            records: Number of slots, which is public; delta is compared with it.
            adjacency: What neighbours differ in, the same for all charges on a ledger.

        Raises:
            LedgerError: The step must not be applied.

        **Guarantee.** The charge is on disk when this returns.
        """
        if self.mirrored:
            raise LedgerError(
                "this ledger is a copy of the one that rank 0 writes: a release that only this process "
                "has would be charged nowhere. Release and charge it on rank 0 alone, or by a "
                "PrivateStep, which charges for all ranks."
            )
        self._journal.check_writable()
        self._journal.check_not_void()
        check_kind("plan", plan, Plan)
        check_kind("run", run, str)
        check_kind("release", release, str)
        step = check_count("step", step, "the steps of a run are counted", 1)
        checks.check_choice("arithmetic", arithmetic, "proved", "assumed")
        checks.check_choice("randomness", randomness, "secret", "seeded")
        slots = 0 if records is None else check_count("records", records, "slots are counted", 1)
        self.check_adjacency(adjacency)
        digest = plan.digest
        if run in self._state.runs and self._state.runs[run].repeats(run, digest, step, release):
            return
        # the release comes last: a line cut short before it discloses nothing of it
        notes: dict[str, str] = {} if arithmetic == "proved" else {"arithmetic": arithmetic}
        notes |= {} if randomness == "secret" else {"randomness": randomness}
        entry = {"charge": digest, "run": run, "step": step, **notes, "release": release}
        if not self._state.fits_torn(run, step, entry):
            raise another_release(run, step)
        # that a plan's cost does not grow was looked into when it was stored
        bounded = digest in self._state.plans and digest not in self._state.dimensions
        size = 0 if bounded else checks.dimension_to_store(plan, dimension)
        if adjacency != self._state.adjacency:  # before a plan, under which a torn line would be counted
            self._journal.append(self._state.adjacency_entry(adjacency))
        known = self._state.dimensions.get(digest, 0), self._state.records.get(digest, 0)
        if digest not in self._state.plans or size > known[0] or slots > known[1]:
            self._journal.append(self._state.plan_entry(digest, plan, size, slots))
        self._journal.append(entry)

    def check_process(self) -> None:
        """Raise in a fork of the process that opened it, where the same noise would be drawn again."""
        self._journal.check_process()

    @property
    def mirrored(self) -> bool:
        """Whether this is a copy in memory of the ledger that rank 0 of a process group writes."""
        return self._journal.mirrored

    def void(self, reason: str) -> None:
        """Put on record that the guarantee no longer holds: from here on none is given.

        Args:
            reason: What happened, e.g. that the model was moved outside of a private step.
        """
        check_kind("reason", reason, str)
        self._journal.check_writable()
        self._state.void = self._state.void or reason  # holds here even if it cannot be written
        self._journal.append({"void": reason})

    def compact(self, run: str, step: int) -> None:
        """Fold all lines into one, without the releases of a run up to a step that is never repeated.

        Called once a checkpoint of that step is on disk: a resumed run repeats only later ones. Counts,
        plans, other runs and the hash chain stay. A few lines are left as they are.

        Args:
            run: Name of the run, as charged.
            step: The last step whose release need not be compared again.
        """
        charges = self._state.runs.get(run)
        index = None if charges is None else charges.index(step)
        if index is None or index + 1 < _MIN_FOLDED:
            return
        if not self._journal.writable or self._state.void is not None:  # no further charge can follow
            return
        self._journal.check_writable()
        self._journal.fold(run, step)

    def close(self) -> None:
        """Release the file, so that another process may open it."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _by_plan(self, without: Mapping[str, int]) -> dict[Plan, int]:
        counts = {digest: count - without.get(digest, 0) for digest, count in self._state.counts.items()}
        return {self._state.plans[digest]: count for digest, count in counts.items() if count}
