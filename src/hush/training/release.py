"""Release rules of a step: run its proposal, charge it, and apply or revert it.

A release rule is a frozen part of the plan in `hush.core` that names the class that runs it
(`Release.runner`), here or in `methods/selective.py`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import proxy

from hush.core.errors import Unsupported
from hush.training.data import Batch

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


class EveryUpdate:
    """Runs `hush.Always`: every update is charged, and then applied. Other rules override it."""

    def __init__(self, step: "PrivateStep") -> None:
        self.step = step

    def run(self, batch: Batch) -> bool:
        """Propose the update of a batch, charge it, and apply or revert it; whether the model moved."""
        step = self.step
        update = step.private_gradient(batch)
        step.charge(step.reducer.release_name(update))
        step.apply(update)
        return True

    def probe(self, inputs: Any, targets: Any) -> None:
        """Raise if the rule cannot be run on the model; two synthetic records are given."""

    def check_possible(self, steps: int) -> None:
        """Raise if a run of so many steps would most likely release nothing."""

    def describe(self) -> dict[str, int]:
        """Metrics of the rule that are public."""
        return {}


class WholeSelection(EveryUpdate):
    """Refuses `hush.BestOf` in a step: it is a rule of several runs."""

    def __init__(self, step: "PrivateStep") -> None:
        raise Unsupported(
            "release=BestOf is of a whole selection of runs, and this is a step of one of them. Call "
            "hush.tune, and train each trial with its own plan, trial.plan."
        )


def rule_of(step: "PrivateStep") -> EveryUpdate:
    """Rule that runs the release of a step's plan."""
    module, _, name = step.plan.release.runner.partition(":")
    # the step stores its rule: a strong reference back would keep finished models in memory
    rule: EveryUpdate = getattr(import_module(module), name)(proxy(step))
    return rule
