"""Determine the last step of a run within a budget."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from hush.accounting.calibrate import max_steps
from hush.accounting.epsilon import compose
from hush.accounting.mechanism import grows_with_dimension
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget
from hush.core.plan import Plan

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


def last_step(
    step: "PrivateStep", budget: Budget, requested: int | None
) -> tuple[int, Literal["steps", "budget"]]:
    """Last step of a run, and whether the requested steps or the budget determine it.

    Steps that were charged after the checkpoint are repeated without a new charge. Warns if the budget
    covers fewer steps than requested.
    """
    adjacency, plan = step.adjacency, step.plan
    charged = max(step.ledger.last_step(step.run), step.steps)
    sizes = dict(step.ledger.dimensions)
    limits = f"the budget of epsilon={budget.epsilon:g} at delta={budget.delta:g}"

    def cost(counts: Mapping[Plan, int]) -> float:
        return compose(counts, budget.delta, sizes, adjacency).epsilon.upper

    def without_unused(counts: Mapping[Plan, int]) -> dict[Plan, int]:
        """Charges without the steps that are charged in advance and that this run may still take."""
        unused = step.ledger.unused(step.run)
        return {**counts, plan: counts[plan] - unused} if unused else dict(counts)

    before = without_unused(step.ledger.counts)
    once = without_unused(step.ledger.counts_repeating(plan, step.run, charged + 1))
    continues = requested is None or requested > charged
    if once != before and continues and max_steps(plan, budget, once, sizes, adjacency):
        before = once  # the next step is charged in addition to the torn charge
    if (spent := cost(before)) > budget.epsilon:
        raise BudgetExceeded(
            f"the charges on the ledger have epsilon={spent:.4g}, more than {limits}. Pass the budget "
            "of the whole run."
        )
    if grows_with_dimension(plan):
        sizes[plan] = max(step.dimension, sizes.get(plan, 0))
    paid = before.get(plan, 0)
    if not step.ledger.last_step(step.run):
        paid += charged % plan.sampling.period  # a new run may start in the middle of a period
        before = {**before, plan: paid}
    if requested is not None and (
        not continues or cost({**before, plan: paid + requested - charged}) <= budget.epsilon
    ):
        return requested, "steps"
    limit = charged + max_steps(plan, budget, before, sizes, adjacency)
    if limit == 0:
        one, together = (
            cost({**before, plan: paid + 1}),
            " with the charges on the ledger" * any(before.values()),
        )
        raise BudgetExceeded(
            f"{limits} is below the cost of one step{together} ({one:.4g}). Increase the noise (see "
            "hush.calibrate), reduce the sampling rate, resume the charged run, or increase the budget."
        )
    if requested is not None:
        warnings.warn(
            f"the run ends after {limit} of steps={requested}: the next step would exceed "
            f"{limits} ({adjacency}). hush.calibrate computes the noise for all steps (hush train: "
            "leave out --noise).",
            UserWarning,
            stacklevel=3,
        )
    return limit, "budget"
