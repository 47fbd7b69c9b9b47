"""What a run leaves on disk, and in which file."""

import json
from pathlib import Path
from typing import Any

from hush.core.durable import replace_file
from hush.core.errors import CheckpointError, InvalidPlan
from hush.core.plan import Plan
from hush.core.plan_file import read_plan, write_plan


class RunFolder:
    """The files of one run.

    `plan.toml`, `ledger.jsonl` and `metrics.jsonl` may be read by anyone who may see the model;
    `checkpoint.safetensors` holds the generator and is secret; `model.safetensors` is the result.
    """

    def __init__(self, path: Path, plan: Plan, *, resume: bool) -> None:
        self.ledger = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.weights = path / "model.safetensors"
        self._metrics = path / "metrics.jsonl"
        stored = path / "plan.toml"
        if stored.exists():
            if not resume:
                raise CheckpointError(
                    f"{path} already holds a run: starting over would spend its budget a second time "
                    "without saying so. Resume it, or name another directory."
                )
            if read_plan(stored) != plan:
                raise InvalidPlan(
                    f"{stored} is another plan than this run's ({plan}): a run keeps the plan it was "
                    "charged for. Resume with that plan, or name another directory."
                )
        path.mkdir(parents=True, exist_ok=True)
        write_plan(plan, stored)

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
