"""The facts of a run's report: one value, from which both the page and the JSON come."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from hush.accounting.attacker.explanation import FALSE_POSITIVE_RATES, PRIORS, Explanation
from hush.accounting.attacker.trade_off import MIN_ERROR_RATE
from hush.core.guarantee import Adjacency, Bound, Guarantee
from hush.core.plan import Plan
from hush.core.value import as_float, finite_or_none

Trained = Literal["training", "selective training"]
RunKind = Trained | Literal["private selection", "PATE", "ledger"]


@dataclass(frozen=True, kw_only=True)
class PlanCharge:
    """What one plan of a run was charged for, and what that would cost alone."""

    plan: Plan
    steps: int
    alone: Bound
    """Epsilon of these steps alone, at the run's delta."""
    proof: str
    """Page of docs/guarantees."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Epsilon of the first charges on the ledger."""

    charges: int
    epsilon: Bound


@dataclass(frozen=True, kw_only=True)
class AuditFacts:
    """Lower bound on epsilon that `hush audit` found (sensitive)."""

    lower_bound: float
    confidence: float
    charge: float
    """Epsilon that is charged for what the audit trained, and that the bound is held against."""
    exceeded: bool
    kind: str
    canaries: int
    runs: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class PublicFile:
    """A file of the run's folder, and whether it may be published."""

    name: str
    publishable: bool
    holds: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that a report says of a run, as numbers and names."""

    name: str
    kind: RunKind
    version: str
    """Of hush, which wrote the report."""
    guarantee: Guarantee
    adjacency: Adjacency
    explanation: Explanation
    plans: tuple[PlanCharge, ...]
    build_up: tuple[Spent, ...]
    metrics: tuple[Mapping[str, Any], ...]
    """Lines of metrics.jsonl: measured on records without protection."""
    baseline: float | None
    """Accuracy without privacy, where it is known."""
    settings: Mapping[str, Any]
    """settings.json: choices that are in no plan; empty where there is no such file."""
    tuned: Mapping[str, Any]
    """Chosen settings and their score, of a private selection."""
    secure: bool | None
    """Whether all randomness came from the operating system; None: not recorded."""
    finished: bool
    notes: tuple[str, ...]
    """What the ledger was checked against."""
    files: tuple[PublicFile, ...]
    audit: AuditFacts | None

    @property
    def epsilon(self) -> Bound:
        """Certified interval for epsilon."""
        return self.guarantee.epsilon

    @property
    def one(self) -> str:
        """One unit of privacy, as a word: "record" or "user"."""
        return "record" if self.adjacency.per_unit is None else "user"

    @property
    def charges(self) -> int:
        """Number of charges that the guarantee covers."""
        return sum(charge.steps for charge in self.plans)

    @property
    def measured(self) -> list[tuple[float, float]]:
        """Epsilon so far and accuracy on records without protection, of each evaluation."""
        pairs = [
            (as_float(entry.get("epsilon")), as_float(entry.get("accuracy"))) for entry in self.metrics
        ]
        return [pair for pair in pairs if all(map(math.isfinite, pair))]

    @property
    def accuracy(self) -> float | None:
        """Newest accuracy on records without protection; None if none was measured."""
        return self.measured[-1][1] if self.measured else None

    @property
    def auditable(self) -> bool:
        """Whether `hush audit` can train this run again: of single records, by `hush train`."""
        return "data" in self.settings and self.kind in get_args(Trained) and self.one == "record"

    def to_plain(self) -> dict[str, Any]:
        """The facts as plain data; numbers that are not finite are None."""
        meaning = self.explanation
        profile, curve = asdict(meaning.profile), asdict(meaning.trade_off)
        gaussian = {"mu": curve.pop("mu"), "regret": curve.pop("regret")}
        plain = {
            "name": self.name,
            "kind": self.kind,
            "hush": self.version,
            "sensitive": self.audit is not None,
            "guarantee": self.guarantee.to_plain(),
            "adjacency": self.adjacency.to_plain(),
            "false_positive_rates": list(FALSE_POSITIVE_RATES),
            "attack": _listed(asdict(meaning.attack)),
            "from_epsilon": _listed(asdict(meaning.from_epsilon)),
            "posteriors": {"priors": list(PRIORS), "posteriors": list(meaning.posteriors)},
            "gaussian": {**gaussian, "min_error_rate": MIN_ERROR_RATE},
            "privacy_profile": _listed(profile),
            "trade_off": _listed(curve),
            "plans": [
                {
                    "plan": charge.plan.to_plain(),
                    "steps": charge.steps,
                    "epsilon_alone": charge.alone.to_plain(),
                    "proof": charge.proof,
                }
                for charge in self.plans
            ],
            "build_up": [
                {"charges": spent.charges, "epsilon": spent.epsilon.to_plain()}
                for spent in self.build_up
            ],
            "metrics": [dict(entry) for entry in self.metrics],
            "accuracy": {"private": self.accuracy, "without_privacy": self.baseline},
            "settings": dict(self.settings),
            "tuned": dict(self.tuned),
            "secure": self.secure,
            "finished": self.finished,
            "ledger_notes": list(self.notes),
            "files": [asdict(file) for file in self.files],
            "audit": None if self.audit is None else asdict(self.audit),
        }
        checked: dict[str, Any] = finite_or_none(plain)
        return checked


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    """Plain data with lists in place of tuples, as it is read back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
