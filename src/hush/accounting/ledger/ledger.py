"""The ledger: an append-only file with one line per charge, on disk before the update is used.

`ledger_state.py` says what the lines are. A run that resumes from a checkpoint repeats the steps after
it with the same randomness: the same release costs nothing new, and another release under the same
noise would reveal the difference of the two, so it is refused.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hush.accounting.epsilon import compose
from hush.accounting.ledger.hash_chain import chained, text_of
from hush.accounting.ledger.locked_file import LockedFile
from hush.accounting.ledger.state import Damaged, LedgerState, head_of
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import InvalidValue, LedgerError
from hush.core.guarantee import Arithmetic, Guarantee, Secrecy
from hush.core.plan import Plan
from hush.core.ranges import as_path, check_count, check_kind
from hush.core.value import SingleOwner

_WORTH_FOLDING = 1000
"""Fewer lines than this are read in less time than it takes to replace a file."""


class Ledger(SingleOwner):
    """Append-only record of all charges; without a path it lives in memory only.

    Args:
        path: the file, which is created if there is none. An empty file is refused: charges were lost.
        read_only: look at the file without locking or mending it, also while a run is writing to it.

    **Guarantee.** `charge` returns only after the charge is on disk, so an update that is applied
    after it can never be missing from the file. docs/guarantees/ledger.md has the argument.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self._file: LockedFile | None = None
        self._usable = not read_only
        self._process = os.getpid()
        self._state = LedgerState()
        self._streams = 0
        """How many labels of random streams were asked for."""
        self.path = None if path is None else as_path("path", path)
        if self.path is None:
            return
        if not read_only:
            self._file = LockedFile(self.path, self._state.header)
        try:
            self._read(self.path)
        except BaseException:
            self.close()
            raise

    @property
    def counts(self) -> Mapping[Plan, int]:
        """How many steps of each plan have been charged."""
        return self._by_plan({})

    @property
    def releases(self) -> Sequence[str]:
        """The releases of each run's charges, in order; not those that were cut short or folded."""
        return [release for run in self._state.runs.values() for release in run.releases]

    @property
    def dimensions(self) -> Mapping[Plan, int]:
        """The most parameters trained under each plan whose cost grows with their number."""
        return {self._state.plans[digest]: size for digest, size in self._state.dimensions.items()}

    @property
    def identity(self) -> str:
        """The digest of the first line, which holds a random number: no two ledgers share it."""
        return self._state.identity

    @property
    def voided(self) -> str | None:
        """Why the guarantee no longer holds; None while it does."""
        return self._state.void

    def epsilon(self, delta: float) -> Guarantee:
        """The guarantee for everything charged so far, under all plans together.

        Args:
            delta: the probability that the bound on the privacy loss may fail.

        Raises:
            LedgerError: the ledger was declared void.
        """
        self._check_not_void()
        guarantee = compose(self.counts, delta, self.dimensions)
        return replace(
            guarantee,
            arithmetic="assumed" if self._state.assumed else guarantee.arithmetic,
            randomness="seeded" if self._state.seeded else "secret",
            records=max(self._state.records.values(), default=None),
        )

    def stream_label(self) -> bytes:
        """Label of a new run's random stream, unlike that of every other run charged to this ledger.

        Empty for the first one asked for on a new ledger. Two runs with one seed would otherwise draw
        the same noise: docs/guarantees/ledger.md, 11.
        """
        lines = self._state.lines + (self.path is None)  # the first line of a file is its name
        label = b"" if lines <= 1 and not self._streams else b"%d:%d" % (lines, self._streams)
        self._streams += 1
        return label

    def last_step(self, run: str) -> int:
        """The last step charged for a run, 0 if there is none."""
        return self._state.runs[run].last if run in self._state.runs else 0

    def digest_at(self, run: str, step: int) -> str | None:
        """The running digest just after a step was charged; None if that is not, or no longer, known.

        A checkpoint that keeps it can tell whether a ledger still holds all charges up to that step.
        """
        known = self._state.runs.get(run)
        if known is None:
            return None
        if known.folded is not None and known.folded[0] == step:
            return known.folded[1]
        index = known.kept(step)
        return None if index is None else known.digest(index)

    def check_charged(self, run: str, steps: int, digest: str | None) -> None:
        """Raise unless all charges up to a checkpoint are here, as they were when it was written.

        Args:
            run: the checkpoint's run.
            steps: how many steps it has taken; more on the ledger are fine, as they are repeated.
            digest: what `digest_at` gave then.
        """
        if self.last_step(run) < steps:
            raise LedgerError(
                f"the checkpoint has taken {steps} steps of run {run} and the ledger {self.path} knows "
                f"of {self.last_step(run)}: charges are missing. Use the ledger that was written beside "
                "the checkpoint."
            )
        known = self.digest_at(run, steps)
        if known is not None and digest is not None and known != digest:
            raise LedgerError(
                f"the ledger {self.path} is not the one that the checkpoint was charged to: at step "
                f"{steps} of run {run} its digest is {known} and was {digest}. A charge may be missing. "
                "Use the ledger that was written beside the checkpoint."
            )

    def counts_repeating(self, plan: Plan, run: str, step: int) -> Mapping[Plan, int]:
        """The counts without charges cut short that a charge of this step will stand for.

        Whoever plans how many steps a budget allows counts such a charge once: ledger.md, 4.
        """
        self._check_not_void()
        return self._by_plan(self._state.settled(head_of(plan.digest, run, step)))

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
    ) -> None:
        """Put one step of `plan` on disk; the very same release again costs nothing.

        Args:
            plan: what is charged.
            run: a name that stands for the randomness: another run draws other noise.
            step: which step of the run; they are charged one after the other.
            release: what is released, or a fingerprint of it.
            dimension: the number of parameters, asked for where the cost grows with it.
            arithmetic: whether the rounding of sums and noise is part of the proof.
            randomness: whether the noise is from the operating system or from a seed that was given.
            records: the number of slots, which is public: what a delta is held against.

        Raises:
            LedgerError: the step must not be applied.
        """
        self._check_usable()
        self._check_not_void()
        check_kind("plan", plan, Plan)
        check_kind("run", run, str)
        check_kind("release", release, str)
        step = check_count("step", step, "the steps of a run are counted", 1)
        if arithmetic not in ("proved", "assumed"):
            raise InvalidValue(
                f'arithmetic={arithmetic!r} must be "proved" or "assumed": a guarantee says which.'
            )
        if randomness not in ("secret", "seeded"):
            raise InvalidValue(
                f'randomness={randomness!r} must be "secret" or "seeded": a guarantee says which.'
            )
        slots = 0 if records is None else check_count("records", records, "slots are counted", 1)
        digest = plan.digest
        if self._repeated(digest, run, step, release):
            return
        # the release comes last: a line cut short before it discloses nothing of it
        notes: dict[str, str] = {} if arithmetic == "proved" else {"arithmetic": arithmetic}
        notes |= {} if randomness == "secret" else {"randomness": randomness}
        entry = {"charge": digest, "run": run, "step": step, **notes, "release": release}
        if not self._state.fits_torn(run, step, text_of(entry)):
            raise self._another_release(run, step)
        size = self._size(plan, dimension)
        if (
            digest not in self._state.plans
            or size > self._state.dimensions.get(digest, 0)
            or slots > self._state.records.get(digest, 0)
        ):
            self._append(self._state.plan_entry(digest, plan, size, slots))
        self._append(entry)

    def void(self, reason: str) -> None:
        """Put on record that the guarantee no longer holds: from here on none is given.

        Args:
            reason: what happened, e.g. that the model was moved outside of a private step.
        """
        check_kind("reason", reason, str)
        self._check_usable()
        self._state.void = self._state.void or reason  # holds here even if it cannot be written
        self._append({"void": reason})

    def compact(self, run: str, step: int) -> None:
        """Fold all lines into one, without the releases of a run up to a step that is never repeated.

        Called once a checkpoint of that step is on disk: a resumed run repeats only later ones. Counts,
        plans, other runs and the running digest stay. A few lines are left as they are.
        """
        known = self._state.runs.get(run)
        index = None if known is None else known.kept(step)
        if known is None or index is None or index + 1 < _WORTH_FOLDING:
            return
        if not self._usable or self._state.void is not None:  # nothing more is charged to it
            return
        self._check_usable()
        known.fold(step)
        if self._file is not None:
            try:
                self._file.replace(self._state.folded_lines())
            except BaseException:
                self._usable = False  # what is here and what is on disk may differ
                raise

    def close(self) -> None:
        """Let go of the file, so that another process may open it."""
        self._usable = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _read(self, path: Path) -> None:
        state = self._state
        try:
            with path.open("rb") as file:
                state.read(file)
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    self._write(b"\n")
            if state.unexplained:
                self._append(state.torn_note())
        except Damaged as damage:
            reason = f" ({damage.reason})" if damage.reason else ""
            raise LedgerError(
                f"the ledger {self.path} is damaged at line {damage.number}{reason}: charges may be "
                "missing, so no epsilon can be given. Restore it from a copy, or start a new run on a "
                "new ledger."
            ) from None

    def _by_plan(self, without: Mapping[str, int]) -> dict[Plan, int]:
        counts = {digest: count - without.get(digest, 0) for digest, count in self._state.counts.items()}
        return {self._state.plans[digest]: count for digest, count in counts.items() if count}

    def _repeated(self, plan: str, run: str, step: int, release: str) -> bool:
        """Whether the very same step is on record; raise if another one is in its place."""
        known = self._state.runs.get(run)
        if known is None:
            return False
        index = known.kept(step)
        if index is not None:
            if (known.plans[index], known.releases[index]) != (plan, release):
                raise self._another_release(run, step)
            return True
        if known.folded is not None and step <= known.folded[0]:
            raise LedgerError(
                f"step {step} of run {run} was charged and a later checkpoint was written, up to step "
                f"{known.folded[0]}: whether this is the same release is no longer on record, and "
                "another one under the same noise would reveal the records' difference. Resume from "
                "the newest checkpoint, or reseed to draw (and pay for) new noise."
            )
        if step != known.last + 1:
            raise LedgerError(
                f"step {step} of run {run} does not follow step {known.last}, the last charge: a gap "
                "reads as a lost charge. Charge one step after the other."
            )
        return False

    def _size(self, plan: Plan, dimension: int | None) -> int:
        """The dimension to store with a plan: 0 where the cost has a limit without it."""
        if not grows_with_dimension(plan):
            return 0
        if dimension is None:
            raise LedgerError(
                f"dimension=None does not say how many parameters are trained, and {plan} costs more "
                "the more there are: the charge would be a guess. Pass dimension=, their number."
            )
        return check_count("dimension", dimension, "parameters are counted", 1)

    def _append(self, entry: dict[str, Any]) -> None:
        text = text_of(entry)
        line, digest = chained(text, self._state.chain)
        self._write(line)
        self._state.apply(entry, text, digest)

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.append(line)
        except OSError as error:
            self._usable = False
            raise LedgerError(
                f"the charge could not be written to {self.path} ({error}): a step that is not on "
                "record must not be used, so it was not applied. Make room and resume from the last "
                "checkpoint."
            ) from error

    def _check_usable(self) -> None:
        if not self._usable:
            raise LedgerError(
                f"the ledger {self.path} is closed or could not be written: without a charge on "
                "record the step must not be applied. Open it again to go on."
            )
        if os.getpid() != self._process:
            raise LedgerError(
                f"the ledger {self.path} was opened by process {self._process} and this is a fork of "
                "it: both would count on the same budget and draw the same noise. Charge in the process "
                "that opened it, or give each process a ledger and a run of its own."
            )

    def _check_not_void(self) -> None:
        if self._state.void is not None:
            raise LedgerError(
                f"the ledger {self.path} is void ({self._state.void}): what was charged no longer "
                "covers what was released, so no epsilon can be given. Train a new model on a new "
                "ledger."
            )

    def _another_release(self, run: str, step: int) -> LedgerError:
        return LedgerError(
            f"step {step} of run {run} was already released with another value or plan: two "
            "releases under the same noise reveal the records' difference. Resume with the same "
            "data, plan, machine and torch version, or reseed to draw (and pay for) new noise."
        )
