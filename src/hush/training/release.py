"""Release rules of a step: propose an update, charge it, and apply or revert it.

The release rule of a plan (`hush.core`) names the class that executes it (`Release.runner`). These
classes are in this file and in `methods/selective.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import proxy

from hush.core.errors import Unsupported
from hush.training.data import Batch

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


class EveryUpdate:
    """Charge and apply every update (`hush.Always`); base class of the other rules."""

    def __init__(self, step: "PrivateStep") -> None:
        self.step = step

    def run(self, batch: Batch) -> bool:
        """Propose an update from a batch, charge it, and apply or revert it.

        Returns:
            Whether the update was applied.
        """
        step = self.step
        update = step.private_gradient(batch)
        step.charge(step.reducer.release_name(update))
        step.apply(update)
        return True

    def probe(self, inputs: Any, targets: Any) -> None:
        """Raise if the rule does not support the model, which is run on two synthetic records."""

    def check_possible(self, steps: int) -> None:
        """Raise if a run with this number of steps would most likely accept no update."""

    def describe(self) -> dict[str, int]:
        """Public metrics of the rule."""
        return {}


class WholeSelection(EveryUpdate):
    """Raise for `hush.BestOf`, which selects among several runs."""

    def __init__(self, step: "PrivateStep") -> None:
        raise Unsupported(
            "release=BestOf selects among several runs, but this is a step of one run. Call "
            "hush.tune, and train each trial with trial.plan."
        )


def rule_of(step: "PrivateStep") -> EveryUpdate:
    """Create the release rule of a step's plan."""
    module, _, name = step.plan.release.runner.partition(":")
    # the step stores its rule; a proxy avoids a reference cycle that keeps models in memory
    rule: EveryUpdate = getattr(import_module(module), name)(proxy(step))
    return rule
