"""The state of a ledger as the sum of its lines: counts, the newest releases of each run, the chain.

A line is one of (each ends with its digest, `hash_chain.py`)

    {"ledger": "hush", "version": 2, "id": ID}                  the first line
    {"plan": DIGEST, "value": {...}}                            a plan, stored before its first charge
    {"plan": DIGEST, "value": {...}, "dimension": D}            one whose cost grows with the dimension
    {"charge": DIGEST, "run": RUN, "step": K, "release": R}     one step of that plan
    {"plan": DIGEST, "value": {...}, "records": N}              one whose number of slots was given
    {"charge": ..., "arithmetic": "assumed", "release": R}      one whose rounding is not proved
    {"charge": ..., "randomness": "seeded", "release": R}       one whose noise came from a given seed
    {"protects": {"neighbours": ..., "per_unit": K}}            unless it is one record, zero-out
    {"protects": {..., "owners": DIGEST}}                       where the table of owners is public
    {"delta": DELTA}                                            of the budget that runs from here on keep
    {"torn": [[DIGEST, ...], ...]}                              lines before were cut short
    {"void": REASON}                                            the guarantee no longer holds
    {"folded": LINES, "counts": ..., "runs": ..., "torn": ..., "through": CHAIN}

`release` is the released value, or a fingerprint of it, which is public anyway. A folded line stands for
all lines up to the digest `through`, from which the chain of the lines after it continues. A torn line
is one that a crash cut short.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from hush.accounting.ledger.hash_chain import chained, entry_of, link, text_of
from hush.accounting.ledger.run_charges import RunCharges
from hush.accounting.mechanism import grows_with_dimension
from hush.core.guarantee import DELTA, RECORD, Adjacency
from hush.core.plan import Plan

VERSION = 2
_OLD = "it is of version 1, whose lines carry no digest: a charge may be missing unnoticed"


class Damaged(ValueError):
    """A line that cannot be as it was written: its number in the file, and the reason."""

    def __init__(self, number: int, reason: str = "") -> None:
        super().__init__(reason)
        self.number = number
        self.reason = reason


class LedgerState:
    """The sum of a ledger's lines; `apply` is the one place where it changes."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}
        self.dimensions: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.runs: dict[str, RunCharges] = {}
        self.records: dict[str, int] = {}
        """Largest number of slots that steps of each plan were run on, where it was given."""
        self.adjacency = RECORD
        """What neighbours of every charge differ in."""
        self.delta: float | None = None
        """Delta of the newest budget; it charges nothing, so that the last line of its kind counts."""
        self.assumed = False
        self.seeded = False
        self.void: str | None = None
        self.lines = 0
        """Number of lines ever written, including those that were folded."""
        self.number = 0
        """Number of lines read from the file."""
        self._torn: list[tuple[bytes, list[str]]] = []
        """Torn charges: the text left of each, and the plans it is counted under."""
        self.unexplained: list[bytes] = []
        """Torn lines that no note has counted yet."""
        header = {"ledger": "hush", "version": VERSION, "id": secrets.token_hex(8)}
        self.header, self.identity = chained(text_of(header), "")
        self.chain = self.identity

    def read(self, lines: Iterable[bytes]) -> None:
        """Add the lines of a file; the last ones may be `unexplained`."""
        for line in lines:
            self.number += 1
            try:
                parsed = entry_of(line, self.chain if self.number > 1 else "")
                if self.number == 1:
                    self._begin(parsed, line)
                elif parsed is None:
                    self._add_torn(line)
                else:
                    self.apply(*parsed)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise Damaged(self.number, _OLD if b'"version": 1}' in line else "") from None
        if not self.number:
            raise Damaged(1, "it is empty")

    def _add_torn(self, fragment: bytes) -> None:
        """Add a line that ends too early: a note must say how it is counted."""
        self.unexplained.append(fragment.rstrip(b"\n"))
        self.chain = link(self.chain, self.unexplained[-1])
        self.lines += 1

    def apply(self, entry: dict[str, Any], text: bytes, digest: str) -> None:
        """Add one whole line; raises `ValueError` if it cannot follow the others."""
        if self.unexplained and "torn" not in entry:
            raise ValueError
        if "charge" in entry:
            self._charge(text, digest, **entry)
        elif "plan" in entry:
            self._plan(**entry)
        elif "folded" in entry:
            digest = self._folded(**entry)
        elif "torn" in entry:
            self._note(**entry)
        elif "protects" in entry:
            self._protects(**entry)
        elif "delta" in entry:
            self._delta(**entry)
        else:
            self._void(**entry)
        self.chain = digest
        self.lines += 1

    def fits_torn(self, run: str, step: int, entry: dict[str, Any]) -> bool:
        """Whether a charge agrees with all torn charges of the same run and step."""
        if not self._torn:
            return True
        text = text_of(entry)
        heads = tuple(head_of(plan, run, step) for plan in self.plans)
        return all(_agree(text, torn) for torn, _ in self._torn if torn.startswith(heads))

    def replaced_torn(self, head: bytes) -> Counter[str]:
        """Counts, by plan, of torn charges that a charge beginning with `head` replaces."""
        return Counter(
            digest for torn, digests in self._torn if _agree(head, torn) for digest in digests
        )

    def torn_note(self) -> dict[str, Any]:
        """The entry that counts the unexplained lines, under every plan that they may have named."""
        counted = []
        void = {}
        for fragment in self.unexplained:
            # a power failure can leave zeros where a line was: then any plan may have been there
            text = b"" if fragment.startswith(b"\0") else fragment.rstrip(b"\0")
            counted.append(
                [plan for plan in self.plans if _agree(text, b'{"charge": "%b"' % plan.encode())]
            )
            if text.startswith(b'{"v'):
                void = {"void": "the note that says why was cut short"}
            elif not counted[-1] and not any(
                _agree(text, b'{"%b": ' % key) for key in (b"plan", b"protects", b"delta", b"torn")
            ):
                raise Damaged(self.number)
        return {"torn": counted, **void}

    def folded_lines(self) -> Iterator[bytes]:
        """The lines of a compacted file with this state."""
        yield self.header
        digest = self.identity
        for name, plan in self.plans.items():
            line, digest = chained(text_of(self.plan_entry(name, plan)), digest)
            yield line
        if self.adjacency != RECORD:
            line, digest = chained(text_of(self.adjacency_entry(self.adjacency)), digest)
            yield line
        if self.delta is not None:
            line, digest = chained(text_of({"delta": self.delta}), digest)
            yield line
        entry: dict[str, Any] = {
            "folded": self.lines,
            "counts": dict(self.counts),
            "runs": {name: run.to_plain() for name, run in self.runs.items()},
            "torn": [[torn.hex(), digests] for torn, digests in self._torn],
            "arithmetic": "assumed" if self.assumed else "proved",
            "randomness": "seeded" if self.seeded else "secret",
            "through": self.chain,
        }
        yield chained(text_of(entry), digest)[0]

    def plan_entry(self, digest: str, plan: Plan, size: int = 0, records: int = 0) -> dict[str, Any]:
        """The entry of a plan, with the largest dimension and number of slots on record."""
        size = max(size, self.dimensions.get(digest, 0))
        records = max(records, self.records.get(digest, 0))
        return {
            "plan": digest,
            "value": plan.to_plain(),
            **({"dimension": size} if size else {}),
            **({"records": records} if records else {}),
        }

    @staticmethod
    def adjacency_entry(adjacency: Adjacency) -> dict[str, Any]:
        """The entry of what neighbours differ in, stored before the first charge."""
        return {"protects": adjacency.to_plain()}

    def _protects(self, protects: dict[str, Any]) -> None:
        if self.counts:
            raise ValueError
        self.adjacency = Adjacency.from_plain(protects)

    def _delta(self, delta: float) -> None:
        self.delta = DELTA["range"].check("delta", delta)

    def _begin(self, parsed: tuple[dict[str, Any], bytes, str] | None, line: bytes) -> None:
        entry, _, digest = parsed or ({}, b"", "")
        if entry.get("ledger") != "hush" or entry.get("version") != VERSION:
            raise ValueError
        self.header = line
        self.identity = self.chain = digest
        self.lines = 1

    def _plan(self, plan: str, value: dict[str, Any], dimension: int = 0, records: int = 0) -> None:
        parsed = Plan.from_plain(value)
        sized = type(dimension) is int and dimension > 0
        if parsed.digest != plan or sized != grows_with_dimension(parsed):
            raise ValueError
        if type(records) is not int or records < 0:
            raise ValueError
        self.plans[plan] = parsed
        if records:
            self.records[plan] = max(records, self.records.get(plan, 0))
        if dimension:
            self.dimensions[plan] = max(dimension, self.dimensions.get(plan, 0))

    def _charge(
        self,
        text: bytes,
        digest: str,
        charge: str,
        run: str,
        step: int,
        release: str,
        arithmetic: str = "proved",
        randomness: str = "secret",
    ) -> None:
        # A run charges one step after the other: a gap is a lost charge, and a step charged twice was
        # released twice under the same noise.
        charges = self.runs.get(run)
        if charge not in self.plans or type(step) is not int or (charges and step != charges.last + 1):
            raise ValueError
        if charges is None:
            charges = self.runs[run] = RunCharges(step - 1)
        # ledger.md 4: the charge replaces the torn ones that it begins with
        for torn in [torn for torn in self._torn if _agree(text, torn[0])] if self._torn else ():
            self._torn.remove(torn)
            self.counts.subtract(torn[1])
        self.counts[charge] += 1
        self.assumed |= arithmetic == "assumed"
        self.seeded |= randomness == "seeded"
        charges.add(charge, step, str(release), digest)

    def _note(self, torn: list[list[str]], void: str | None = None) -> None:
        for fragment, digests in zip(self.unexplained, torn, strict=True):
            if not self.plans.keys() >= set(digests):
                raise ValueError
            self.counts.update(digests)
            # the text before the release discloses nothing, so that only a whole key is of interest
            self.assumed |= bool(digests) and b'"arithmetic": "assumed"' in fragment
            self.seeded |= bool(digests) and b'"randomness": "seeded"' in fragment
            if digests:
                self._torn.append((fragment.rstrip(b"\0"), digests))
        self.unexplained.clear()
        if void is not None:
            self._void(void)

    def _void(self, void: str) -> None:
        self.void = self.void or str(void)

    def _folded(
        self,
        folded: int,
        counts: dict[str, int],
        runs: dict[str, dict[str, Any]],
        torn: list[tuple[str, list[str]]],
        arithmetic: str,
        through: str,
        randomness: str = "secret",
    ) -> str:
        if self.runs or self.counts or not self.plans.keys() >= counts.keys():
            raise ValueError
        self.counts.update(counts)
        self.runs.update((name, RunCharges.from_plain(run)) for name, run in runs.items())
        self._torn = [(bytes.fromhex(text), digests) for text, digests in torn]
        self.assumed = arithmetic == "assumed"
        self.seeded = randomness == "seeded"
        self.lines = folded - 1
        return through


def head_of(plan: str, run: str, step: int) -> bytes:
    """The text of a charge up to and including its step."""
    return text_of({"charge": plan, "run": run, "step": step}) + b", "


def _agree(first: bytes, second: bytes) -> bool:
    """Whether one text is a prefix of the other."""
    return first.startswith(second) or second.startswith(first)
