"""What a person sees while a run goes on."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SHOWN = {
    "loss": "loss {loss:.3f}",
    "accuracy": "accuracy {accuracy:.1%}",
    "epsilon": "epsilon {epsilon:.3f}",
    "delta": "delta {delta:g}",
    "unit": "{neighbours} {unit}",
}


_SECONDS = 10.0


class RunProgress:
    """A progress bar with loss, accuracy, epsilon so far and time left; silent unless visible.

    Where standard error is no terminal, a bar would be seen once the run is over: there a plain line
    every ten seconds says how far it is.
    """

    def __init__(self, total: int, done: int, *, visible: bool) -> None:
        console = Console(stderr=True)
        self._lines = visible and not (console.is_terminal or console.is_jupyter)
        self._total, self._done, self._facts = total, done, ""
        self._begun = self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not visible or self._lines,
        )
        self._task = self._bar.add_task("training", total=total, completed=done, facts="")

    def advance(self) -> None:
        """One more step is done."""
        self._bar.advance(self._task)
        self._done += 1
        now = time.monotonic()
        if self._lines and now - self._printed >= _SECONDS:
            self._printed = now
            parts = [f"hush: training: {self._done} of {self._total} steps", self._facts]
            parts.append(f"{now - self._begun:.0f} seconds so far")
            print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)

    def show(self, metrics: dict[str, Any]) -> None:
        """Put the newest figures beside the bar."""
        facts = [text.format(**metrics) for name, text in _SHOWN.items() if name in metrics]
        self._facts = ", ".join(facts)
        self._bar.update(self._task, facts="  ".join(facts))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
