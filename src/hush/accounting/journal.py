"""Lines of a ledger: format, hash chain, totals, and the locked file that contains them.

A line is a JSON object. Its last key, `chain`, is a SHA-256 digest, truncated to 128 bits, of the
previous digest and of the line's text before this key. A changed, missing or moved line therefore breaks
the chain. The chain detects accidents, but not forgery.

    {"ledger": "hush", "version": 2, "id": ID}                  first line
    {"plan": DIGEST, "value": {...}}                            plan, stored before its first charge
    {"plan": DIGEST, "value": {...}, "dimension": D}            plan whose cost grows with D
    {"plan": DIGEST, "value": {...}, "records": N}              plan with a known number of slots
    {"charge": DIGEST, "run": RUN, "step": K, "release": R}     one step of a plan
    {"charge": ..., "arithmetic": "assumed", "release": R}      step with rounding outside the proof
    {"charge": ..., "randomness": "seeded", "release": R}       step with noise from a given seed
    {"protects": {...}}                                         adjacency other than the default
    {"delta": DELTA}                                            delta of the budget from this line on
    {"planned": DIGEST, "run": RUN, "last": N}                  a stopped run counts as N steps
    {"torn": [[DIGEST, ...], ...]} plans charged for the preceding torn lines
    {"void": REASON}                                            the guarantee is no longer valid
    {"folded": LINES, "counts": ..., "runs": ..., "torn": ..., "through": CHAIN}

`release` is the released value or its fingerprint. A torn line is a line that is incomplete because of a
crash. A folded line replaces all lines up to the digest `through`, and the chain continues from there.
"""

import fcntl
import hashlib
import json
import os
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from hush.core.atomic_files import file_named, make_folder, sync_folder
from hush.core.errors import LedgerError
from hush.core.guarantee import RECORD, Adjacency
from hush.core.plan import Plan

VERSION = 2
_CHAIN_KEY = b', "chain": "'
_DIGITS = 32
_CHAIN_LENGTH = len(_CHAIN_KEY) + _DIGITS + len(b'"}\n')
_TORN_KINDS = (b"plan", b"planned", b"protects", b"delta", b"torn", b"void")


