"""Last step of a run: where the steps asked for or the budget end it."""

import warnings
from typing import Literal

from hush.accounting.calibrate import max_steps
from hush.accounting.epsilon import compose
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget
from hush.training.step import PrivateStep


def last_step(
    step: PrivateStep, budget: Budget, requested: int | None
) -> tuple[int, Literal["steps", "budget"]]:
    """Last step of the run, and whether the steps asked for or the budget end it.

    Steps on the ledger beyond the checkpoint are repeated, not paid again, so they always fit. Warns
    where the budget allows fewer steps than were asked for: that is known before the first one.
    """
    adjacency = step.adjacency
    charged = max(step.ledger.last_step(step.run), step.steps)
    before, sizes = step.ledger.counts, dict(step.ledger.dimensions)
    once = step.ledger.counts_repeating(step.plan, step.run, charged + 1)
    if (
        once != before
        and (requested or charged + 1) > charged
        and max_steps(step.plan, budget, once, sizes, adjacency)
    ):
        before = once  # the next step is charged together with the one that was cut short
    counts = dict(before)
    spent = compose(counts, budget.delta, sizes, adjacency).epsilon.upper
    if spent > budget.epsilon:
        raise BudgetExceeded(
            f"the ledger holds charges of epsilon={spent:.4g} at delta={budget.delta:g}, more than "
            f"the budget of {budget.epsilon:g}: nothing may be added. Pass the budget of the whole run."
        )
    if grows_with_dimension(step.plan):
        sizes[step.plan] = max(step.dimension, sizes.get(step.plan, 0))
    if requested is not None:
        counts[step.plan] = counts.get(step.plan, 0) + max(0, requested - charged)
        if compose(counts, budget.delta, sizes, adjacency).epsilon.upper <= budget.epsilon:
            return requested, "steps"
    limit = charged + max_steps(step.plan, budget, before, sizes, adjacency)
    if limit == 0:
        counts = {**before, step.plan: before.get(step.plan, 0) + 1}
        cost = compose(counts, budget.delta, sizes, adjacency).epsilon.upper
        if before:
            raise BudgetExceeded(
                f"the ledger holds charges of epsilon={spent:.4g} at delta={budget.delta:g}, and one "
                f"step more costs {cost:.4g} with what is on the ledger, above the budget of "
                f"{budget.epsilon:g}: runs on the same records add up. Resume the run that was charged, "
                "or raise the budget of all of them together."
            )
        raise BudgetExceeded(
            f"the budget of epsilon={budget.epsilon:g} at delta={budget.delta:g} is below what one "
            f"step costs ({cost:.4g}): not even the first step may be taken. Add noise "
            "(hush.calibrate finds how much), lower the sampling rate, or raise the budget."
        )
    if requested is not None:
        _warn_of_fewer_steps(requested, limit, budget, step)
    return limit, "budget"


def _warn_of_fewer_steps(requested: int, limit: int, budget: Budget, step: PrivateStep) -> None:
    """Say before the first step that the budget ends the run before the steps asked for."""
    adjacency = step.adjacency
    options = [f"steps={requested}"]
    if grows_with_dimension(step.plan):
        options.append(f"dimension={step.dimension}")
    if adjacency.replaced:
        options.append("adjacency=hush.Adjacency(neighbours='replace')")
    if any(plan != step.plan for plan in step.ledger.counts):
        options.append("spent=ledger.counts")
    warnings.warn(
        f"steps={requested} were asked for and the run ends after {limit}: one more would cost more "
        f"than the budget of epsilon={budget.epsilon:g} at delta={budget.delta:g} ({adjacency}). "
        f"hush.calibrate(plan, budget, {', '.join(options)}) finds noise that lasts for all of them; "
        "without steps= a run goes on until the budget is used.",
        UserWarning,
        stacklevel=4,
    )
