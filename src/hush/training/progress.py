"""What a person sees while something takes its time: a bar, or plain lines where there is no terminal.

All of it goes to standard error, where neither a table nor JSON on standard output is disturbed.
"""

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
    """Progress of one task; a context manager. Silent unless visible.

    On a terminal it is a bar with the newest figures and the time left. Elsewhere a bar would be seen
    once the task is over: there a plain line every ten seconds says how far it is. Lines come from a
    thread of their own: some tasks are a single call that reports nothing until it returns.

    Args:
        task: what goes on, as bar and lines name it.
        total: number of items, where it is known.
        done: how many of them are done already.
        unit: what an item is called, in the plural.
        visible: whether anything is shown at all.
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
        if visible and _is_terminal():
            self._bar, self._bar_task = _bar(task, total, done)
        elif visible:
            self._lines = Thread(target=self._report, daemon=True)

    def advance(self) -> None:
        """One more item is done."""
        self._done += 1
        self._counted = True
        if self._bar is not None:
            self._bar.advance(self._bar_task)

    def show(self, metrics: dict[str, Any]) -> None:
        """Put the newest figures beside the bar, or on the next line.

        Args:
            metrics: as a run writes them; those that have a place here are shown.
        """
        facts = [text.format(**metrics) for name, text in _SHOWN.items() if name in metrics]
        self._facts = ", ".join(facts)
        if self._bar is not None:
            self._bar.update(self._bar_task, facts="  ".join(facts))

    def line(self) -> str:
        """How far the task is, as one line."""
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


def _is_terminal() -> bool:
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


def _bar(task: str, total: int | None, done: int) -> "tuple[Bar, Any]":
    """A bar that is not started yet, and the number of its only task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = [TextColumn("{task.description}"), BarColumn()]
    columns += [MofNCompleteColumn()] if total is not None else []
    bar = Bar(
        *columns,
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
    return bar, bar.add_task(task, total=total, completed=done, facts="")
