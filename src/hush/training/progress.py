"""What a person sees while a run goes on."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SHOWN = {"loss": "loss {:.3f}", "accuracy": "accuracy {:.1%}", "epsilon": "epsilon {:.3f}"}


class RunProgress:
    """A progress bar with loss, accuracy, epsilon so far and time left; silent unless shown."""

    def __init__(self, total: int, done: int, *, shown: bool) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("training", total=total, completed=done, facts="")

    def advance(self) -> None:
        """One more step is done."""
        self._bar.advance(self._task)

    def show(self, metrics: dict[str, float]) -> None:
        """Put the newest figures beside the bar."""
        facts = [text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics]
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
