"""Public and charged metrics of one step, for callbacks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hush.core.errors import InvalidValue
from hush.training.step import PrivateStep


class StepMetrics(Mapping[str, float]):
    """Metrics of the step that was just charged, to be read before the next one; they may be published.

    `epsilon` and `delta` of all charges on the ledger, `learning_rate` of the step (`learning_rate/1`
    and so on of further parameter groups), and `evaluation/...`.

    Args:
        step: Step after it ran.
        delta: Delta of epsilon; None: the one stored on the ledger.
    """

    def __init__(self, step: PrivateStep, *, delta: float | None = None) -> None:
        self._step, self._number, self._delta = step, step.steps, delta
        self._released: dict[str, Any] = {"epsilon": None, "delta": None}  # computed on access
        for number, group in enumerate(step.optimizer.param_groups):
            self._released["learning_rate" + f"/{number}" * (number > 0)] = float(group["lr"])

    def add(self, released: Mapping[str, float]) -> None:
        """Add metrics that are public or charged, by name."""
        self._released.update(released)

    def __getitem__(self, name: str) -> float:
        if name not in self._released:
            raise KeyError(
                f"step {self._number} has no metric {name!r}; it has {', '.join(self)}. Metrics of the "
                "training records are not charged: pass evaluation records, which need no protection."
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
"""Callback `on_step(step, metrics)`, called after each step; True ends the run."""
