"""Files of a run, the ledger it is charged to, and its last step within the budget; needs no torch."""

import json
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hush.accounting.calibrate import max_steps
from hush.accounting.epsilon import compose
from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import grows_with_dimension
from hush.core.atomic_files import file_named, replace_file
from hush.core.errors import (
    BudgetExceeded,
    CheckpointError,
    HushError,
    InvalidPlan,
    InvalidValue,
    LedgerError,
)
from hush.core.guarantee import Adjacency, Budget, Guarantee
from hush.core.plan import Plan, read_plan, write_plan
from hush.core.value import check_kind, finite_or_none

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

ANCHOR = "anchor.json"
SETTINGS = "settings.json"


def step_file(ledger: Path) -> Path:
    """File of the secret step states that checkpoints of another library refer to.

    Uploads leave out names with an underscore.
    """
    return ledger.with_name(f"_{ledger.name}.secret")


class RunFolder:
    """The files of one run.

    `plan.toml`, `settings.json` (choices that are in no plan), `ledger.jsonl`, `anchor.json` (identity
    of the run's ledger) and `metrics.jsonl` may be read by anyone who may see the model;
    `checkpoint.safetensors` holds the generator and is secret; `model.safetensors` is the result.
    """

    def __init__(
        self, path: Path, plan: Plan, *, resume: bool, settings: dict[str, Any] | None = None
    ) -> None:
        self.ledger = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.weights = path / "model.safetensors"
        self._metrics = path / "metrics.jsonl"
        self._plan = path / "plan.toml"
        self._anchor = path / ANCHOR
        self._settings = path / SETTINGS
        self._chosen = None if settings is None else _as_json(settings)
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        self._first = not self.ledger.exists()
        if resume and not path.is_dir():
            raise CheckpointError(
                f"there is no run in {path} to resume. Check the name, or start without resuming."
            )
        if self._plan.exists():
            self._check(path, plan, resume=resume)

    def _check(self, path: Path, plan: Plan, *, resume: bool) -> None:
        """Raise unless the run in the folder may continue under this plan."""
        if not resume:
            raise CheckpointError(
                f"{path} already holds a run: starting over would spend its budget a second time "
                "without saying so. Resume it, or name another directory."
            )
        if self._chosen is not None:
            check_settings(path, self._chosen)
        stored = read_plan(self._plan)
        if stored != plan:
            raise InvalidPlan(
                f"{self._plan} is another plan than the one to resume with "
                f"({differences(stored, plan)}): a run keeps the plan it was charged for. Resume "
                "with that plan file, or name another directory."
            )
        if not self.ledger.exists():
            raise LedgerError(
                f"{path} contains a run whose ledger is missing: its privacy cost is unknown. Restore "
                "ledger.jsonl: a run in a new directory does not count the charges of this one."
            )

    def check_ledger(self, ledger: Ledger, *, reseed: bool = False) -> None:
        """Raise if the ledger was replaced, or the checkpoint of its charges is missing.

        With `reseed` a run may begin again without its checkpoint: new noise, and new charges.
        """
        if self._plan.exists():
            check_anchor(self._anchor, ledger.identity)
        if ledger.counts and not self.checkpoint.exists() and not reseed:
            raise CheckpointError(
                f"{self.ledger} has charges of {sum(ledger.counts.values())} steps and there is no "
                f"{self.checkpoint.name} to resume from: repeated steps would need its noise. Restore "
                "the file, or pass reseed=True (--reseed) to begin again with new noise: the charges "
                "are kept and the new steps add to them."
            )

    @contextmanager
    def cleanup_on_failure(self) -> Iterator[None]:
        """Remove the ledger, which must be locked, and the folders of a run that failed before it began.

        Such a ledger has no charge: the plan is written before the first.
        """
        try:
            yield
        except BaseException:
            if self._first and not self._plan.exists():
                self.ledger.unlink(missing_ok=True)
                self._anchor.unlink(missing_ok=True)
                if self._chosen is not None:
                    self._settings.unlink(missing_ok=True)
                for folder in self._made:
                    with suppress(OSError):
                        folder.rmdir()
            raise

    def begin(self, plan: Plan, ledger: Ledger) -> None:
        """Write the anchor, the settings and last the plan, which marks a run."""
        self._metrics.unlink(missing_ok=True)  # of steps that are taken again, after a lost checkpoint
        replace_file(self._anchor, (json.dumps({"ledger": ledger.identity}) + "\n").encode())
        if self._chosen is not None:
            replace_file(self._settings, (json.dumps(self._chosen) + "\n").encode())
        write_plan(plan, self._plan)

    def metrics(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """Lines written so far; with `up_to`, later steps are removed from the file."""
        entries = read_metrics(self._metrics)
        stored = [entry for entry in entries if up_to is None or entry["step"] <= up_to]
        if up_to is not None:
            replace_file(self._metrics, "".join(map(_line, stored)).encode())
        return stored

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append one line."""
        torn = "its last line may be cut short, and a resumed run writes it again"
        with file_named(self._metrics, torn), self._metrics.open("a") as file:
            file.write(_line(entry))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Metrics in a file, a dictionary for each evaluation; none if there is no file.

    Args:
        path: metrics.jsonl of a run. A torn last line is left out.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [_measured(path, line, number) for number, line in enumerate(lines, start=1)]


def _measured(path: Path, line: bytes, number: int) -> dict[str, Any]:
    """Metrics of one line."""
    try:
        entry = json.loads(line)
        if type(entry["step"]) is int:
            return {name: math.nan if value is None else value for name, value in entry.items()}
        reason = "its step is no whole number"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error)
    raise CheckpointError(
        f"{path}, line {number}, is not a line that a run writes ({reason}). No charge depends on it: "
        "delete the line, or the file, and resume."
    )


def metrics_line(guarantee: Guarantee, step: int, **measured: Any) -> str:
    """One line of metrics: an epsilon with its context, and measured values.

    Args:
        guarantee: Guarantee of everything charged so far.
        step: Number of steps charged so far.
        measured: Public values by name, or values of records that need no protection.
    """
    return _line({**metrics_of(step, guarantee), **measured})


def metrics_of(step: int, guarantee: Guarantee) -> dict[str, Any]:
    """First entries of a line of metrics: an epsilon with its context."""
    return {
        "step": step,
        "epsilon": guarantee.epsilon.upper,
        "delta": guarantee.delta,
        "neighbours": str(guarantee.neighbours),
        "unit": guarantee.unit,
    }


def _line(entry: dict[str, Any]) -> str:
    """One line of metrics; a number that is not finite is null there and NaN when read back."""
    return json.dumps(finite_or_none(entry)) + "\n"


def differences(stored: Plan, requested: Plan) -> str:
    """Settings in which the plan of a run's folder and another one differ."""
    return _differences(_dotted(stored.to_plain()), _dotted(requested.to_plain()))


def check_settings(folder: Path, requested: dict[str, Any]) -> None:
    """Raise unless the run in a folder began with these settings.

    Args:
        folder: Folder of a run.
        requested: Settings to resume with, as plain data.
    """
    path = folder / SETTINGS
    try:
        stored = json.loads(path.read_bytes())
        reason = "" if isinstance(stored, dict) else "it holds no settings"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    if reason:
        raise CheckpointError(
            f"{path} cannot be read ({reason}): what the run was begun with is not known. Restore the "
            "file, or start a new run in a new directory."
        )
    if stored != requested:
        raise CheckpointError(
            f"{path} is of a run with other settings ({_differences(stored, requested)}). Resume with "
            "the same ones, or name another directory."
        )


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are read back."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(check_kind("settings", settings, dict)))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, HushError):
            raise
        raise InvalidValue(
            f"settings cannot be written as JSON ({error}). Pass a dictionary of numbers, strings, "
            "lists and dictionaries.",
            key="settings",
        ) from None
    return plain


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} is {ours.get(name, 'not set')} there and {theirs.get(name, 'not set')} here"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )


