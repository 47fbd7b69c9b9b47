"""Privacy guarantees: certified bounds on epsilon, adjacency, budget, and the statement itself."""

import math
import re
import warnings
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from enum import StrEnum
from typing import Any, Literal, NoReturn

from hush.core.errors import InvalidValue, PrivacyWarning
from hush.core.value import Value, check_count, count, nested, number

DELTA = number(
    above=0,
    at_most=0.1,
    why="delta is the probability that the guarantee fails (publishing all records with probability 0.1 "
    "satisfies epsilon 0 at delta 0.1), and it cannot be 0 for Gaussian noise; it "
    "should be well below one over the number of records or users",
    example=1e-5,
)

DEFAULT_DELTA = 1e-5
"""Default delta, suitable for up to tens of thousands of records."""


def check_delta(delta: float, records: int, unit: str = "one record", *, private: bool = False) -> float:
    """Validate delta (at most 0.1), and warn if it is above one over the number of records or users.

    Publishing one random record of n satisfies epsilon 0 at delta 1/n (for a group of m records: m/n).

    Args:
        delta: Failure probability.
        records: Number of records or users.
        unit: Unit of privacy, in words.
        private: Whether the number of records is private, as for `ADD_REMOVE`.
    """
    checked: float = DELTA["range"].check("delta", delta)
    group, one = _group(unit)
    if checked * records > group:
        whole = "" if one == "record" else "all data of "
        text = (
            f"delta={checked:g} is above {group}/{records} = {group / records:.2g}: publishing {whole}"
            f"one {one} of the {records} {one}s outright, drawn at random, would satisfy it at epsilon 0"
            f"{f', for {group} of them together' * (group > 1)}. Pass a delta well below, e.g. "
            f"{advised_delta(records):g}."
        )
        text += " This warning depends on a private number: do not publish it." * private
        warnings.warn(text, PrivacyWarning, stacklevel=3)
    return checked


def advised_delta(records: int) -> float:
    """Suggested delta: a tenth of one over the number of records or users, to one digit."""
    return float(f"{0.1 / records:.0e}")


def _group(unit: str) -> tuple[int, str]:
    """Group size and unit of privacy, e.g. (5, "user")."""
    together = re.match(r"(\d+) (\w+)s together", unit)
    if together is not None:
        return int(together[1]), together[2]
    return 1, unit.partition(",")[0].removeprefix("one ")


Arithmetic = Literal["proved", "assumed"]
"""`proved`: the noise is exact and from a cryptographic stream, and the rounding of sums is accounted
for, under Assumption K and, if records are sampled, K2 (docs/guarantees/tape.md)."""
Secrecy = Literal["secret", "seeded"]
"""`seeded`: the noise comes from a given seed; the guarantee is valid only while the seed is secret."""


class Neighbours(StrEnum):
    """Adjacency relation: which pairs of data sets are neighbours.

    `ZERO_OUT`: one record is added or removed, and its empty slot contributes a gradient of zero; the
    number of slots is public. `ADD_REMOVE`: one record is added or removed, and no release depends on
    the number of records. `REPLACE`: one record is replaced.
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add/remove"
    REPLACE = "replace"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        text = f"neighbours={value!r} must be one of {', '.join(map(repr, map(str, cls)))}: epsilon "
        text += "is defined for pairs of neighbouring data sets."
        raise InvalidValue(text, key="neighbours")


_RELATION = {"check": lambda name, value: Neighbours(value)}
_WHY_GROUP = (
    "it is the group size, and the guarantee is vacuous for larger groups; to protect all records "
    "of a user, train with units=hush.Units(...)"
)


def _per_unit(name: str, value: Any) -> Any:
    why = "a sampled user contributes at least one record"
    return value if value == "all" else check_count(name, value, why, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Adjacency(Value):
    """Neighbouring data sets: the relation, the unit of privacy, and the group size.

    Args:
        neighbours: Adjacency relation.
        per_unit: Maximum number of records of one user per step, for user-level privacy; "all" for no
            limit (PATE), None for record-level privacy.
        group: Group size, for group privacy.
        owners: Digest of the public record-to-user map, for user-level privacy. None for record-level
            privacy, or if the map is private, as for `ADD_REMOVE`.
    """

    neighbours: Neighbours = field(default=Neighbours.ZERO_OUT, metadata=_RELATION)
    per_unit: int | Literal["all"] | None = field(default=None, metadata={"check": _per_unit})
    group: int = field(
        default=1,
        metadata=count(_WHY_GROUP, at_most=1000, example=5),
    )
    owners: str | None = None

    @property
    def unit(self) -> str:
        if self.per_unit is None:
            return "one record" if self.group == 1 else f"{self.group} records together"
        owner = "one user" if self.group == 1 else f"{self.group} users together"
        if self.per_unit == "all":
            return owner
        return f"{owner}, at most {self.per_unit} record{'s' * (self.per_unit > 1)} a step"

    @property
    def replaced(self) -> bool:
        """Whether both neighbouring data sets have a record in the changed slot."""
        return self.neighbours is Neighbours.REPLACE

    @property
    def slots(self) -> int:
        """Number of single-slot changes (filled or emptied) between neighbouring data sets."""
        return 2 * self.group if self.replaced else self.group

    def __str__(self) -> str:
        return f"{self.unit} ({self.neighbours})"


RECORD = Adjacency()
"""Record-level privacy: one record is present or absent in a public slot."""


def at_most(value: float, digits: int = 4, direction: str = ROUND_CEILING) -> str:
    """An upper bound, rounded up to a number of significant digits.

    >>> at_most(2.98765), at_most(1.2344e-5), at_most(math.inf), at_least(2.98765)
    ('2.988', '1.235e-5', 'infinite', '2.987')
    """
    if not math.isfinite(value):
        return "infinite" if value > 0 else "unknown"
    # repr is the shortest decimal of this float: 1.9 stays 1.9
    number = Context(prec=digits, rounding=direction).create_decimal(repr(float(value)))
    if number and not -4 < number.adjusted() < 7:
        return f"{number.normalize():e}".replace("e+", "e")
    return f"{number.normalize():f}"


def at_least(value: float, digits: int = 4) -> str:
    """A lower bound, rounded down to a number of significant digits."""
    return at_most(value, digits, ROUND_FLOOR)


def percent(share: float) -> str:
    """An upper bound on a probability in percent, rounded up to three digits.

    >>> percent(0.58123), percent(1.0)
    ('58.2%', '100%')
    """
    return f"{at_most(100 * share, 3)}%"


@dataclass(frozen=True, kw_only=True)
class Bound(Value):
    """Certified interval for epsilon or delta. `upper` is the number to report.

    Args:
        lower: Certified lower bound on the true value.
        upper: Certified upper bound: the guarantee.
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not 0 <= self.lower <= self.upper:
            ends = f"lower={self.lower!r}, upper={self.upper!r}"
            raise InvalidValue(
                f"{ends} must satisfy 0 <= lower <= upper: they are the ends of an interval."
            )
        object.__setattr__(self, "lower", float(self.lower))
        object.__setattr__(self, "upper", float(self.upper))

    def __str__(self) -> str:
        if math.isinf(self.upper):
            return "infinite" if math.isinf(self.lower) else f">= {at_least(self.lower, 5)}"
        lower = f"and >= {at_least(self.lower, 5)}" if self.lower else "no lower bound"
        return f"<= {at_most(self.upper, 5)} ({lower})"


