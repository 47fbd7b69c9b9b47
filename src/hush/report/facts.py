"""Facts of a privacy report, from the ledger and other files of a run; imports without torch."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hush.accounting.epsilon import compose
from hush.accounting.explanation import FALSE_POSITIVE_RATES, MIN_ERROR_RATE, Explanation, explain
from hush.accounting.ledger import reported_delta
from hush.core.errors import CheckpointError, LedgerError, shorten
from hush.core.guarantee import Adjacency, Bound, Guarantee, percent
from hush.core.plan import Plan, proof_note
from hush.core.release import BestOf, Selective
from hush.core.value import Range, as_float
from hush.training.run_folder import SETTINGS, checked_ledger, holds_pate, read_metrics, step_file

_ACCURACY = Range(at_least=0, at_most=1, why="it is a fraction of correct answers", example=0.95)
_KEY = "the secret key of the noise"
_FILES = {
    "model.safetensors": (True, "weights of the trained model"),
    "student.safetensors": (True, "weights of the student"),
    "plan.toml": (True, "the plan: sampling, clipping, noise, release"),
    "settings.json": (True, "options outside the plan"),
    "tuned.json": (True, "the selected hyperparameters, their noisy score and the guarantee"),
    "ledger.jsonl": (True, "all charges, with a fingerprint or the value of each release"),
    "anchor.json": (True, "identity of the run's ledger"),
    "metrics.jsonl": (True, "epsilon spent so far, and metrics on unprotected records"),
    "private": (False, f"{_KEY}; per-instance costs, if requested"),
    "checkpoint.safetensors": (False, _KEY),
    "per_instance.npz": (False, "per-instance costs: as secret as the records"),
    "private.json": (False, "the number of private records"),
    "teachers": (False, "models trained without noise: as secret as the records"),
}


@dataclass(frozen=True, kw_only=True)
class PlanCharge:
    """Number of steps of a plan on the ledger, the epsilon of these steps alone, and the proof page."""

    plan: Plan
    steps: int
    epsilon_alone: Bound
    proof: str


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """File in the folder of a run, and whether it may be published."""

    name: str
    publishable: bool
    holds: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Contents of a report."""

    name: str
    kind: str
    """"training", "selective training", "private selection", "PATE" or "ledger"."""
    guarantee: Guarantee
    """Proved guarantee, even if the run used published accounting."""
    adjacency: Adjacency
    explanation: Explanation
    """Attack bounds."""
    plans: tuple[PlanCharge, ...]
    metrics: tuple[Mapping[str, Any], ...]
    """Lines of metrics.jsonl, which are measured on unprotected records."""
    baseline: float | None
    """Accuracy without privacy."""
    settings: Mapping[str, Any]
    tuned: Mapping[str, Any]
    """Hyperparameters and score of the best trial of a private selection."""
    finished: bool
    notes: tuple[str, ...]
    """Results of verifying the ledger."""
    files: tuple[RunFile, ...]

    @property
    def one(self) -> str:
        return "record" if self.adjacency.per_unit is None else "user"

    @property
    def measured(self) -> list[tuple[float, float]]:
        """Epsilon spent so far and accuracy, for each evaluation."""
        names = ("epsilon", "accuracy")
        pairs = [tuple(as_float(line.get(name)) for name in names) for line in self.metrics]
        return [(spent, share) for spent, share in pairs if math.isfinite(spent + share)]

    @property
    def accuracy(self) -> float | None:
        """Latest accuracy on unprotected records."""
        return self.measured[-1][1] if self.measured else None


def explanation_facts(meaning: Explanation) -> dict[str, Any]:
    """Attack bounds and the mu of Gaussian DP, as plain data."""
    return {
        "false_positive_rates": FALSE_POSITIVE_RATES,
        "attack": asdict(meaning.attack),
        "from_epsilon": asdict(meaning.from_epsilon),
        "gaussian": {"mu": meaning.trade_off.mu, "min_error_rate": MIN_ERROR_RATE},
    }


def attack_rows(meaning: Explanation) -> list[list[str]]:
    """Table of attack bounds: name, upper bound, and upper bound from epsilon and delta alone."""
    columns = (meaning.attack, meaning.from_epsilon)
    rows = [
        ["attacker's success, starting from 50%", *(percent(each.posterior) for each in columns)],
        ["advantage: true minus false positive rate", *(percent(each.advantage) for each in columns)],
    ]
    for k, rate in enumerate(FALSE_POSITIVE_RATES):
        found = (percent(each.true_positive_rates[k]) for each in columns)
        rows.append([f"true positive rate at {100 * rate:g}% false positives", *found])
    return rows