def _dotted(plain: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Settings of a plan by their dotted paths."""
    settings = {}
    for name, value in plain.items():
        inner = _dotted(value, f"{place}{name}.") if isinstance(value, dict) else {place + name: value}
        settings.update(inner)
    return settings


def anchored_ledger(anchor: Path) -> str:
    """Identity of the ledger that a run began with."""
    try:
        return str(json.loads(anchor.read_bytes())["ledger"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{anchor} cannot be read ({error}), so that a ledger which was replaced would go "
            "unnoticed. Restore it, or start a new run in a new directory."
        ) from None


def check_anchor(anchor: Path, identity: str) -> None:
    """Raise unless the ledger of that identity is the one that the run began with."""
    began_with = anchored_ledger(anchor)
    if began_with != identity:
        raise LedgerError(
            f"the ledger beside {anchor} begins with {identity} and the run with {began_with}: it was "
            "replaced, and the charges of the run are not on it. Restore ledger.jsonl: a run in a new "
            "directory does not count them."
        )


def open_ledger(
    ledger: Ledger | str | os.PathLike[str] | None, plan: Plan, adjacency: Adjacency
) -> Ledger:
    """Ledger to charge for these neighbours; one opened by its path must be of this plan alone."""
    opened = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    charged = [] if opened is ledger else [each for each in opened.counts if each != plan]
    try:
        if charged:
            raise LedgerError(
                f"the ledger {ledger} was charged for another plan, {charged[0]}: it does not belong to "
                "this run. To add up several plans, open it yourself: ledger=hush.Ledger(path)."
            )
        opened.check_adjacency(adjacency)
    except LedgerError:
        if opened is not ledger:
            opened.close()
        raise
    return opened


def last_step(
    step: "PrivateStep", budget: Budget, requested: int | None
) -> tuple[int, Literal["steps", "budget"]]:
    """Last step of a run, and whether the requested steps or the budget end it.

    Charged steps after the checkpoint are repeated without a charge, so they always fit. Warns if the
    budget covers fewer steps than requested.
    """
    adjacency = step.adjacency
    charged = max(step.ledger.last_step(step.run), step.steps)
    before, sizes = step.ledger.counts, dict(step.ledger.dimensions)

    def cost(counts: dict[Plan, int]) -> float:
        return compose(counts, budget.delta, sizes, adjacency).epsilon.upper

    once = step.ledger.counts_repeating(step.plan, step.run, charged + 1)
    continues = requested is None or requested > charged
    if once != before and continues and max_steps(step.plan, budget, once, sizes, adjacency):
        before = once  # the next step is charged together with the one that was cut short
    spent = cost(dict(before))
    if spent > budget.epsilon:
        raise BudgetExceeded(
            f"the ledger holds charges of epsilon={spent:.4g} at delta={budget.delta:g}, more than "
            f"the budget of {budget.epsilon:g}: nothing may be added. Pass the budget of the whole run."
        )
    if grows_with_dimension(step.plan):
        sizes[step.plan] = max(step.dimension, sizes.get(step.plan, 0))
    paid = before.get(step.plan, 0)
    if requested is not None:
        counts = {**before, step.plan: paid + max(0, requested - charged)}
        if cost(counts) <= budget.epsilon:
            return requested, "steps"
    limit = charged + max_steps(step.plan, budget, before, sizes, adjacency)
    if limit == 0:
        one = cost({**before, step.plan: paid + 1})
        if before:
            raise BudgetExceeded(
                f"the ledger holds charges of epsilon={spent:.4g} at delta={budget.delta:g}, and one "
                f"step more costs {one:.4g} with what is on the ledger, above the budget of "
                f"{budget.epsilon:g}: runs on the same records add up. Resume the run that was charged, "
                "or raise the budget of all of them together."
            )
        raise BudgetExceeded(
            f"the budget of epsilon={budget.epsilon:g} at delta={budget.delta:g} is below what one "
            f"step costs ({one:.4g}): not even the first step may be taken. Add noise "
            "(hush.calibrate finds how much), lower the sampling rate, or raise the budget."
        )
    if requested is not None:
        options = [f"steps={requested}"]
        if grows_with_dimension(step.plan):
            options.append(f"dimension={step.dimension}")
        if adjacency.replaced:
            options.append("adjacency=hush.Adjacency(neighbours='replace')")
        if any(plan != step.plan for plan in step.ledger.counts):
            options.append("spent=ledger.counts")
        warnings.warn(
            f"steps={requested} were asked for and the run ends after {limit}: one more would cost more "
            f"than the budget of epsilon={budget.epsilon:g} at delta={budget.delta:g} ({adjacency}). "
            f"hush.calibrate(plan, budget, {', '.join(options)}) finds noise for all of them; without "
            "steps= a run continues until the budget is used.",
            UserWarning,
            stacklevel=3,
        )
    return limit, "budget"
