"""Files of a run, and checks that they are consistent with the ledger; imports without torch."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from hush.accounting.ledger import Ledger
from hush.core.atomic_files import check_folder, file_named, replace_file
from hush.core.errors import CheckpointError, HushError, InvalidPlan, LedgerError
from hush.core.guarantee import Adjacency, Guarantee
from hush.core.plan import Plan, read_plan, write_plan
from hush.core.value import finite_or_none

ANCHOR = "anchor.json"
SETTINGS = "settings.json"
TUNED = "tuned.json"
_LEDGER, _PLAN, _CHECKPOINT = "ledger.jsonl", "plan.toml", "private/checkpoint.safetensors"
_PER_INSTANCE = "private/per_instance.npz"
_OF_TRAINING = _PLAN, ANCHOR, _CHECKPOINT
_ALONE = (
    "there is no checkpoint to compare the ledger with: if it is an old copy, the newest charges may "
    "be missing"
)
_PATE = "a PATE run has no checkpoint to compare the ledger with, so the newest charges may be missing"


def step_file(ledger: Path) -> Path:
    """File of secret step states for checkpoints of other libraries, which do not upload this name."""
    return ledger.with_name(f"_{ledger.name}.secret")


class RunFolder:
    """Folder with the files of one run; raises if the run cannot start or continue in it.

    `plan.toml`, `settings.json` (options outside the plan), `ledger.jsonl`, `anchor.json` (identity of
    the run's ledger), `metrics.jsonl` and `model.safetensors` may be published. The folder `private` is
    secret. It contains `checkpoint.safetensors` (with the state of the generator) and
    `per_instance.npz`.
    """

    def __init__(
        self, path: Path, plan: Plan, *, resume: bool, settings: dict[str, Any] | None = None
    ) -> None:
        self.path, self.weights = path, path / "model.safetensors"
        self.ledger, self.checkpoint = path / _LEDGER, path / _CHECKPOINT
        self._metrics, self._plan = path / "metrics.jsonl", path / _PLAN
        self._anchor, self._settings = path / ANCHOR, path / SETTINGS
        self._chosen = json.loads(json.dumps(settings))
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        self._first = not self.ledger.exists()
        if resume and not path.is_dir():
            raise CheckpointError(
                f"there is no run in {path} to resume. Check the name, or start a new run."
            )
        check_folder("directory", self._made[-1].parent if self._made else path)
        if not self._plan.exists():
            return
        if not resume:
            raise CheckpointError(
                f"{path} already holds a run: starting again would spend its budget a second time. "
                "Resume it (--resume), or use another directory (--run-dir)."
            )
        if self._chosen is not None:
            check_settings(path, self._chosen)
        stored = read_plan(self._plan)
        if stored != plan:
            raise InvalidPlan(
                f"{self._plan} differs from the current plan "
                f"({differing_settings(stored.to_plain(), plan.to_plain())}): a run has one plan, and "
                "calibrated noise depends on the budget and the steps. Resume with the stored plan "
                f"(--plan {self._plan}), or use another directory."
            )
        if not self.ledger.exists():
            raise LedgerError(
                f"{path} contains a run without its ledger: its privacy cost is unknown. Restore "
                "ledger.jsonl, because a new ledger would not include this cost."
            )

    def check_ledger(self, ledger: Ledger, *, reseed: bool = False) -> None:
        """Raise if the ledger was replaced, or if it has charges but the checkpoint is missing.

        With `reseed`, a run may start again without its checkpoint, with new noise and new charges.
        """
        if self._plan.exists():
            check_anchor(self._anchor, ledger.identity)
        if ledger.counts and not self.checkpoint.exists() and not reseed:
            raise CheckpointError(
                f"{self.ledger} has charges of {sum(ledger.counts.values())} steps, but "
                f"{self.checkpoint.name} is missing: repeated steps must have the same noise. Restore "
                "it, or pass reseed=True (--reseed) to start again with new noise and more charges."
            )

    @contextmanager
    def cleanup_on_failure(self) -> Iterator[None]:
        """Context that removes the empty ledger if a run fails before its plan is written."""
        try:
            yield
        except BaseException:
            if self._first and not self._plan.exists():
                for path in (self.ledger, self._anchor, self._settings):
                    path.unlink(missing_ok=True)
                for folder in self._made:
                    with suppress(OSError):
                        folder.rmdir()
            raise

    def begin(self, plan: Plan, ledger: Ledger) -> None:
        """Write the anchor, the settings and, last, the plan, which marks the folder of a run."""
        # after the loss of a checkpoint, remove the metrics of steps that will be repeated
        self._metrics.unlink(missing_ok=True)
        replace_file(self._anchor, (json.dumps({"ledger": ledger.identity}) + "\n").encode())
        if self._chosen is not None:
            replace_file(self._settings, (json.dumps(self._chosen) + "\n").encode())
        write_plan(plan, self._plan)

    def metrics(self, up_to: int) -> list[dict[str, Any]]:
        """Read the metrics up to a step, and remove later metrics from the file."""
        stored = [entry for entry in read_metrics(self._metrics) if entry["step"] <= up_to]
        if self._metrics.exists():
            replace_file(self._metrics, "".join(map(metrics_line, stored)).encode())
        return stored

    def write_per_instance(self, numbers: Mapping[str, npt.ArrayLike]) -> None:
        """Write the per-instance costs of the records, with read access only for the file's owner."""
        content = BytesIO()
        np.savez(content, allow_pickle=False, **{name: np.asarray(numbers[name]) for name in numbers})
        replace_file(self.path / _PER_INSTANCE, content.getvalue(), secret=True)

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append an entry to the metrics."""
        torn = "its last line may be incomplete, and a resumed run writes it again"
        with file_named(self._metrics, torn), self._metrics.open("a") as file:
            file.write(metrics_line(entry))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Metrics in a file, without an incomplete last line; empty if the file does not exist."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        entries = [json.loads(line) for line in lines]
    except ValueError as error:
        raise CheckpointError(
            f"{path} has an invalid line ({error}). Delete the line, or the file, and resume."
        ) from None
    return [{name: math.nan if value is None else value for name, value in e.items()} for e in entries]


def metrics_of(step: int, guarantee: Guarantee, **measured: Any) -> dict[str, Any]:
    """Entry of `metrics.jsonl`: the guarantee and public metrics."""
    return {
        "step": step,
        "epsilon": guarantee.epsilon.upper,
        "delta": guarantee.delta,
        "neighbours": str(guarantee.neighbours),
        "unit": guarantee.unit,
        **measured,
    }


def metrics_line(entry: dict[str, Any]) -> str:
    """Line of `metrics.jsonl`; numbers that are not finite are written as null, and read as NaN."""
    return json.dumps(finite_or_none(entry)) + "\n"


def check_settings(folder: Path, requested: dict[str, Any]) -> None:
    """Raise unless the run in a folder has these settings (plain data)."""
    path = folder / SETTINGS
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Restore it, or start a new run in a new directory."
        ) from None
    if stored != requested:
        raise CheckpointError(
            f"the run in {path} has other settings ({differing_settings(stored, requested)}). Resume "
            "with the same settings, or use another directory. If a setting was removed in a newer "
            "version and does not affect the run, delete it from the file."
        )


def differing_settings(stored: Any, present: Any, place: str = "") -> str:
    """Settings that differ between a stored run and the current one, with both values."""
    if not isinstance(stored, dict) or not isinstance(present, dict):
        return "" if stored == present else f"{place} was {stored} and is now {present}"
    pairs = {
        name: (stored.get(name, "not set"), present.get(name, "not set")) for name in stored | present
    }
    prefix = f"{place}." if place else ""
    return ", ".join(filter(None, (differing_settings(*pairs[name], prefix + name) for name in pairs)))


def check_anchor(anchor: Path, identity: str) -> None:
    """Raise unless the identity is the identity of the run's original ledger."""
    try:
        began_with = json.loads(anchor.read_bytes())["ledger"]
    except (OSError, ValueError, KeyError) as error:
        raise LedgerError(
            f"{anchor} cannot be read ({error}), so a replaced ledger would not be detected. Restore "
            "it, or start a new run in a new directory."
        ) from None
    if began_with != identity:
        raise LedgerError(
            f"the ledger beside {anchor} has the identity {identity} instead of {began_with}: it was "
            "replaced, and does not contain the charges of the run. Restore ledger.jsonl."
        )


def checked_ledger(path: Path) -> tuple[Ledger, list[str]]:
    """Open the ledger of a run read-only, and compare it with the other files of the run.

    Args:
        path: Folder of a run, or ledger file.

    Returns:
        The ledger, and notes on the comparison.

    Raises:
        LedgerError: The ledger is missing, or inconsistent with the other files.
    """
    folder, file = (path, path / _LEDGER) if path.is_dir() else (path.parent, path)
    if not file.is_file():
        runs = ", ".join(sorted(str(each.parent) for each in path.glob(f"*/{_LEDGER}")))
        raise LedgerError(
            f"there is no ledger at {file}: the privacy cost is unknown. Pass a run's folder"
            f"{f' ({runs})' if runs else ''} or a ledger, or restore the file."
        )
    if path.is_dir() and not any((folder / each).exists() for each in (*_OF_TRAINING, SETTINGS)):
        raise LedgerError(
            f"{folder} has a {_LEDGER}, but no other files of hush.train: the newest charges may be "
            f"missing. Restore the files; for the ledger of your own loop, pass --ledger {file}"
        )
    ledger = Ledger(file, read_only=True)
    if file.name == _LEDGER and holds_pate(folder):
        return ledger, [_PATE]
    if not path.is_dir() and (file.name != _LEDGER or not (folder / ANCHOR).exists()):
        return ledger, [_ALONE]
    stored = folder / _CHECKPOINT
    try:
        plan = read_plan(folder / _PLAN)
        check_anchor(folder / ANCHOR, ledger.identity)
        stored.open("rb").close()  # safetensors' errors do not contain the reason
        with safetensors.safe_open(stored, framework="numpy") as tensors:
            state = dict(dict(json.loads(tensors.metadata()["state"])["dict"])["step"]["dict"])
        if state["plan"] != plan.digest:
            raise LedgerError(f"{stored} has a different plan than plan.toml, {plan}. Restore it.")
        ledger.check_charged(state["charged_run"], state["steps"], state["ledger"])
        if state["steps"] and plan not in ledger.counts:
            raise LedgerError(f"{file} has no charge of plan.toml, {plan}. Restore plan.toml.")
    except HushError as error:
        raise LedgerError(f"the files of the run in {folder} are inconsistent: {error}") from None
    except (FileNotFoundError, PermissionError) as error:
        if (folder / TUNED).exists():
            return ledger, ["fits its plan and anchor (a selection has one charge and no checkpoint)"]
        return ledger, [
            f"fits its plan and anchor; not compared with the checkpoint ({error.strerror}), so the "
            "newest charges may be missing"
        ]
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise LedgerError(
            f"{stored} is damaged ({error}), so the newest charges may be missing. Restore it, or "
            "remove it to account for the ledger alone."
        ) from None
    return ledger, [f"fits its plan, anchor and checkpoint (of step {state['steps']})"]


def holds_pate(folder: Path) -> bool:
    """Whether a folder contains a PATE run, which has no plan, anchor or checkpoint."""
    if any((folder / name).exists() for name in _OF_TRAINING) or not (folder / SETTINGS).exists():
        return False
    return {"teachers", "query"} <= set(json.loads((folder / SETTINGS).read_bytes()))


def open_ledger(
    ledger: Ledger | str | os.PathLike[str] | None, plan: Plan, adjacency: Adjacency
) -> Ledger:
    """Open a ledger for charges under this adjacency; raise if a ledger at a path has another plan."""
    opened = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    charged = [] if opened is ledger else [each for each in opened.counts if each != plan]
    try:
        if charged:
            raise LedgerError(
                f"the ledger {ledger} has charges of another plan, {charged[0]}. To combine several "
                "plans, pass ledger=hush.Ledger(path)."
            )
        opened.check_adjacency(adjacency)
    except LedgerError:
        if opened is not ledger:
            opened.close()
        raise
    return opened