def proved_counts(counts: Mapping[Plan, int]) -> dict[Plan, int]:
    """Steps with published accounting replaced by proved accounting."""
    proved: Counter[Plan] = Counter()
    for plan, steps in counts.items():
        if isinstance(plan.release, Selective) and plan.release.accounting == "published":
            plan = replace(plan, release=replace(plan.release, accounting="per-acceptance"))
        proved[plan] += steps
    return dict(proved)


def run_facts(path: Path, *, delta: float | None = None, baseline: float | None = None) -> RunFacts:
    """Facts for the report on a run or a ledger.

    Args:
        path: Folder of a run, or a ledger file.
        delta: Delta of the guarantee; by default the run's own.
        baseline: Accuracy without privacy on the same evaluation records.
    """
    if baseline is not None:
        baseline = _ACCURACY.check("baseline", baseline)
    folder = path if path.is_dir() else None
    ledger, notes = checked_ledger(path)
    if not ledger.counts:
        raise LedgerError(f"the ledger of {path} has no charge. Pass a run with at least one step.")
    chosen, reason = reported_delta(ledger, delta)
    settings = {} if folder is None else _read_object(folder / SETTINGS)
    pate = folder is not None and holds_pate(folder)
    counts = _planned(folder, settings) if folder is not None and pate else proved_counts(ledger.counts)

    def epsilon(of: Mapping[Plan, int]) -> Bound:
        return compose(of, chosen, ledger.dimensions, ledger.adjacency).epsilon

    guarantee = ledger.epsilon(chosen)
    if guarantee.basis != "proved":
        claim = "the run used published accounting; all numbers of this report use proved accounting"
        notes = [claim, *notes]
    guarantee = replace(guarantee, epsilon=epsilon(counts), basis="proved")
    releases = {type(plan.release) for plan in counts}
    kind = "ledger" if folder is None else "selective training" if Selective in releases else "training"
    if pate or BestOf in releases:
        kind = "PATE" if pate else "private selection"
    results = ("student.safetensors",) if pate else ("model.safetensors", "tuned.json")
    return RunFacts(
        name=(folder or path.parent).resolve().name or str(path),
        kind=kind,
        guarantee=guarantee,
        adjacency=ledger.adjacency,
        explanation=explain(guarantee, counts, ledger.dimensions, ledger.adjacency),
        plans=tuple(
            PlanCharge(plan=plan, steps=n, epsilon_alone=epsilon({plan: n}), proof=proof_note(plan))
            for plan, n in counts.items()
        ),
        metrics=() if folder is None else tuple(read_metrics(folder / "metrics.jsonl")),
        baseline=baseline,
        settings=settings,
        tuned={} if folder is None else _read_object(folder / "tuned.json"),
        finished=folder is None or any((folder / name).exists() for name in results),
        notes=(reason, *notes),
        files=tuple(_files(path)),
    )


def _planned(folder: Path, settings: Mapping[str, Any]) -> dict[Plan, int]:
    """Planned tests and answers of a PATE run.

    The number of answers depends on the records, so the guarantee covers all planned charges
    (docs/guarantees/argmax.md, step 3).
    """
    try:
        return {Plan.from_plain(each["plan"]): int(each["steps"]) for each in settings["planned"]}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / SETTINGS} does not list the planned tests and answers "
            f"({shorten(str(error), 200)}), which the guarantee also covers. Run `hush pate` again "
            f"with this version, or report the charges alone: hush account {folder}"
        ) from None


def _files(path: Path) -> list[RunFile]:
    """Files of the run that are written by hush, in the order of `_FILES`."""
    if not path.is_dir():
        secret = step_file(path)
        states = [RunFile(name=secret.name, publishable=False, holds=_KEY)] if secret.exists() else []
        return [RunFile(name=path.name, publishable=True, holds=_FILES["ledger.jsonl"][1]), *states]
    return [
        RunFile(name=name + "/" * (path / name).is_dir(), publishable=publishable, holds=holds)
        for name, (publishable, holds) in _FILES.items()
        if (path / name).exists()
    ]


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist."""
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({shorten(str(error), 200)}), so the report would omit the settings "
            "of the run. Restore it, or remove it to report the charges alone."
        ) from None
