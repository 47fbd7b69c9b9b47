"""Metrics of one step for callbacks, which may be published."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hush.core.errors import InvalidValue
from hush.training.step import PrivateStep


class StepMetrics(Mapping[str, float]):
    """Metrics of the last charged step, which may be published.

    The metrics are `epsilon` and `delta` of all charges on the ledger, the `learning_rate` of the step
    (`learning_rate/1` and so on for further parameter groups), and `evaluation/...`. Read them before
    the next step.

    Args:
        step: Step after it ran.
        delta: Delta of epsilon; None: the delta stored on the ledger.
    """

    def __init__(self, step: PrivateStep, *, delta: float | None = None) -> None:
        self._step, self._number, self._delta = step, step.steps, delta
        self._released: dict[str, Any] = {"epsilon": None, "delta": None}  # computed on access
        for number, group in enumerate(step.optimizer.param_groups):
            self._released["learning_rate" + f"/{number}" * (number > 0)] = float(group["lr"])

    def add(self, released: Mapping[str, float]) -> None:
        """Add metrics that may be published, by name."""
        self._released.update(released)

    def __getitem__(self, name: str) -> float:
        if name not in self._released:
            raise KeyError(
                f"step {self._number} has no metric {name!r}; it has {', '.join(self)}. The guarantee "
                "does not cover metrics of the training records: pass evaluation records, which need no "
                "protection."
            )
        if self._released[name] is None:
            if self._step.steps != self._number:
                raise InvalidValue(
                    f"{name!r} of step {self._number} was read after step {self._step.steps}. Read "
                    "metrics in the callback that receives them."
                )
            spent = self._step.spent(self._delta)
            self._released |= {"epsilon": spent.epsilon.upper, "delta": spent.delta}
        value: float = self._released[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._released)

    def __len__(self) -> int:
        return len(self._released)


OnStep = Callable[[int, StepMetrics], object]
"""Callback `on_step(step, metrics)`, called after each step; the run ends if it returns True."""
