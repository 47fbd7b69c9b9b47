"""Progress of a long task on standard error: a bar, or plain lines without a terminal."""

import sys
import time
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_SHOWN = {
    "loss": "loss {loss:.3f}",
    "accuracy": "accuracy {accuracy:.1%}",
    "epsilon": "epsilon {epsilon:.3f}",
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
        self._facts, self._begun = "", time.monotonic()
        self._counted = total is not None or done > 0
        self._over, self._lines = Event(), None
        self._bar: Bar | None = None
        shown = _bar(task, total, done) if visible else None
        if shown is not None:
            self._bar, self._bar_task = shown
        elif visible:
            self._lines = Thread(target=self._report, daemon=True)

    def advance(self) -> None:
        """Count one more item."""
        self._done += 1
        self._counted = True
        if self._bar is not None:
            self._bar.advance(self._bar_task)

    def show(self, metrics: dict[str, Any]) -> None:
        """Show the latest metrics beside the bar, or on the next line.

        Args:
            metrics: Metrics of a run; some of them are shown.
        """
        facts = [text.format(**metrics) for name, text in _SHOWN.items() if name in metrics]
        self._facts = ", ".join(facts)
        if self._bar is not None:
            self._bar.update(self._bar_task, facts="  ".join(facts))

    def line(self) -> str:
        """Progress of the task as one line."""
        of = "" if self._total is None else f" of {self._total}"
        parts = [f"{self._done}{of} {self._unit}" if self._counted else "", self._facts]
        parts.append(f"{time.monotonic() - self._begun:.0f} seconds so far")
        return f"hush: {self._task}: {', '.join(filter(None, parts))}"

    def _report(self) -> None:
        while not self._over.wait(_SECONDS):
            print(self.line(), file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        if self._lines is not None:
            self._lines.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._over.set()
            self._lines.join()


def _bar(task: str, total: int | None, done: int) -> "tuple[Bar, Any] | None":
    """Bar that is not started yet, and the number of its only task; None without a terminal."""
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
    return bar, bar.add_task(task, total=total, completed=done, facts="")
