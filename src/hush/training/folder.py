"""What a run leaves on disk, and in which file."""

import json
from pathlib import Path
from typing import Any

from hush.core.durable import replace_file
from hush.core.errors import CheckpointError, InvalidPlan, LedgerError
from hush.core.plan import Plan
from hush.core.plan_file import read_plan, write_plan


class RunFolder:
    """The files of one run (`hush train` adds `settings.json`, the choices that are in no plan).

    `plan.toml`, `ledger.jsonl` and `metrics.jsonl` may be read by anyone who may see the model;
    `checkpoint.safetensors` holds the generator and is secret; `model.safetensors` is the result.
    """

    def __init__(self, path: Path, plan: Plan, *, resume: bool) -> None:
        self.ledger = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.weights = path / "model.safetensors"
        self._metrics = path / "metrics.jsonl"
        self._plan = path / "plan.toml"
        if resume and not path.is_dir():
            raise CheckpointError(
                f"there is no run in {path} to resume: starting one under a mistyped name would pay for "
                "everything again. Check the name, or start the run without resuming."
            )
        if self._plan.exists():
            self._check(path, plan, resume=resume)

    def _check(self, path: Path, plan: Plan, *, resume: bool) -> None:
        """Raise unless the run that is there may go on under this plan."""
        if not resume:
            raise CheckpointError(
                f"{path} already holds a run: starting over would spend its budget a second time "
                "without saying so. Resume it, or name another directory."
            )
        if read_plan(self._plan) != plan:
            raise InvalidPlan(
                f"{self._plan} is another plan than this run's ({plan}): a run keeps the plan it was "
                "charged for. Resume with that plan file, or name another directory."
            )
        if not self.ledger.exists():
            raise LedgerError(
                f"{path} holds a run whose ledger is missing: what it spent is not known. Restore "
                "ledger.jsonl, or start a new run in a new directory."
            )

    def begin(self, plan: Plan) -> None:
        """Put the plan beside the ledger, which must be there already: the plan says a run exists."""
        write_plan(plan, self._plan)

    def metrics(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """The lines written so far; with `up_to`, those after that step are dropped for good."""
        if not self._metrics.exists():
            return []
        lines = [line for line in self._metrics.read_text().split("\n") if line.endswith("}")]
        kept = [entry for entry in map(json.loads, lines) if up_to is None or entry["step"] <= up_to]
        if up_to is not None:
            text = "".join(json.dumps(entry) + "\n" for entry in kept)
            replace_file(self._metrics, text.encode())
        return kept

    def add_metrics(self, entry: dict[str, Any]) -> None:
        """Append one line."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(entry) + "\n")