@dataclass
class Run:
    """Charges of one run in order. The oldest charges may be folded, without their releases."""

    last: int
    folded: tuple[int, str, str] | tuple[int, str] | None = None
    """Last step without a stored release, the digest of its line, and its plan (not in old files)."""
    plans: list[str] = field(default_factory=list)
    """Plan of each charge with a stored release, up to step `last`."""
    releases: list[str] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)
    """Digests of these charges, as bytes to save memory."""

    def add(self, plan: str, release: str, digest: str) -> None:
        """Append a charge with a stored release. Does not change `last`."""
        self.plans.append(sys.intern(plan))
        self.releases.append(release)
        self.digests += bytes.fromhex(digest)

    @property
    def plan(self) -> str | None:
        """Plan of the last charge, if it is on record."""
        if self.plans:
            return self.plans[-1]
        return self.folded[2] if self.folded is not None and len(self.folded) == 3 else None

    def charge(self, step: int) -> tuple[str, str, str] | None:
        """Plan, release and digest of a step; None if its release is not stored."""
        index = step - self.last + len(self.plans) - 1
        if not 0 <= index < len(self.plans):
            return None
        size = _DIGITS // 2
        digest = self.digests[size * index : size * (index + 1)].hex()
        return self.plans[index], self.releases[index], digest

    def fold(self, step: int) -> None:
        """Drop the releases up to this step, whose release must be stored."""
        charge, count = self.charge(step), len(self.plans) - (self.last - step)
        assert charge is not None
        self.folded = step, charge[2], charge[0]
        del self.plans[:count], self.releases[:count], self.digests[: _DIGITS // 2 * count]


class Journal:
    """Totals of a ledger's lines."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.periods: dict[str, int] = {}
        """Number of steps that a charge of each plan covers."""
        self.dimensions: dict[str, int] = {}
        self.records: dict[str, int] = {}
        """Largest number of slots of each plan, if given."""
        self.counts: Counter[str] = Counter()
        """Charged steps of each plan, in whole periods."""
        self.runs: dict[str, Run] = {}
        self.planned: dict[str, tuple[str, int]] = {}
        """Plan and last planned step of each run that was stopped early."""
        self.adjacency = RECORD
        self.delta: float | None = None
        self.assumed = False
        self.seeded = False
        self.void: str | None = None
        self.lines = 0
        """Number of lines ever written, including folded lines."""
        self.header = b""
        self.identity = self.chain = ""
        self.unexplained: list[bytes] = []
        """Torn lines that are not yet counted by a `torn` line."""
        self._torn: list[tuple[bytes, list[str]]] = []
        """Remaining text of each torn charge, and the plans for which it is counted."""
        self._newest: tuple[str, Run, bytes, bytes] | None = None
        """Plan, run, and text before and after the step of the last line, if it is a charge."""

    def run(self, name: str) -> Run:
        """Charges of a run; empty for an unknown run."""
        return self.runs.get(name, Run(0))

    def unused(self, name: str) -> int:
        """Number of counted steps that a run has not taken: in its period, or planned."""
        run, (plan, last) = self.run(name), self.planned.get(name, ("", 0))
        covered = run.last if run.plan is None else self._covered(run.plan, run.last)
        return max(covered, self._covered(plan, last) if plan else 0) - run.last

    @property
    def periods_ended(self) -> bool:
        """Whether all counted periods are known to have ended: one run took every counted step."""
        counted = sum(self.totals().values())
        return len(self.runs) == 1 and counted == sum(run.last for run in self.runs.values())

    def _covered(self, plan: str, step: int) -> int:
        """Last step of the period of a step, which is numbered from 1."""
        return -(-step // self.periods[plan]) * self.periods[plan]

    def _count(self, plans: Iterable[str], sign: int = 1) -> None:
        """Count a period of each plan."""
        for plan in plans:
            self.counts[plan] += sign * self.periods[plan]

    def _take(self, run: Run, plan: str, release: str, digest: str) -> None:
        """Add the next step of a run; it is counted if it begins a period."""
        if run.plan != plan or self._covered(plan, run.last) == run.last:
            self._count([plan])
        run.last += 1
        run.add(plan, release, digest)

    def read(self, lines: Iterable[bytes]) -> None:
        """Add the lines of a file; torn lines at its end become `unexplained`."""
        number = 0
        for number, line in enumerate(lines, start=1):
            try:
                if not self._repeats(line):
                    self.add(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                old = b'"version": 1}' in line
                reason = " (version 1, without digests)" if old else ""
                raise ValueError(f"line {number}{reason}") from None
        if not number:
            raise ValueError("line 1 (it is empty)")

    def _repeats(self, line: bytes) -> bool:
        """Add a charge that differs from the last charge only in step and release.

        This is a fast path, which compares text instead of parsing it. Returns False for other lines.
        """
        if self._newest is None:
            return False
        plan, run, before, after = self._newest
        text, head = line[:-_CHAIN_LENGTH], b"%b%d%b" % (before, run.last + 1, after)
        release, digest = text[len(head) : -1], _link(self.chain, text)
        expected = b'%b%b"%b%b"}\n' % (head, release, _CHAIN_KEY, digest.encode())
        if line != expected or not release.isalnum():
            return False
        self._take(run, plan, release.decode(), digest)
        self.chain = digest
        self.lines += 1
        return True

    def add(self, line: bytes) -> None:
        """Add one line; raises if it is damaged or cannot follow the others."""
        self._newest = None
        try:
            entry = json.loads(line.decode())
        except (ValueError, RecursionError):
            if not self.lines:
                raise
            self.unexplained.append(line.rstrip(b"\n"))
            self.chain = _link(self.chain, self.unexplained[-1])
            self.lines += 1
            return
        text, key, rest = line.rstrip(b"\n").rpartition(_CHAIN_KEY)
        digest = _link(self.chain, text)
        if not key or rest != digest.encode() + b'"}':
            raise ValueError
        if (self.unexplained and "torn" not in entry) or (not self.lines) != ("ledger" in entry):
            raise ValueError
        match entry:
            case {"charge": plan, "run": name, "step": step, "release": release}:
                run = self.runs.setdefault(name, Run(step - 1))
                if plan not in self.plans or step != run.last + 1:
                    raise ValueError
                # the charge replaces its torn prefixes: docs/guarantees/ledger.md, section 4
                for torn in [torn for torn in self._torn if _agree(text, torn[0])]:
                    self._torn.remove(torn)
                    self._count(torn[1], -1)
                self._take(run, plan, release, digest)
                self.assumed |= entry.get("arithmetic") == "assumed"
                self.seeded |= entry.get("randomness") == "seeded"
                head, between = head_of(plan, name, step), text[: -len(json.dumps(release)) + 1]
                if not self._torn and between.startswith(head) and between.endswith(b'"release": "'):
                    before = head[: -len(b"%d, " % step)]
                    self._newest = plan, run, before, between[len(head) - len(b", ") :]
            case {"ledger": "hush", "version": version} if version == VERSION:
                self.header, self.identity = line.rstrip(b"\n") + b"\n", digest
            case {"plan": name, "value": value}:
                plan = self.plans[name] = Plan.from_plain(value)
                self.periods[name] = plan.sampling.period
                for known, size in ((self.dimensions, "dimension"), (self.records, "records")):
                    if size in entry:
                        known[name] = max(entry[size], known.get(name, 0))
            case {"protects": value}:
                self.adjacency = Adjacency.from_plain(value)
            case {"planned": plan, "run": name, "last": int(last)}:
                if plan not in self.plans:
                    raise ValueError
                self.planned[name] = plan, max(last, self.planned.get(name, (plan, 0))[1])
            case {"delta": float(delta)}:
                self.delta = delta
            case {"folded": int(lines), "through": str(through)}:
                self.counts.update(entry["counts"])
                for name, plain in entry["runs"].items():
                    run = self.runs[name] = Run(
                        plain["last"], plain["folded"] and tuple(plain["folded"])
                    )
                    for charge in plain["kept"]:
                        run.add(*charge)
                self._torn = [(bytes.fromhex(text), plans) for text, plans in entry["torn"]]
                self.assumed = entry["arithmetic"] == "assumed"
                self.seeded = entry.get("randomness") == "seeded"
                self.lines, digest = lines - 1, through
            case {"torn": torn}:
                for fragment, plans in zip(self.unexplained, torn, strict=True):
                    self._count(plans)
                    if plans:
                        self.assumed |= b'"arithmetic": "assumed"' in fragment
                        self.seeded |= b'"randomness": "seeded"' in fragment
                        self._torn.append((fragment.rstrip(b"\0"), plans))
                self.unexplained.clear()
                self.void = self.void or entry.get("void")
            case {"void": str(reason)}:
                self.void = self.void or reason
            case _:
                raise ValueError
        self.chain = digest
        self.lines += 1

    def torn_note(self) -> dict[str, Any]:
        """Entry that counts each unexplained line for every plan that it may refer to."""
        counted = []
        void = {}
        for fragment in self.unexplained:
            # after a power failure a line may consist of zeros, so any plan is possible
            text = b"" if fragment.startswith(b"\0") else fragment.rstrip(b"\0")
            plans = [name for name in self.plans if _agree(text, b'{"charge": "%b"' % name.encode())]
            if not plans and not any(_agree(text, b'{"%b": ' % kind) for kind in _TORN_KINDS):
                raise ValueError(f"line {self.lines}")
            counted.append(plans)
            if text.startswith(b'{"v'):
                void = {"void": "the note that says why was cut short"}
        return {"torn": counted, **void}

    def agrees_with_torn(self, run: str, step: int, entry: Mapping[str, Any]) -> bool:
        """Whether a charge agrees with all torn charges of the same run and step."""
        if not self._torn:
            return True
        text = text_of(entry)
        heads = tuple(head_of(plan, run, step) for plan in self.plans)
        return all(_agree(text, torn) for torn, _ in self._torn if torn.startswith(heads))

    def totals(self, head: bytes | None = None) -> dict[Plan, int]:
        """Number of charges of each plan, without torn charges that a charge starting with `head`
        replaces."""
        counts = Counter(self.counts)
        for torn, plans in self._torn:
            if head is not None and _agree(head, torn):
                counts.subtract({name: self.periods[name] for name in plans})
        for name, (plan, last) in self.planned.items():
            run, end = self.run(name), self._covered(plan, last)
            taken = self._covered(plan, run.last) if run.plan == plan else run.last
            counts[plan] += max(0, self._covered(plan, end - taken))
        return {self.plans[name]: count for name, count in counts.items() if count}

    def folded_lines(self) -> Iterator[bytes]:
        """Lines of a compacted file with the same totals."""
        yield self.header
        digest = self.identity
        entries: list[dict[str, Any]] = [self.plan_entry(*plan) for plan in self.plans.items()]
        if self.adjacency != RECORD:
            entries.append({"protects": self.adjacency.to_plain()})
        if self.delta is not None:
            entries.append({"delta": self.delta})
        for name, (plan_name, last) in self.planned.items():
            entries.append({"planned": plan_name, "run": name, "last": last})
        if self.void is not None:
            entries.append({"void": self.void})
        folded = {
            "folded": self.lines,
            "counts": dict(self.counts),
            "runs": {
                name: {
                    "last": run.last,
                    "folded": run.folded,
                    "kept": [run.charge(run.last - back) for back in reversed(range(len(run.plans)))],
                }
                for name, run in self.runs.items()
            },
            "torn": [[torn.hex(), plans] for torn, plans in self._torn],
            "arithmetic": "assumed" if self.assumed else "proved",
            "randomness": "seeded" if self.seeded else "secret",
            "through": self.chain,
        }
        for entry in (*entries, folded):
            line, digest = chained(entry, digest)
            yield line

    def plan_entry(self, name: str, plan: Plan, size: int = 0, records: int = 0) -> dict[str, Any]:
        """Entry of a plan, with its largest known dimension and number of slots."""
        size = max(size, self.dimensions.get(name, 0))
        records = max(records, self.records.get(name, 0))
        largest = {"dimension": size, "records": records}
        return {"plan": name, "value": plan.to_plain(), **{k: n for k, n in largest.items() if n}}


def new_header() -> bytes:
    """First line of a new ledger, with a random identifier."""
    return chained({"ledger": "hush", "version": VERSION, "id": secrets.token_hex(8)}, "")[0]


def head_of(plan: str, run: str, step: int) -> bytes:
    """Text of a charge up to and including its step."""
    return text_of({"charge": plan, "run": run, "step": step}) + b", "


def text_of(entry: Mapping[str, Any]) -> bytes:
    """Hashed text of an entry: its line without the digest."""
    return json.dumps(entry).encode()[:-1]


def chained(entry: Mapping[str, Any], before: str) -> tuple[bytes, str]:
    """Line of an entry, with a newline, and its digest."""
    text = text_of(entry)
    digest = _link(before, text)
    return text + _CHAIN_KEY + digest.encode() + b'"}\n', digest


def _link(before: str, text: bytes) -> str:
    """Digest of a line with the given text that follows the digest `before`."""
    return hashlib.sha256(before.encode() + text).hexdigest()[:_DIGITS]


def _agree(first: bytes, second: bytes) -> bool:
    """Whether one text is a prefix of the other."""
    return first.startswith(second) or second.startswith(first)


class LockedFile:
    """Append-only file with an exclusive lock.

    New content is written to another file, which is locked and then renamed, so a crash cannot leave an
    empty or partial file.
    """

    _close_handle = staticmethod(os.close)  # `os` may be deleted before this object at interpreter exit

    def __init__(self, path: Path, beginning: bytes) -> None:
        """Open and lock the file at `path`; if it does not exist, create it with `beginning`."""
        self.path = path = path.resolve()  # renaming must replace the file, not a link to it
        make_folder(path.parent)
        self._handle = -1
        while self._handle < 0:
            try:
                self._handle = _locked(path, path)
            except FileNotFoundError:
                self.replace([beginning])
        _open_files.add(self)

    def append(self, line: bytes) -> None:
        """Append a line and sync the file."""
        written = os.write(self._handle, line)
        os.fsync(self._handle)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file's content atomically; create the file unless another process does first."""
        draft = self.path.with_name(self.path.name + ".compact")
        with file_named(self.path, "no charge was lost"):
            handle = _locked(draft, self.path, os.O_CREAT)
            try:
                if self._handle >= 0:
                    os.fchmod(handle, stat.S_IMODE(os.fstat(self._handle).st_mode))
                elif self.path.exists():
                    draft.unlink()
                    os.close(handle)
                    return
                os.ftruncate(handle, 0)
                rest = memoryview(b"".join(lines))
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
                draft.replace(self.path)
            except BaseException:
                draft.unlink(missing_ok=True)
                os.close(handle)
                raise
            self.close()
            self._handle = handle
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Release the file and its lock."""
        if self._handle >= 0:
            self._close_handle(self._handle)
            self._handle = -1


_open_files: "WeakSet[LockedFile]" = WeakSet()


# a lock is held until no process has the file open
os.register_at_fork(after_in_child=lambda: list(map(LockedFile.close, list(_open_files))))


def _locked(path: Path, ledger: Path, create: int = 0) -> int:
    """Open and lock the file `path`, and return its handle. Errors mention `ledger`."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | create, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise LedgerError(
                f"the ledger {ledger} is open already, in this process or in another: two writers could "
                "each spend the same budget. Close it (step.ledger.close() if a PrivateStep "
                "opened it), or wait for the other process to end."
            ) from None
        except FileNotFoundError:  # renamed in between
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # replaced between opening and locking
