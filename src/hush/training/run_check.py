"""A run's ledger held against the plan, the anchor and the checkpoint beside it; needs no torch."""

import json
from pathlib import Path
from typing import Any

import safetensors

from hush.accounting.ledger import Ledger
from hush.core.errors import HushError, LedgerError
from hush.core.plan import Plan, read_plan
from hush.training.run_folder import ANCHOR, SETTINGS, anchored_ledger, check_anchor

_NAME = "ledger.jsonl"
_OF_A_RUN = ("plan.toml", ANCHOR, SETTINGS, "checkpoint.safetensors")
_PATE = "of a PATE run, whose answers are on the ledger alone, so that the newest charges may be missing"


def checked_ledger(folder: Path) -> tuple[Ledger, list[str]]:
    """The ledger of a run, read-only, and notes on what it was checked against.

    Args:
        folder: the run's directory, as `hush.train`, `hush train` or `hush pate` wrote it.

    Raises:
        LedgerError: something does not fit; the error says all that does not.
    """
    ledger = folder / _NAME
    if not ledger.is_file():
        raise LedgerError(
            f"{folder} has no {_NAME}: what was spent is not known. Name the folder of a run, "
            "restore the file, or name a ledger with --ledger FILE."
        )
    if not any((folder / name).exists() for name in _OF_A_RUN):
        raise LedgerError(
            f"{folder} has a {_NAME} and no other file of a run of hush.train: there is nothing to hold "
            "it against, so that the newest charges may be missing. Restore the files; or name the "
            f"ledger alone, as those of PrivateTrainer, Lightning and loops of your own are: {ledger}"
        )
    opened = Ledger(ledger, read_only=True)
    return opened, [_PATE] if holds_pate(folder) else _fits(folder, opened)


def ledger_at(path: Path) -> tuple[Ledger, list[str]]:
    """A ledger by its file, read-only, and notes; where a run is beside it, checked as the run's.

    Args:
        path: the file. Under a name of its own in a run's folder it is checked if the anchor names it.

    Raises:
        LedgerError: there is none, or it does not fit the run beside it.
    """
    if path.is_dir():
        raise LedgerError(
            f"{path} is a folder, and a ledger is a file. For a run's folder: hush account {path}"
        )
    if not path.exists():
        raise LedgerError(
            f"there is no ledger at {path}: what was spent is not known. Name the ledger.jsonl of a run."
        )
    opened, folder = Ledger(path, read_only=True), path.parent
    anchor = folder / ANCHOR
    # under another name it may be a copy of the run's ledger, or one that has nothing to do with it
    if anchor.exists() and (path.name == _NAME or anchored_ledger(anchor) == opened.identity):
        return opened, _fits(folder, opened)
    if path.name == _NAME and holds_pate(folder):
        return opened, [_PATE]
    return opened, ["no run of this ledger is beside it, so that the newest charges may be missing"]


def holds_pate(folder: Path) -> bool:
    """Whether a folder is of a PATE run, with no plan, anchor or checkpoint."""
    if any((folder / name).exists() for name in ("plan.toml", ANCHOR, "checkpoint.safetensors")):
        return False
    try:
        settings = json.loads((folder / SETTINGS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and {"teachers", "query"} <= settings.keys()


def _fits(folder: Path, opened: Ledger) -> list[str]:
    """Notes on the comparison of a ledger with the run in a folder; raise where it does not fit."""
    plan, misfits = None, []
    try:
        plan = read_plan(folder / "plan.toml")
    except HushError as error:
        misfits.append(str(error))
    try:
        check_anchor(folder / ANCHOR, opened.identity)
    except HushError as error:
        misfits.append(str(error))
    try:
        notes = _check_checkpoint(folder / "checkpoint.safetensors", opened, plan)
    except HushError as error:
        misfits.append(str(error))
    if misfits:
        raise LedgerError(
            f"{folder} does not fit together:\n" + "\n".join(f"- {misfit}" for misfit in misfits)
        )
    return notes


def _check_checkpoint(path: Path, ledger: Ledger, plan: Plan | None) -> list[str]:
    """Notes on the comparison with the checkpoint; raise where it does not fit."""
    try:
        state = _state(path)
    except (FileNotFoundError, PermissionError) as error:
        return [
            f"fits its plan and anchor; not held against the checkpoint ({error.strerror}), so that the "
            "newest charges may be missing"
        ]
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise LedgerError(
            f"{path} is damaged ({error}): whether the newest charges are missing cannot be told. "
            "Restore it, or move it away to account for the ledger alone."
        ) from None
    if plan is not None and state["plan"] != plan.digest:
        raise LedgerError(
            f"{path} is of a run of another plan than plan.toml, {plan}. Restore the one that was "
            "replaced."
        )
    ledger.check_charged(state["charged_run"], state["steps"], state["ledger"])
    if state["steps"] and plan is not None and plan not in ledger.counts:
        raise LedgerError(f"{ledger.path} has no charge of plan.toml, {plan}. Restore that plan.toml.")
    return [f"fits its plan, anchor and checkpoint (of step {state['steps']})"]


def _state(path: Path) -> dict[str, Any]:
    """The plain values of the step's state in a checkpoint, without the tensors."""
    with path.open("rb"):  # says which of missing and forbidden it is
        pass
    with safetensors.safe_open(path, framework="numpy") as file:
        whole = dict(json.loads(file.metadata()["state"])["dict"])
    state = dict(whole["step"]["dict"])
    return {name: state[name] for name in ("plan", "charged_run", "steps", "ledger")}
