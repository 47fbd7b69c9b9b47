"""The facts of a run, from its ledger and the files beside it; needs no torch."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hush import __version__
from hush.accounting.attacker.explanation import explain
from hush.accounting.epsilon import compose
from hush.accounting.ledger.ledger import Ledger
from hush.accounting.ledger.reported_delta import reported_delta
from hush.core.best_of import BestOf
from hush.core.errors import CheckpointError, InvalidValue, LedgerError, shorten
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan, proof_note
from hush.core.release import Selective
from hush.core.value import Range
from hush.report.run.facts import AuditFacts, PlanCharge, PublicFile, RunFacts, RunKind, Spent
from hush.training.checks.run import checked_ledger, holds_pate, ledger_at
from hush.training.run_folder import SETTINGS, read_metrics, step_file

_ACCURACY = Range(at_least=0, at_most=1, why="it is a share of right answers", example=0.95)
_POINTS = 24
_KEY = "the key of the noise: as secret as the records"
_FILES = {
    "model.safetensors": (True, "weights of the trained model"),
    "student.safetensors": (True, "weights of the student"),
    "plan.toml": (True, "the plan: sampling, clipping, noise, release"),
    "settings.json": (True, "choices that are in no plan"),
    "tuned.json": (True, "the chosen settings, their noisy score and the guarantee"),
    "ledger.jsonl": (True, "every charge, with a fingerprint or the value of what was released"),
    "anchor.json": (True, "which ledger is the run's"),
    "metrics.jsonl": (True, "epsilon so far, and measurements on records without protection"),
    "checkpoint.safetensors": (False, _KEY),
    "private.json": (False, "the number of private records"),
    "teachers": (False, "models trained without noise: as secret as the records"),
    "unfinished.secret": (False, "trials of a selection that is not finished"),
}


def run_facts(
    path: Path, *, delta: float | None = None, baseline: float | None = None, audit: Path | None = None
) -> RunFacts:
    """The facts of a run's report.

    Args:
        path: folder of a run of `hush.train`, `hush.tune`, `hush train`, `hush tune` or `hush pate`; or
            a ledger, for steps of your own.
        delta: of the guarantee; None: the run's own.
        baseline: accuracy without privacy on the same records without protection, where it is known.
        audit: what `hush audit --json` printed for this run; the report is sensitive then.

    Raises:
        LedgerError: the ledger is missing, damaged, void or empty, or does not fit the files beside it.
    """
    if baseline is not None:
        baseline = _ACCURACY.check("baseline", baseline)
    folder = path if path.is_dir() else None
    if folder is None and not path.exists():
        raise LedgerError(
            f"there is no {path}: what was spent is not known. Name the folder of a run, or a ledger."
        )
    ledger, notes = ledger_at(path) if folder is None else checked_ledger(folder)
    if not ledger.counts:
        raise LedgerError(
            f"the ledger of {path} has no charge: nothing was released yet, so that there is no "
            "guarantee to report. Name a run that has taken a step."
        )
    chosen, reason = reported_delta(ledger, delta)
    settings = {} if folder is None else _read_object(folder / SETTINGS)
    pate = folder is not None and holds_pate(folder)
    counts = _planned(folder, settings) if folder is not None and pate else dict(ledger.counts)
    # everything is read before anything is computed: a file that is refused is refused at once
    tuned = {} if folder is None else _tuned(folder / "tuned.json")
    metrics = [] if folder is None else read_metrics(folder / "metrics.jsonl")
    audited = None if audit is None else audit_facts(audit, counts)
    stated = ledger.epsilon(chosen)
    composed = compose(counts, chosen, ledger.dimensions, ledger.adjacency)
    guarantee = replace(stated, epsilon=composed.epsilon)
    secure = settings.get("secure")
    results = ("student.safetensors",) if pate else ("model.safetensors", "tuned.json")
    return RunFacts(
        name=(path if folder is not None else path.parent).resolve().name or str(path),
        kind="PATE" if pate else _kind(counts, folder),
        version=__version__,
        guarantee=guarantee,
        adjacency=ledger.adjacency,
        explanation=explain(guarantee, counts, ledger.dimensions, ledger.adjacency),
        plans=tuple(_plan_charges(counts, chosen, ledger)),
        build_up=tuple(_build_up(ledger, chosen)),
        metrics=tuple(metrics),
        baseline=baseline,
        settings=settings,
        tuned=tuned,
        secure=secure if isinstance(secure, bool) else None,
        finished=folder is None or any((folder / name).exists() for name in results),
        notes=(reason, *notes),
        files=tuple(_files(path)),
        audit=audited,
    )


def _kind(counts: Mapping[Plan, int], folder: Path | None) -> RunKind:
    if any(isinstance(plan.release, BestOf) for plan in counts):
        return "private selection"
    if folder is None:
        return "ledger"
    selective = any(isinstance(plan.release, Selective) for plan in counts)
    return "selective training" if selective else "training"


def _planned(folder: Path, settings: Mapping[str, Any]) -> dict[Plan, int]:
    """Tests and answers that a PATE run may have, fixed beforehand.

    How many there were follows from what was released, so the guarantee is of all of them:
    docs/guarantees/argmax.md, 3.
    """
    try:
        planned = [(Plan.from_plain(each["plan"]), each["steps"]) for each in settings["planned"]]
        if all(type(steps) is int and steps > 0 for _, steps in planned):
            return dict(planned)
        reason = "numbers of tests and answers are whole"
    except (KeyError, TypeError, ValueError) as error:
        reason = shorten(str(error), 200)
    raise CheckpointError(
        f"{folder / SETTINGS} does not say how many tests and answers were planned ({reason}), and what "
        "was charged may be less than the guarantee is for. Run `hush pate` anew with this version, or "
        f"ask for the charges alone: hush account {folder}"
    )


def _plan_charges(counts: Mapping[Plan, int], delta: float, ledger: Ledger) -> list[PlanCharge]:
    return [
        PlanCharge(
            plan=plan,
            steps=steps,
            alone=compose({plan: steps}, delta, ledger.dimensions, ledger.adjacency).epsilon,
            proof=proof_note(plan),
        )
        for plan, steps in counts.items()
    ]


def _build_up(ledger: Ledger, delta: float) -> list[Spent]:
    """Epsilon of the first charges on a ledger, for numbers of them that are evenly spread."""
    total = sum(ledger.counts.values())
    points = sorted({max(1, round(total * k / _POINTS)) for k in range(_POINTS + 1)})
    spent, counts, done = list[Spent](), Counter[Plan](), 0
    for plan, steps in ledger.sequence:
        for point in [point for point in points if done < point <= done + steps]:
            now = counts + Counter({plan: point - done})
            bound = compose(now, delta, ledger.dimensions, ledger.adjacency).epsilon
            spent.append(Spent(charges=point, epsilon=bound))
        counts[plan] += steps
        done += steps
    return spent


def _files(path: Path) -> list[PublicFile]:
    """Files beside the ledger that hush writes, in the order of `_FILES`."""
    if not path.is_dir():
        ledger = PublicFile(name=path.name, publishable=True, holds=_FILES["ledger.jsonl"][1])
        secret = step_file(path)
        states = [PublicFile(name=secret.name, publishable=False, holds=_KEY)] if secret.exists() else []
        return [ledger, *states]
    return [
        PublicFile(name=name + "/" * (path / name).is_dir(), publishable=publishable, holds=holds)
        for name, (publishable, holds) in _FILES.items()
        if (path / name).exists()
    ]


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
        reason = "" if isinstance(value, dict) else "it holds no object"
    except (OSError, ValueError, RecursionError) as error:
        reason = shorten(str(error), 200)
    if reason:
        raise CheckpointError(
            f"{path} cannot be read ({reason}): a report would leave out what the run was made with. "
            "Restore it, or move it away to report on the charges alone."
        )
    return dict(value)


def _tuned(path: Path) -> dict[str, Any]:
    """Chosen settings and score of a selection; empty where there was none."""
    facts = _read_object(path)
    if facts and not isinstance(facts.get("settings"), dict):
        raise CheckpointError(
            f"{path} has no settings: what the selection chose is not known. Restore the file that "
            "`hush tune` left, or move it away to report on the charges alone."
        )
    return facts


def audit_facts(path: Path, counts: Mapping[Plan, int]) -> AuditFacts:
    """The result of an audit, held against the run that it is reported for.

    Args:
        path: what `hush audit --json` printed.
        counts: steps of each plan that the run was charged for.
    """
    said = _read_object(path)
    try:
        charge = Guarantee.from_plain(said["charge"])
        found = AuditFacts(
            lower_bound=float(said["lower_bound"]),
            confidence=float(said["confidence"]),
            charge=charge.epsilon.upper,
            exceeded=float(said["lower_bound"]) > charge.epsilon.upper,
            kind=str(said["kind"]),
            canaries=int(said["canaries"]),
            runs=int(said["runs"]),
            steps=int(said["steps"]),
        )
        plan = Plan.from_plain(said["plan"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(
            f"{path} is not what an audit printed ({shorten(str(error), 200)}): what it found is not "
            "known. Write it with `hush audit RUN_DIR --json > audit.json`."
        ) from None
    if counts.get(plan) != found.steps:
        raise InvalidValue(
            f"{path} is of an audit of {found.steps} steps of {plan}, and the run was charged for "
            "others: its bound says nothing of this run. Audit this run, or leave --audit out."
        )
    return found
