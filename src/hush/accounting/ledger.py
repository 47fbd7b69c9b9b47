"""Privacy ledger: an append-only record of charges, written before the update is used.

A resumed run repeats the steps after its checkpoint with the same randomness. An identical release is
not charged again. A different release with the same noise would reveal the difference of the two
releases, so it raises an error. Proof: docs/guarantees/ledger.md.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
"""Smallest number of lines to fold. Reading fewer lines is faster than replacing the file."""


class Ledger:
    """Append-only record of all charges, in a file or in memory.

    Args:
        path: File, created if it does not exist; None for a ledger in memory. An empty file raises an
            error, because its charges were lost.
        read_only: Whether to read the file without locking or repairing it, even if a run writes to it.
            If whole lines are missing at its end, this is not detected; `hush account` with a run's
            folder detects it by comparing the ledger with the checkpoint.

    **Guarantee.** `charge` returns after the charge is on disk, so the file contains the charge of every
    applied update. Proof: docs/guarantees/ledger.md.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            "a Ledger, and with it a PrivateStep, cannot be copied or pickled: charges to one copy "
            "would be missing from the other. Copy only the model and create a new PrivateStep for it "
            "with ledger=step.ledger, or load state_dict() into a new PrivateStep with that ledger."
        )

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self._title = "the ledger in memory" if path is None else f"the ledger {self.path}"
        self._journal = Journal()
        self._file: LockedFile | None = None
        self._writable = not read_only
        self.cut_short = False
        """Whether charges may be missing, because the file ends in a torn line and was not repaired."""
        self.mirrored = False
        """Whether this is an in-memory copy of the ledger that rank 0 of a process group writes."""
        self._process = os.getpid()
        self._stream_labels = 0
        """Number of random stream labels in use."""
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
                    f"{self._title} cannot be opened ({error.strerror or error}): charges "
                    "could not be recorded. Pass a path in a writable folder, e.g. runs/ledger.jsonl; "
                    "read_only=True reads an existing ledger."
                ) from error
            if isinstance(error, ValueError) and not isinstance(error, LedgerError):
                raise LedgerError(
                    f"{self._title} is damaged at {error}: charges may be missing, so epsilon is "
                    "unknown. Restore it from a copy: a new ledger does not count these charges."
                ) from None
            raise

    @property
    def accounted(self) -> Mapping[Plan, int]:
        """`counts` for the accountants: one less for a period that may not have ended.

        Its cost is that of the whole period, and the lower bound is dropped.
        """
        counts = self.counts
        if self._journal.periods_ended:
            return counts
        return {plan: count - (plan.sampling.period > 1) for plan, count in counts.items()}

    @property
    def counts(self) -> Mapping[Plan, int]:
        """Number of charged steps of each plan, with the planned steps of stopped runs.

        Steps of a sampling with a `period` are counted in whole periods.
        """
        return self._journal.totals()

    @property
    def runs(self) -> int:
        """Number of runs with charges."""
        return len(self._journal.runs)

    @property
    def releases(self) -> Sequence[str]:
        """Fingerprints of the releases of each run in order, without torn or folded releases."""
        return [release for run in self._journal.runs.values() for release in run.releases]

    @property
    def dimensions(self) -> Mapping[Plan, int]:
        """Largest number of trained parameters of each plan, if its cost depends on it."""
        return {self._journal.plans[name]: size for name, size in self._journal.dimensions.items()}

    @property
    def identity(self) -> str:
        """Unique identifier of this ledger: the digest of the first line, which has a random number."""
        return self._journal.identity

    @property
    def head(self) -> str:
        """Digest of the newest line. Two ledgers with the same head have the same charges."""
        return self._journal.chain

    @property
    def voided(self) -> str | None:
        """Reason why the guarantee is no longer valid; None if it is valid."""
        return self._journal.void

    @property
    def adjacency(self) -> Adjacency:
        """Adjacency of all charges on this ledger."""
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
        """The (epsilon, delta) guarantee of all charges so far, composed over all plans.

        Args:
            delta: Delta of the guarantee; by default the stored delta.
            group: Group size, for group privacy.
            neighbours: Adjacency relation; by default that of the charges.
            uncharged: Adjacency to report before the first charge; by default one record, zero-out.

        Returns:
            The guarantee of the composition.

        Raises:
            LedgerError: If the ledger is void, or no delta was passed and none is stored.

        Warns:
            PrivacyWarning: If the last line is incomplete and the file was opened with `read_only=True`,
                because charges may be missing.
        """
        self._check_not_void()
        records = max(self._journal.records.values(), default=None)
        chosen = self.delta if delta is None else delta
        if chosen is None:
            advised = DEFAULT_DELTA if records is None else advised_delta(records)
            raise LedgerError(
                f"{self._title} has no delta, and none was passed: epsilon needs a failure "
                f"probability. Pass e.g. delta={advised:g}."
            )
        if self.cut_short:
            warnings.warn(
                f"{self._title} ends in an incomplete line. After a crash, that line is counted as a "
                "charge. If the file was truncated, charges are missing and the true epsilon is larger. "
                "Compare the ledger with the run's checkpoint.",
                PrivacyWarning,
                stacklevel=2,
            )
        stored = self.adjacency if self._journal.counts else uncharged or self.adjacency
        relation = stored.neighbours if neighbours is None else Neighbours(neighbours)
        if relation is Neighbours.ADD_REMOVE is not stored.neighbours:
            raise Unproved(
                "neighbours=add/remove is not the charged relation: sums are divided by the number of "
                "slots, which is public here and would reveal an added or removed record. Use "
                "zero-out, or run with neighbours=ADD_REMOVE."
            )
        adjacency = replace(stored, group=group, neighbours=relation)
        guarantee = compose(self.accounted, chosen, self.dimensions, adjacency)
        return replace(
            guarantee,
            arithmetic="assumed" if self._journal.assumed else guarantee.arithmetic,
            randomness="seeded" if self._journal.seeded else "secret",
            records=records,
        )

    def store_delta(self, delta: float) -> None:
        """Store the delta of a run's budget, which replaces an earlier delta.

        Args:
            delta: Delta for reports, chosen independently of the records.
        """
        delta = DELTA["range"].check("delta", delta)
        self._check_writable()
        if delta != self._journal.delta:
            self._append({"delta": delta})

    def charge_planned(self, plan: Plan, run: str, last: int) -> None:
        """Charge all planned steps of a run that stops early because of its results.

        Later steps of the run are covered by this charge: docs/guarantees/ledger.md, section 13.

        Args:
            plan: Plan of the run's charged steps.
            run: Name of the run.
            last: Number of the last planned step, fixed before the run.
        """
        if last > self._journal.run(run).last:
            self._check_writable()
            self._append({"planned": plan.digest, "run": run, "last": last})

    def unused(self, run: str) -> int:
        """Number of charged steps that a run has not taken: in its period, or by `charge_planned`.

        Args:
            run: Name of the run.
        """
        return self._journal.unused(run)

    def stream_label(self) -> bytes:
        """New label for a run's random stream, unique among the runs on this ledger.

        Without labels, two runs with the same seed would draw the same noise: docs/guarantees/ledger.md,
        section 11. The first label of a new ledger is empty.
        """
        lines = self._journal.lines
        first = lines == 1 and not self._stream_labels
        label = b"" if first else b"%d:%d" % (lines, self._stream_labels)
        self._stream_labels += 1
        return label

    def last_step(self, run: str) -> int:
        """Last charged step of a run; 0 if there is none.

        Args:
            run: Name of the run.
        """
        return self._journal.run(run).last

    def digest_at(self, run: str, step: int) -> str | None:
        """Digest of the hash chain after a charged step; None if unknown.

        A checkpoint stores this digest to verify later that the ledger has all charges up to the step.

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
        """Raise `LedgerError` unless the ledger has all charges up to a checkpoint, unchanged.

        Args:
            run: Name of the checkpoint's run.
            steps: Number of steps in the checkpoint. A resumed run repeats later steps of the ledger.
            digest: `digest_at` of this step when the checkpoint was written.
        """
        last, recorded = self.last_step(run), self.digest_at(run, steps)
        if last < steps:
            reason = (
                f"the checkpoint has {steps} steps of run {run}, and {self._title} has {last}: charges "
                "are missing"
            )
        elif None not in (recorded, digest) and recorded != digest:
            reason = (
                f"{self._title} does not belong to the checkpoint: at step {steps} of run {run} its "
                f"digest is {recorded} instead of {digest}. A charge may be missing"
            )
        else:
            return
        raise LedgerError(f"{reason}. Use the ledger that was written beside the checkpoint.")

    def counts_repeating(self, plan: Plan, run: str, step: int) -> Mapping[Plan, int]:
        """`counts` without the torn charges that a repetition of this step replaces.

        The search for the number of steps within a budget then counts such a charge once:
        docs/guarantees/ledger.md, section 4.

        Args:
            plan: Plan of the repeated step.
            run: Name of the run.
            step: Number of the step in the run.
        """
        self._check_not_void()
        return self._journal.totals(head_of(plan.digest, run, step))

    def check_adjacency(self, adjacency: Adjacency = RECORD) -> None:
        """Raise `LedgerError` unless the ledger accepts charges for this adjacency.

        Call this before the first draw.

        Args:
            adjacency: Adjacency of future charges.
        """
        stored = self._journal.adjacency
        if adjacency == stored:
            return
        if check_kind("adjacency", adjacency, Adjacency).group != 1:
            raise InvalidValue(
                f"adjacency with group={adjacency.group} cannot be charged: charges are for "
                f"group=1. Use ledger.epsilon(group={adjacency.group}) for the privacy cost of a group.",
                key="adjacency",
            )
        if not self._journal.counts:
            return
        reason = "the two costs do not add up to one guarantee"
        if replace(adjacency, owners=None) == replace(stored, owners=None):
            reason = "the record-to-user maps differ, so one person may be several users"
        elif (
            isinstance(stored.per_unit, int)
            and isinstance(adjacency.per_unit, int)
            and replace(adjacency, per_unit=stored.per_unit) == stored
        ):
            reason = f"a ledger has one per_unit. Pass per_unit={stored.per_unit}"
        raise LedgerError(
            f"{self._title} is for {stored}, and this charge is for {adjacency}: {reason}. Use the "
            "same adjacency, or a separate ledger, and report both guarantees."
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
        """Charge one step of `plan`. An identical release of the same step is charged only once.

        Args:
            plan: Plan of the step.
            run: Name of the run. Different runs draw different noise.
            step: Number of the step in the run. Steps must be charged consecutively.
            release: Released value or its fingerprint.
            dimension: Number of parameters; required if the privacy cost grows with it.
            arithmetic: `proved` if the proof covers the rounding of sums and noise, otherwise `assumed`.
            randomness: `secret`, or `seeded` for noise from a given seed.
            records: Public number of slots, for a warning about delta.
            adjacency: Adjacency, which must be the same for all charges on a ledger.

        Raises:
            LedgerError: If the charge was not recorded. Then the step must not be applied.

        **Guarantee.** The charge is on disk when this method returns.
        """
        if self.mirrored:
            raise LedgerError(
                "this ledger is a copy of the ledger of rank 0: a charge of this process alone would be "
                "lost. Charge on rank 0, or use a PrivateStep, which charges for all ranks."
            )
        self._check_writable()
        self._check_not_void()
        for name, value, kind in (("plan", plan, Plan), ("run", run, str), ("release", release, str)):
            if not isinstance(value, kind):
                check_kind(name, value, kind)
        if type(step) is not int or step < 1:
            step = check_count("step", step, "steps are numbered from 1", 1)
        slots = 0 if records is None else records
        if records is not None and (type(slots) is not int or slots < 1):
            slots = check_count("records", records, "it is the number of slots", 1)
        if arithmetic not in get_args(Arithmetic) or randomness not in get_args(Secrecy):
            raise InvalidValue(
                f"arithmetic={arithmetic!r} must be proved or assumed, and randomness={randomness!r} "
                "secret or seeded: both are part of the guarantee."
            )
        # the release comes last, so a line that is torn before it does not depend on the records
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
                "data, plan, machine and torch version, or load the checkpoint into a new step and "
                "call reseed() before its first batch, to draw and charge it anew."
            )
        if charges.folded is not None and step <= charges.folded[0]:
            raise LedgerError(
                f"step {step} of run {run} precedes the newest checkpoint, at step {charges.folded[0]}: "
                "its release is no longer on the ledger, and a different one under the same noise would "
                "reveal the records' difference. Resume from the newest checkpoint, or call reseed() "
                "before the first batch, to draw and charge it anew."
            )
        if charges.last and step != charges.last + 1:
            raise LedgerError(
                f"step {step} of run {run} does not follow the last charge, step {charges.last}: a gap "
                "means a lost charge. Charge consecutive steps."
            )
        size = 0
        # dimension dependence was determined when the plan was stored
        if (digest not in journal.plans or digest in journal.dimensions) and grows_with_dimension(plan):
            if dimension is None:
                raise LedgerError(
                    f"dimension=None is not supported, because the cost of {plan} depends on the number "
                    "of trained parameters. Pass dimension=, the number of parameters."
                )
            size = check_count("dimension", dimension, "it is the number of parameters", 1)
        if (
            adjacency != journal.adjacency
        ):  # written before the plan, because a torn line may be counted for a stored plan
            self._append({"protects": adjacency.to_plain()})
        known = journal.dimensions.get(digest, 0), journal.records.get(digest, 0)
        if digest not in journal.plans or size > known[0] or slots > known[1]:
            self._append(journal.plan_entry(digest, plan, size, slots))
        self._append(entry)

    def snapshot(self) -> list[bytes]:
        """Lines of the compacted ledger, for `mirror` in another process."""
        return list(self._journal.folded_lines())

    def mirror(self, snapshot: Sequence[bytes]) -> None:
        """Turn this ledger into an in-memory copy of another process's ledger; `charge` then raises.

        Args:
            snapshot: Snapshot of the written ledger.
        """
        if self.path is not None or (self.counts and not self.mirrored):
            raise LedgerError(
                f"{self._title} has charges or a file of its own, which would be lost. Pass a new "
                "hush.Ledger()."
            )
        self._journal = Journal()
        self._journal.read(snapshot)
        self.mirrored = True

    def follow(self, plan: Plan, **details: Any) -> None:
        """Count a charge that rank 0 has written.

        Args:
            plan: Plan of the step.
            details: Other arguments of `charge`.
        """
        if not self.mirrored:
            raise LedgerError(
                f"{self._title} is not a copy of another ledger. Use `charge`, which writes the charge "
                "to disk."
            )
        self.mirrored = False
        try:
            self.charge(plan, **details)
        finally:
            self.mirrored = True

    def void(self, reason: str) -> None:
        """Record that the guarantee is no longer valid; `epsilon` then raises an error.

        Args:
            reason: Cause, e.g. that the model was changed outside of a private step.
        """
        check_kind("reason", reason, str)
        self._check_writable()
        self._journal.void = (
            self._journal.void or reason
        )  # void in memory even if the line cannot be written
        self._append({"void": reason})

    def compact(self, run: str, step: int) -> None:
        """Fold all lines into one line, and drop the releases of a run up to a checkpointed step.

        Call this after a checkpoint of the step is on disk, because a resumed run only repeats later
        steps. Counts, plans, other runs and the hash chain are preserved. Short ledgers are unchanged.

        Args:
            run: Name of the run.
            step: Step of the checkpoint.
        """
        charges = self._journal.run(run)
        if not 0 <= charges.last - step <= len(charges.plans) - _MIN_FOLDED:
            return
        if not self._writable or self._journal.void is not None:  # no further charges
            return
        self.check_process()
        charges.fold(step)
        if self._file is not None:
            try:
                self._file.replace(self._journal.folded_lines())
            except BaseException:
                self._writable = False  # the ledger in memory and the file may differ
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
        """Raise `LedgerError` in a forked process, which would draw the same noise."""
        if os.getpid() != self._process:
            raise LedgerError(
                f"{self._title} was opened by process {self._process}, and this is a fork of it: both "
                "would spend the same budget and draw the same noise. Charge in the process that opened "
                "it, or use a separate ledger and run in each process."
            )

    def _check_writable(self) -> None:
        if not self._writable:
            raise LedgerError(
                f"{self._title} is closed or could not be written: without a recorded charge the step "
                "must not be applied. Open it again to continue."
            )
        self.check_process()

    def _check_not_void(self) -> None:
        if self._journal.void is not None:
            raise LedgerError(
                f"{self._title} is void ({self._journal.void}): its charges do not cover all "
                "releases, so epsilon is unknown. Train a new model with a new ledger."
            )

    def _append(self, entry: dict[str, Any]) -> None:
        """Write one entry to disk, then count it."""
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
                f"the charge could not be written to {self.path} ({error}): a step without a "
                "recorded charge must not be used, so it was not applied. Free space and resume from "
                "the last checkpoint."
            ) from error
        except BaseException:  # after an interrupt, the line may be on disk without being counted
            self._writable, self.cut_short = False, True
            raise


LedgerOrPath = Ledger | str | os.PathLike[str]


def opened(ledger: LedgerOrPath | None) -> AbstractContextManager[Ledger]:
    """Context manager for a ledger; a ledger that it opens from a path (None: in memory) is closed."""
    if isinstance(ledger, str | os.PathLike | None):
        return Ledger(ledger)
    return nullcontext(check_kind("ledger", ledger, Ledger))


def reported_delta(ledger: Ledger, requested: float | None) -> tuple[float, str]:
    """Delta for a report, and a description of its origin."""
    stored = ledger.delta
    if requested is None and stored is None:
        return DEFAULT_DELTA, f"delta {DEFAULT_DELTA:g} by default: the ledger has no delta"
    if requested is None or requested == stored:
        assert stored is not None
        return stored, f"delta {stored:g}, the run's own"
    own = "" if stored is None else f"; the run's own is {stored:g}"
    return requested, f"delta {requested:g}, as requested{own}"
