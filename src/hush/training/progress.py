"""Progress of a long task on standard error: a bar, or plain lines without a terminal."""

import sys
import time
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self

from hush.core.guarantee import at_most

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_SHOWN = {
    "loss": "loss {loss:.3f}",
    "accuracy": "accuracy {accuracy:.1%}",
    "epsilon": "epsilon {epsilon}",
    "delta": "delta {delta:g}",
    "unit": "{neighbours} {unit}",
}
_SECONDS = 10.0


class Progress:
    """Context manager that shows the progress of one task.

    On a terminal it is a bar with the latest metrics and the time left, elsewhere a line every ten
    seconds. A thread prints the lines: some tasks are a single call.

    Args:
        task: Name of the task.
        total: Number of items, if it is known.
        done: Number of items that are done already.
        unit: Name of the items, in the plural.
        visible: Whether to show anything.
    """

    def __init__(
        self,
        task: str,
        total: int | None = None,
        *,
        done: int = 0,
        unit: str = "steps",
        visible: bool = True,
    ) -> None:
        self._task, self._total, self._done, self._unit = task, total, done, unit
        self._counted = total is not None or done > 0
        self._facts, self._begun = "", time.monotonic()
        self._over, self._lines = Event(), Thread(target=self._report, daemon=True)
        self._bar = _bar(task, total, done) if visible else None
        self._visible = visible

    def advance(self) -> None:
        """Count one more item."""
        self._done += 1
        self._counted = True
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def show(self, metrics: dict[str, Any]) -> None:
        """Show the latest metrics beside the bar, or on the next line.

        Args:
            metrics: Metrics of a run; some of them are shown.
        """
        shown = {**metrics, "epsilon": at_most(metrics.get("epsilon", 0.0))}
        facts = [text.format(**shown) for name, text in _SHOWN.items() if name in metrics]
        self._facts = ", ".join(facts)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], facts=self._facts)

    def _report(self) -> None:
        while not self._over.wait(_SECONDS):
            of = "" if self._total is None else f" of {self._total}"
            parts = [f"{self._done}{of} {self._unit}" if self._counted else "", self._facts]
            parts.append(f"{time.monotonic() - self._begun:.0f} seconds so far")
            line = f"hush: {self._task}: {', '.join(filter(None, parts))}"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        elif self._visible:
            self._lines.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._visible:
            self._over.set()
            self._lines.join()


def _bar(task: str, total: int | None, done: int) -> "Bar | None":
    """Bar of one task that is not started yet; None without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        return None
    bar = Bar(
        *[TextColumn("{task.description}"), BarColumn()],
        *([] if total is None else [MofNCompleteColumn()]),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    )
    bar.add_task(task, total=total, completed=done, facts="")
    return bar
