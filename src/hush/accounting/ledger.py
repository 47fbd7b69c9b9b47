"""Privacy ledger: one line for each charge, on disk before the update is used.

A run that resumes from a checkpoint repeats the steps after it with the same randomness. Repeating the
same release is free. Another release under the same noise would reveal the difference of the two, so it
raises. docs/guarantees/ledger.md has the proof.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsIndex, get_args

from hush.accounting.epsilon import compose
from hush.accounting.journal import Journal, LockedFile, chained, head_of, new_header
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import InvalidValue, LedgerError, PrivacyWarning, Unproved, Unsupported
from hush.core.guarantee import (
    DEFAULT_DELTA,
    DELTA,
    RECORD,
    Adjacency,
    Arithmetic,
    Guarantee,
    Neighbours,
    Secrecy,
    advised_delta,
)
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind

_MIN_FOLDED = 1000
"""Fewer lines than this are read in less time than it takes to replace a file."""


class Ledger:
    """Append-only record of all charges; without a path it lives in memory only.

    Args:
        path: The file, created if it does not exist. An empty file raises: its charges were lost.
        read_only: Read the file without locking or repairing it, also while a run is writing to it.

    **Guarantee.** `charge` returns only after the charge is on disk, so an update that is applied
    after it can never be missing from the file. docs/guarantees/ledger.md has the argument.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            "a Ledger, and with it a PrivateStep, cannot be copied or pickled: charges to one copy "
            "would be missing from the other. Copy the model alone and make a new PrivateStep for it "
            "with ledger=step.ledger, or load state_dict() into a new PrivateStep with that ledger."
        )

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self._title = "the ledger in memory" if path is None else f"the ledger {self.path}"
        self._journal = Journal()
        self._file: LockedFile | None = None
        self._writable = not read_only
        self.cut_short = False
        """Whether charges may be missing: the file ends in a torn line and was not repaired."""
        self.mirrored = False
        """Whether this is a copy in memory of the ledger that rank 0 of a process group writes."""
        self._process = os.getpid()
        self._stream_labels = 0
        """Number of labels of random streams handed out so far."""
        if self.path is None:
            self._journal.read([new_header()])
            return
        try:
            if not read_only:
                self._file = LockedFile(self.path, new_header())
            with self.path.open("rb") as file:
                self._journal.read(file)
                file.seek(-1, os.SEEK_END)
                ended = file.read() == b"\n"
            if not ended:
                self._write(b"\n")
            self.cut_short = read_only and bool(self._journal.unexplained)
            if self._journal.unexplained:
                self._append(self._journal.torn_note())
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise LedgerError(
                    f"{self._title} cannot be opened ({error.strerror or error}): without it no charge "
                    "is on record. Pass the path of a file in a folder that you may write to, e.g. "
                    "runs/ledger.jsonl; read_only=True reads an existing ledger."
                ) from error
            if isinstance(error, ValueError) and not isinstance(error, LedgerError):
                raise LedgerError(
                    f"{self._title} is damaged at {error}: charges may be missing, so no epsilon can be "
                    "given. Restore it from a copy: a new ledger does not count the charges of this one."
                ) from None
            raise

    @property
    def counts(self) -> Mapping[Plan, int]:
        """Number of charged steps of each plan."""
        return self._journal.totals()

    @property
    def releases(self) -> Sequence[str]:
        """Fingerprints of each run's releases in order, without those cut short or folded."""
        return [release for run in self._journal.runs.values() for release in run.releases]

    @property
    def dimensions(self) -> Mapping[Plan, int]:
        """Largest number of trained parameters, for each plan with a cost that grows with it."""
        return {self._journal.plans[name]: size for name, size in self._journal.dimensions.items()}

    @property
    def identity(self) -> str:
        """Digest of the first line, which contains a random number: unique to this ledger."""
        return self._journal.identity

    @property
    def head(self) -> str:
        """Digest of the newest line: two ledgers with the same head have the same charges."""
        return self._journal.chain

    @property
    def voided(self) -> str | None:
        """Why the guarantee no longer holds; None while it does."""
        return self._journal.void

    @property
    def adjacency(self) -> Adjacency:
        """Adjacency of every charge on this ledger."""
        return self._journal.adjacency

    @property
    def delta(self) -> float | None:
        """Delta of the newest run's budget; None if none was stored."""
        return self._journal.delta

    def epsilon(
        self,
        delta: float | None = None,
        *,
        group: int = 1,
        neighbours: Neighbours | None = None,
        uncharged: Adjacency | None = None,
    ) -> Guarantee:
        """The (epsilon, delta) guarantee of all charges so far, under all plans together.

        Args:
            delta: Delta of the guarantee; None: the stored one.
            group: Number of units of privacy that change together.
            neighbours: Adjacency relation; None: the charged one.
            uncharged: Adjacency to report before the first charge; None: one record, zero-out.

        Returns:
            The guarantee of the composition.

        Raises:
            LedgerError: The ledger is void, or no delta was passed and none is stored.

        Warns:
            PrivacyWarning: The file ends in a line that was cut short and was opened with
                `read_only=True`: the privacy spent is at least this epsilon.
        """
        self._check_not_void()
        records = max(self._journal.records.values(), default=None)
        chosen = self.delta if delta is None else delta
        if chosen is None:
            advised = DEFAULT_DELTA if records is None else advised_delta(records)
            raise LedgerError(
                f"{self._title} has no delta, and none was passed: epsilon means little without the "
                f"probability that it fails. Pass e.g. delta={advised:g}."
            )
        if self.cut_short:
            warnings.warn(
                f"{self._title} ends in a line that is cut short. A crash leaves such a line, which is "
                "counted; if the file was truncated, charges are missing, and the privacy spent is at "
                "least this epsilon. Check the ledger against the run's checkpoint.",
                PrivacyWarning,
                stacklevel=2,
            )
        stored = self.adjacency if self._journal.counts else uncharged or self.adjacency
        relation = stored.neighbours if neighbours is None else Neighbours(neighbours)
        if relation is Neighbours.ADD_REMOVE is not stored.neighbours:
            raise Unproved(
                "neighbours=add/remove is not the relation that was charged: sums are divided by the "
                "number of slots, which is public here and would reveal one record more or less. Use "
                "zero-out, or run with neighbours=ADD_REMOVE."
            )
        adjacency = replace(stored, group=group, neighbours=relation)
        guarantee = compose(self.counts, chosen, self.dimensions, adjacency)
        return replace(
            guarantee,
            arithmetic="assumed" if self._journal.assumed else guarantee.arithmetic,
            randomness="seeded" if self._journal.seeded else "secret",
            records=records,
        )

    def store_delta(self, delta: float) -> None:
        """Record the delta of a run's budget; the newest one counts.

        Args:
            delta: Delta at which epsilon is reported, chosen independently of the records.
        """
        delta = DELTA["range"].check("delta", delta)
        self._check_writable()
        if delta != self._journal.delta:
            self._append({"delta": delta})

    def stream_label(self) -> bytes:
        """Label of a new run's random stream, distinct among all runs charged to this ledger.

        Empty for the first label of a new ledger. Two runs with one seed would otherwise draw
        the same noise: docs/guarantees/ledger.md, 11.
        """
        lines = self._journal.lines
        first = lines == 1 and not self._stream_labels
        label = b"" if first else b"%d:%d" % (lines, self._stream_labels)
        self._stream_labels += 1
        return label

    def last_step(self, run: str) -> int:
        """Last step charged for a run; 0 if there is none.

        Args:
            run: Name of the run.
        """
        return self._journal.run(run).last

    def digest_at(self, run: str, step: int) -> str | None:
        """Digest of the hash chain just after a charged step; None if it is not on record.

        A checkpoint stores it to verify that a ledger still has all charges up to that step.

        Args:
            run: Name of the run.
            step: Number of the step in the run.
        """
        charges = self._journal.run(run)
        if charges.folded is not None and charges.folded[0] == step:
            return charges.folded[1]
        charge = charges.charge(step)
        return None if charge is None else charge[2]

    def check_charged(self, run: str, steps: int, digest: str | None) -> None:
        """Raise unless all charges up to a checkpoint are here, unchanged since it was written.

        Args:
            run: Name of the checkpoint's run.
            steps: Number of steps in the checkpoint; the ledger may have more, which are repeated.
            digest: `digest_at` of that step when the checkpoint was written.
        """
        last, recorded = self.last_step(run), self.digest_at(run, steps)
        if last < steps:
            reason = (
                f"the checkpoint has taken {steps} steps of run {run} and {self._title} knows of "
                f"{last}: charges are missing"
            )
        elif None not in (recorded, digest) and recorded != digest:
            reason = (
                f"{self._title} is not the one that the checkpoint was charged to: at step {steps} of "
                f"run {run} its digest is {recorded} and was {digest}. A charge may be missing"
            )
        else:
            return
        raise LedgerError(f"{reason}. Use the ledger that was written beside the checkpoint.")

    def counts_repeating(self, plan: Plan, run: str, step: int) -> Mapping[Plan, int]:
        """`counts` without the torn charges that a repeated charge of this step replaces.

        A search for the number of steps within a budget counts such a charge once: ledger.md, 4.

        Args:
            plan: Plan of the repeated step.
            run: Name of the run.
            step: Number of the step in the run.
        """
        self._check_not_void()
        return self._journal.totals(head_of(plan.digest, run, step))

    def check_adjacency(self, adjacency: Adjacency = RECORD) -> None:
        """Raise `LedgerError` unless charges for this adjacency may follow; call it before any draw.

        Args:
            adjacency: Adjacency of the charges to come.
        """
        stored = self._journal.adjacency
        if adjacency == stored:
            return
        if check_kind("adjacency", adjacency, Adjacency).group != 1:
            raise InvalidValue(
                f"adjacency with group={adjacency.group} cannot be charged: a step is charged for one "
                f"unit. Charge group=1; ledger.epsilon(group={adjacency.group}) is the cost of a group.",
                key="adjacency",
            )
        if not self._journal.counts:
            return
        reason = "their costs do not add up to a guarantee for either"
        if replace(adjacency, owners=None) == replace(stored, owners=None):
            reason = "of another table of owners, in which one person may be several users"
        elif (
            isinstance(stored.per_unit, int)
            and isinstance(adjacency.per_unit, int)
            and replace(adjacency, per_unit=stored.per_unit) == stored
        ):
            reason = f"its guarantee names one number of records a step. Pass per_unit={stored.per_unit}"
        raise LedgerError(
            f"{self._title} protects {stored} and this charge is for {adjacency}: {reason}. Charge the "
            "same adjacency, or use a separate ledger, and quote both guarantees."
        )

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
        """Put one step of `plan` on disk; repeating the same release is free.

        Args:
            plan: Plan of the step.
            run: Name of the run, which stands for its randomness: another run draws other noise.
            step: Number of the step in the run; steps are charged one after the other.
            release: The released value, or a fingerprint of it.
            dimension: Number of parameters, needed if the cost grows with it.
            arithmetic: Whether the rounding of sums and noise is part of the proof.
            randomness: Whether the noise is from the operating system or from a given seed.
            records: Number of slots, which is public; delta is compared with it.
            adjacency: Adjacency, the same for all charges on a ledger.

        Raises:
            LedgerError: The step must not be applied.

        **Guarantee.** The charge is on disk when this returns.
        """
        if self.mirrored:
            raise LedgerError(
                "this ledger is a copy of the one that rank 0 writes: a charge of this process alone "
                "would be lost. Charge on rank 0, or use a PrivateStep, which charges for all ranks."
            )
        self._check_writable()
        self._check_not_void()
        for name, value, kind in (("plan", plan, Plan), ("run", run, str), ("release", release, str)):
            if not isinstance(value, kind):
                check_kind(name, value, kind)
        if type(step) is not int or step < 1:
            step = check_count("step", step, "the steps of a run are counted", 1)
        slots = 0 if records is None else records
        if records is not None and (type(slots) is not int or slots < 1):
            slots = check_count("records", records, "slots are counted", 1)
        if arithmetic not in get_args(Arithmetic) or randomness not in get_args(Secrecy):
            raise InvalidValue(
                f"arithmetic={arithmetic!r} must be proved or assumed, and randomness={randomness!r} "
                "secret or seeded: the guarantee names them."
            )
        # the release comes last: a line cut short before it does not depend on it
        digest = plan.digest
        entry: dict[str, Any] = {"charge": digest, "run": run, "step": step}
        if arithmetic == "assumed":
            entry["arithmetic"] = arithmetic
        if randomness == "seeded":
            entry["randomness"] = randomness
        entry["release"] = release
        self.check_adjacency(adjacency)
        journal, charges = self._journal, self._journal.run(run)
        before = charges.charge(step)
        if before is not None and before[:2] == (digest, release):
            return
        if before is not None or not journal.agrees_with_torn(run, step, entry):
            raise LedgerError(
                f"step {step} of run {run} was already released with another value or plan: two "
                "releases under the same noise reveal the records' difference. Resume with the same "
                "data, plan, machine and torch version, or reseed to draw and charge new noise."
            )
        if charges.folded is not None and step <= charges.folded[0]:
            raise LedgerError(
                f"step {step} of run {run} was charged and a later checkpoint was written, up to step "
                f"{charges.folded[0]}: its release is no longer on record, and another one under the "
                "same noise would reveal the records' difference. Resume from the newest checkpoint, or "
                "reseed to draw and charge new noise."
            )
        if charges.last and step != charges.last + 1:
            raise LedgerError(
                f"step {step} of run {run} does not follow step {charges.last}, the last charge: a gap "
                "reads as a lost charge. Charge one step after the other."
            )
        size = 0
        # the growth with the dimension was determined when the plan was stored
        if (digest not in journal.plans or digest in journal.dimensions) and grows_with_dimension(plan):
            if dimension is None:
                raise LedgerError(
                    f"dimension=None leaves out how many parameters are trained, and {plan} costs more "
                    "the more there are: the charge would be a guess. Pass dimension=, their number."
                )
            size = check_count("dimension", dimension, "parameters are counted", 1)
        if adjacency != journal.adjacency:  # before a plan, under which a torn line would be counted
            self._append({"protects": adjacency.to_plain()})
        known = journal.dimensions.get(digest, 0), journal.records.get(digest, 0)
        if digest not in journal.plans or size > known[0] or slots > known[1]:
            self._append(journal.plan_entry(digest, plan, size, slots))
        self._append(entry)

    def snapshot(self) -> list[bytes]:
        """Lines of the compacted ledger, for `mirror` in another process."""
        return list(self._journal.folded_lines())

    def mirror(self, snapshot: Sequence[bytes]) -> None:
        """Become a copy in memory of a ledger that another process writes; `charge` then raises.

        Args:
            snapshot: Snapshot of the written ledger.
        """
        if self.path is not None or (self.counts and not self.mirrored):
            raise LedgerError(
                f"{self._title} has its own charges or file, which a copy of another one would "
                "hide. Pass a new hush.Ledger()."
            )
        self._journal = Journal()
        self._journal.read(snapshot)
        self.mirrored = True

    def follow(self, plan: Plan, **details: Any) -> None:
        """Count a charge that rank 0 has put on disk.

        Args:
            plan: Plan of the step.
            details: Other arguments of `charge`.
        """
        if not self.mirrored:
            raise LedgerError(
                f"{self._title} is no copy: only `charge`, which returns when the charge is on disk, "
                "puts a charge on it."
            )
        self.mirrored = False
        try:
            self.charge(plan, **details)
        finally:
            self.mirrored = True

    def void(self, reason: str) -> None:
        """Record that the guarantee no longer holds: from here on none is given.

        Args:
            reason: Cause, e.g. that the model was moved outside of a private step.
        """
        check_kind("reason", reason, str)
        self._check_writable()
        self._journal.void = self._journal.void or reason  # holds here even if it cannot be written
        self._append({"void": reason})

    def compact(self, run: str, step: int) -> None:
        """Fold all lines into one, without the releases of a run up to a step that is never repeated.

        Call it once a checkpoint of that step is on disk: a resumed run repeats only later ones. Counts,
        plans, other runs and the hash chain stay. A short ledger stays unchanged.

        Args:
            run: Name of the run.
            step: The last step that a resumed run does not repeat.
        """
        charges = self._journal.run(run)
        if not 0 <= charges.last - step <= len(charges.plans) - _MIN_FOLDED:
            return
        if not self._writable or self._journal.void is not None:  # no further charge can follow
            return
        self.check_process()
        charges.fold(step)
        if self._file is not None:
            try:
                self._file.replace(self._journal.folded_lines())
            except BaseException:
                self._writable = False  # memory and file may differ
                raise

    def close(self) -> None:
        """Release the file for other processes."""
        self._writable = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_process(self) -> None:
        """Raise in a fork of the process that opened the ledger, which would draw the same noise."""
        if os.getpid() != self._process:
            raise LedgerError(
                f"{self._title} was opened by process {self._process} and this is a fork of it: both "
                "would count on the same budget and draw the same noise. Charge in the process that "
                "opened it, or give each process a separate ledger and run."
            )

    def _check_writable(self) -> None:
        if not self._writable:
            raise LedgerError(
                f"{self._title} is closed or could not be written: without a charge on record the step "
                "must not be applied. Open it again to continue."
            )
        self.check_process()

    def _check_not_void(self) -> None:
        if self._journal.void is not None:
            raise LedgerError(
                f"{self._title} is void ({self._journal.void}): its charges no longer cover all "
                "releases, so no epsilon can be given. Train a new model on a new ledger."
            )

    def _append(self, entry: dict[str, Any]) -> None:
        """Put one entry on disk, then count it."""
        line, _ = chained(entry, self._journal.chain)
        self._write(line)
        self._journal.read([line])

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.append(line)
        except OSError as error:
            self._writable = False
            raise LedgerError(
                f"the charge could not be written to {self.path} ({error}): a step that is not on "
                "record must not be used, so it was not applied. Make room and resume from the last "
                "checkpoint."
            ) from error
        except BaseException:  # an interrupt: the line may be on disk, and is not counted here
            self._writable, self.cut_short = False, True
            raise


def reported_delta(ledger: Ledger, requested: float | None) -> tuple[float, str]:
    """Delta to report epsilon at, and its origin in words."""
    stored = ledger.delta
    if requested is None and stored is None:
        return DEFAULT_DELTA, f"delta {DEFAULT_DELTA:g} by default: the ledger stores no delta of a run"
    if requested is None or requested == stored:
        assert stored is not None
        return stored, f"delta {stored:g}, as the run was made for"
    own = "" if stored is None else f"; the run was made for delta {stored:g}"
    return requested, f"delta {requested:g}, as asked for{own}"
