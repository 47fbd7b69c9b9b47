"""The ledger: an append-only file with one line per charge, on disk before the update is used.

A line is one of

    {"ledger": "hush", "version": 1}                            the first line
    {"plan": DIGEST, "value": {...}}                            a plan, stored before its first charge
    {"plan": DIGEST, "value": {...}, "dimension": D}            one whose cost grows with the dimension
    {"charge": DIGEST, "run": RUN, "step": K, "release": R}     one step of that plan
    {"torn": [DIGEST, ...]}                                     the line before was cut short

`release` is what is released, or a fingerprint of it, which is public anyway. A run that resumes from
a checkpoint repeats the steps after it with the same randomness: the same release costs nothing new,
and another release under the same noise would reveal the difference of the two, so it is refused.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hush.accounting.charge import spent
from hush.accounting.mechanism import grows_with_dimension
from hush.core.durable import sync_folder
from hush.core.errors import HushError, LedgerError
from hush.core.guarantee import Guarantee
from hush.core.kind import as_path, check_kind
from hush.core.number import check_count
from hush.core.plan import Plan

_HEADER = {"ledger": "hush", "version": 1}


class Ledger:
    """What has been charged; without a path it lives in memory only.

    `read_only` looks at a file without locking or mending it, also while a run is writing to it.

    **Guarantee.** `charge` returns only after the charge is on disk, so an update that is applied
    after it can never be missing from the file. docs/guarantees/ledger.md has the argument.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, read_only: bool = False) -> None:
        self._file: int | None = None
        self.path = None if path is None else as_path("path", path)
        self._plans: dict[str, Plan] = {}
        self._dimensions: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._releases: dict[tuple[str, int], tuple[str, str]] = {}
        self._last: dict[str, int] = {}
        self._usable = not read_only
        if self.path is not None and read_only:
            self._read(self.path.read_bytes())
        elif self.path is not None:
            self._open(self.path)

    @property
    def counts(self) -> Mapping[Plan, int]:
        """How many steps of each plan have been charged."""
        return {self._plans[digest]: count for digest, count in self._counts.items() if count}

    @property
    def releases(self) -> Sequence[str]:
        """What was released by each charge whose line is whole, in order."""
        return [release for _, release in self._releases.values()]

    @property
    def dimensions(self) -> Mapping[Plan, int]:
        """The most parameters trained under each plan whose cost grows with their number."""
        return {self._plans[digest]: size for digest, size in self._dimensions.items()}

    def epsilon(self, delta: float) -> Guarantee:
        """The guarantee for everything charged so far, under all plans together."""
        return spent(self.counts, delta, self.dimensions)

    def last_step(self, run: str) -> int:
        """The last step charged for a run, 0 if there is none."""
        return self._last.get(run, 0)

    def charge(
        self, plan: Plan, *, run: str, step: int, release: str, dimension: int | None = None
    ) -> None:
        """Put one step of `plan` on disk; the very same release again costs nothing.

        `dimension`, the number of parameters, is asked for where the cost grows with it.
        """
        if not self._usable:
            raise LedgerError(
                f"the ledger {self.path} is closed or could not be written: without a charge on "
                "record the step must not be applied. Open it again to go on."
            )
        check_kind("plan", plan, Plan)
        check_kind("run", run, str)
        check_kind("release", release, str)
        step = check_count("step", step, "the steps of a run are counted", 1)
        known = self._releases.get((run, step))
        if known == (plan.digest, release):
            return
        if known is not None:
            raise LedgerError(
                f"step {step} of run {run} was already released with another value or plan: two "
                "releases under the same noise reveal the records' difference. Resume with the same "
                "data, plan, machine and torch version, or reseed to draw (and pay for) new noise."
            )
        if step != self._last.get(run, step - 1) + 1:
            raise LedgerError(
                f"step {step} of run {run} does not follow step {self._last[run]}, the last charge: a "
                "gap reads as a lost charge. Charge one step after the other."
            )
        size = self._size(plan, dimension)
        if plan.digest not in self._plans or size > self._dimensions.get(plan.digest, 0):
            sized = {"dimension": size} if size else {}
            self._append({"plan": plan.digest, "value": plan.to_plain(), **sized})
            self._know(plan, size)
        self._append({"charge": plan.digest, "run": run, "step": step, "release": release})
        self._count(plan.digest, run, step, release)

    def close(self) -> None:
        """Let go of the file, so that another process may open it."""
        self._usable = False
        if self._file is not None:
            os.close(self._file)
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

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise LedgerError(
                f"the ledger {path} is open already, in this process or in another: two writers could "
                "each spend the same budget. Close it there (step.ledger.close() where a PrivateStep "
                "opened it), or wait for the other process to end."
            ) from None
        try:
            self._read(path.read_bytes())
        except HushError:
            self.close()
            raise
        sync_folder(path.parent)

    def _read(self, text: bytes) -> None:
        *lines, tail = text.split(b"\n")
        if not lines:
            return self._begin(tail)
        if tail:
            self._write(b"\n")
            lines.append(tail)
        unreadable: list[bytes] = []  # lines that no "torn" note has explained yet
        for number, line in enumerate(lines, start=1):
            entry = _parse(line)
            if entry is None and number > 1:
                unreadable.append(line)
            elif entry is None or (unreadable and "torn" not in entry):
                raise self._damaged(number)
            else:
                unreadable.clear()
                self._apply(entry, number)
        if unreadable:
            self._mend(unreadable, len(lines))
        return None

    def _begin(self, tail: bytes) -> None:
        """Write the first line; a first line cut short holds no charge and is written again."""
        if self._file is None or not _header_line().startswith(tail):
            raise self._damaged(1)
        os.ftruncate(self._file, 0)
        self._write(_header_line())

    def _apply(self, entry: dict[str, Any], number: int) -> None:
        """Take one readable line into account."""
        if (entry == _HEADER) != (number == 1):
            raise self._damaged(number)
        match entry:
            case {"ledger": _}:
                pass
            case {"plan": str(digest), "value": dict(value), **rest}:
                try:
                    plan, size = Plan.from_plain(value), rest.get("dimension", 0)
                except HushError:
                    raise self._damaged(number) from None
                sized = isinstance(size, int) and size > 0
                if plan.digest != digest or sized != grows_with_dimension(plan):
                    raise self._damaged(number)
                self._know(plan, size)
            case {
                "charge": str(digest),
                "run": str(run),
                "step": int(step),
                "release": str(release),
            }:
                # A run charges one step after the other: a gap is a lost charge, and a step charged
                # twice was released twice under the same noise.
                if digest not in self._plans or step != self._last.get(run, step - 1) + 1:
                    raise self._damaged(number)
                self._count(digest, run, step, release)
            case {"torn": list(digests)} if all(digest in self._plans for digest in digests):
                self._counts.update(digests)
            case _:
                raise self._damaged(number)

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

    def _know(self, plan: Plan, size: int) -> None:
        """Remember a plan, and the largest dimension it was charged for where that matters."""
        self._plans[plan.digest] = plan
        if size:
            self._dimensions[plan.digest] = max(size, self._dimensions.get(plan.digest, 0))

    def _mend(self, fragments: list[bytes], number: int) -> None:
        """Keep a line cut short as charged, under every plan it may have named."""
        digests = []
        for fragment in fragments:
            text = fragment.strip(b"\0")  # a power failure can leave zeros where a line was
            candidates = [digest for digest in self._plans if _agrees(text, "charge", digest)]
            if not candidates and not _agrees(text, "plan") and not _agrees(text, "torn"):
                raise self._damaged(number)
            digests += candidates
        self._append({"torn": digests})
        self._counts.update(digests)

    def _count(self, digest: str, run: str, step: int, release: str) -> None:
        self._counts[digest] += 1
        self._releases[run, step] = (digest, release)
        self._last[run] = step

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._write(json.dumps(entry).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            written = os.write(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            self._usable = False
            raise self._unwritten(str(error)) from error
        if written < len(line):
            self._usable = False
            raise self._unwritten(f"only {written} of {len(line)} bytes were written")

    def _unwritten(self, reason: str) -> LedgerError:
        return LedgerError(
            f"the charge could not be written to {self.path} ({reason}): a step that is not on "
            "record must not be used, so it was not applied. Make room and resume from the last "
            "checkpoint."
        )

    def _damaged(self, number: int) -> LedgerError:
        return LedgerError(
            f"the ledger {self.path} is damaged at line {number}: charges may be missing, so no "
            "epsilon can be given. Restore it from a copy, or start a new run on a new ledger."
        )


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line as an object, None if it is not one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _agrees(fragment: bytes, key: str, digest: str = "") -> bool:
    """Whether a line cut short may have been the beginning of such an entry."""
    beginning = (f'{{"{key}": "{digest}"' if digest else f'{{"{key}": ').encode()
    return beginning.startswith(fragment) or fragment.startswith(beginning)


def _header_line() -> bytes:
    return json.dumps(_HEADER).encode() + b"\n"
