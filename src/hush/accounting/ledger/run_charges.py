"""The charges of one run, which resumes from checkpoints and must repeat the same releases."""

from dataclasses import dataclass, field
from typing import Any

from hush.accounting.ledger.hash_chain import DIGITS
from hush.core.errors import LedgerError


@dataclass
class RunCharges:
    """The charges of one run, step by step; the oldest ones are folded, without their releases."""

    last: int
    folded: tuple[int, str] | None = None
    """The last step whose release is no longer stored, and the digest of its line."""
    plans: list[str] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)

    def add(self, plan: str, step: int, release: str, digest: str) -> None:
        self.last = step
        self.plans.append(plan)
        self.releases.append(release)
        self.digests += bytes.fromhex(digest)

    def index(self, step: int) -> int | None:
        """The index of a step whose release is stored."""
        index = step - self.last + len(self.releases) - 1
        return index if 0 <= index < len(self.releases) else None

    def digest_at(self, step: int) -> str | None:
        """Digest of the hash chain just after the step was charged; None if not on record."""
        if self.folded is not None and self.folded[0] == step:
            return self.folded[1]
        index = self.index(step)
        return None if index is None else self._digest(index)

    def repeats(self, run: str, plan: str, step: int, release: str) -> bool:
        """Whether the very same step is on record; raises if another one is in its place."""
        index = self.index(step)
        if index is not None:
            if (self.plans[index], self.releases[index]) != (plan, release):
                raise another_release(run, step)
            return True
        if self.folded is not None and step <= self.folded[0]:
            raise LedgerError(
                f"step {step} of run {run} was charged and a later checkpoint was written, up to step "
                f"{self.folded[0]}: whether this is the same release is no longer on record, and "
                "another one under the same noise would reveal the records' difference. Resume from "
                "the newest checkpoint, or reseed to draw (and pay for) new noise."
            )
        if step != self.last + 1:
            raise LedgerError(
                f"step {step} of run {run} does not follow step {self.last}, the last charge: a gap "
                "reads as a lost charge. Charge one step after the other."
            )
        return False

    def fold(self, step: int) -> None:
        """Drop the releases up to a step whose release is stored."""
        index = self.index(step)
        assert index is not None
        self.folded = step, self._digest(index)
        del self.plans[: index + 1], self.releases[: index + 1]
        del self.digests[: (index + 1) * DIGITS // 2]

    def to_plain(self) -> dict[str, Any]:
        digests = [self._digest(index) for index in range(len(self.releases))]
        stored = list(map(list, zip(self.plans, self.releases, digests, strict=True)))
        return {"last": self.last, "folded": self.folded, "kept": stored}

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> "RunCharges":
        first = value["last"] - len(value["kept"])
        charges = cls(first, value["folded"] and tuple(value["folded"]))
        for step, (plan, release, digest) in enumerate(value["kept"], start=first + 1):
            charges.add(plan, step, release, digest)
        return charges

    def _digest(self, index: int) -> str:
        return self.digests[index * DIGITS // 2 : (index + 1) * DIGITS // 2].hex()


def another_release(run: str, step: int) -> LedgerError:
    """The error of a step that was already released with another value or plan."""
    return LedgerError(
        f"step {step} of run {run} was already released with another value or plan: two "
        "releases under the same noise reveal the records' difference. Resume with the same "
        "data, plan, machine and torch version, or reseed to draw (and pay for) new noise."
    )
