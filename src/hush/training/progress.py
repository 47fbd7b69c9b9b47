"""Progress of a long task on standard error: a bar on a terminal, otherwise plain lines."""

import sys
import time
from threading import Event, Thread
from typing import Any, Self

from hush.core.guarantee import at_most

_SHOWN = {
    "loss": "loss {loss:.3f}",
    "accuracy": "accuracy {accuracy:.1%}",
    "epsilon": "epsilon {epsilon}",
    "delta": "delta {delta:g}",
    "unit": "{neighbours} {unit}",
}
_SECONDS = 10.0


class Progress:
    """Context manager that shows the progress of one task: `done` of `total` items, named by `unit`.

    On a terminal, it shows a bar with the latest metrics and the remaining time. Otherwise it prints a
    line every ten seconds, in a thread because some tasks are a single call. Nested tasks are not shown,
    even if the outer task is not visible.
    """

    _open = 0
    """Number of running tasks."""

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
        self._facts, self._begun, self._over = "", time.monotonic(), Event()
        self._bar: Any = None
        self._lines: Thread | None = None
        if not visible:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if not (console.is_terminal or console.is_jupyter):
            self._lines = Thread(target=self._report, daemon=True)
            return
        self._bar = Bar(
            *[TextColumn("{task.description}"), BarColumn()],
            *([] if total is None else [MofNCompleteColumn()]),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
        )
        self._bar.add_task(task, total=total, completed=done, facts="")

    @staticmethod
    def on_terminal() -> bool:
        """Whether standard error is a terminal."""
        return sys.stderr.isatty()

    def advance(self) -> None:
        """Count one more item."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def show(self, metrics: dict[str, Any]) -> None:
        """Show metrics beside the bar, or on the next line."""
        shown = {**metrics, "epsilon": at_most(metrics.get("epsilon", 0.0))}
        self._facts = ", ".join(text.format(**shown) for name, text in _SHOWN.items() if name in metrics)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], facts=self._facts)

    def _report(self) -> None:
        while not self._over.wait(_SECONDS):
            of = "" if self._total is None else f" of {self._total}"
            counted = f"{self._done}{of} {self._unit}" if of or self._done else ""
            elapsed = f"{time.monotonic() - self._begun:.0f} seconds so far"
            facts = ", ".join(filter(None, (counted, self._facts, elapsed)))
            print(f"hush: {self._task}: {facts}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if Progress._open:
            self._bar = self._lines = None
        Progress._open += 1
        if shown := self._bar or self._lines:
            shown.start()
        return self

    def __exit__(self, *error: object) -> None:
        Progress._open -= 1
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.join()