@dataclass(frozen=True, kw_only=True)
class Budget(Value):
    """Privacy budget: the (epsilon, delta) that a run may spend.

    Args:
        epsilon: Largest epsilon; also positional.
        delta: Failure probability, well below one over the number of records or users; also positional.
    """

    epsilon: float = field(
        kw_only=False,
        metadata=number(above=0, why="a budget of zero permits no release", example=3.0),
    )
    delta: float = field(kw_only=False, metadata=DELTA)


@dataclass(frozen=True, kw_only=True)
class Guarantee(Value):
    """Privacy guarantee with all its conditions; `float()` returns the upper bound on epsilon.

    >>> float(Guarantee(epsilon=Bound(lower=0.9, upper=1.0), delta=1e-5))
    1.0

    Args:
        epsilon: Certified interval.
        delta: Failure probability of the guarantee.
        notion: Differential privacy, per-instance privacy cost, or Fisher information loss.
        neighbours: Adjacency relation.
        unit: Unit of privacy, in words.
        basis: `proved`, or `published` for a claim of a paper without a valid proof.
        arithmetic: `proved` if the proof covers rounding; `assumed` if it is for real-number arithmetic.
        randomness: `secret` if the noise comes from the operating system; `seeded` if from a given seed.
        records: Number of records or users, if known. The text flags a delta above one over this number.
        sensitive: Whether the values depend on the records and must not be published.
    """

    epsilon: Bound = field(metadata=nested(Bound))
    delta: float = field(metadata=DELTA)
    notion: Literal["dp", "per-instance", "fisher"] = "dp"
    neighbours: Neighbours = field(default=Neighbours.ZERO_OUT, metadata=_RELATION)
    unit: str = "one record"
    basis: Literal["proved", "published"] = "proved"
    arithmetic: Arithmetic = "proved"
    randomness: Secrecy = "secret"
    records: int | None = field(default=None, compare=False)
    sensitive: bool = False

    def __float__(self) -> float:
        return self.epsilon.upper

    def __str__(self) -> str:
        access = "sensitive: do not publish" if self.sensitive else "publishable"
        basis = "proved" if self.basis == "proved" else "as its paper claims, not proved"
        notes = [self.notion, f"{self.neighbours} {self.unit}", basis]
        if self.arithmetic != "proved":
            notes.append("arithmetic: assumed")
        if self.randomness != "secret":
            notes.append("randomness: seeded")
        group, one = _group(self.unit)
        if self.records is not None and self.delta * self.records > group:
            above = f"delta: above {group}/{self.records}, which permits publishing"
            notes.append(f"{above} one {one} of {self.records}")
        epsilon = self.epsilon if self.basis == "proved" else at_most(self.epsilon.upper, 5)
        return f"epsilon {epsilon} at delta {self.delta:g} ({', '.join(notes)}, {access})"
