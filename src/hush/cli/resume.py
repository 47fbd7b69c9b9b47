"""Options of a resumed run held against the plan in its folder, before anything is trained."""

from pathlib import Path

from hush.core.errors import InvalidPlan
from hush.core.guarantee import Budget
from hush.core.plan import Plan, read_plan


def check_plan_kept(folder: Path, plan: Plan, budget: Budget, steps: int | None, dimension: int) -> None:
    """Raise if the run in a folder has another plan, with what differs and how to go on under its own.

    Args:
        folder: of the run to resume; one without a plan file passes.
        plan: what the options stand for. Noise found for another number of steps is another plan.
        budget: epsilon and delta of the whole run.
        steps: how many the options ask for in all; None: as many as the budget allows.
        dimension: number of parameters.
    """
    from hush.accounting.calibrate import steps_within
    from hush.accounting.epsilon import compose
    from hush.accounting.mechanism import grows_with_dimension
    from hush.training.run_folder import differences

    file = folder / "plan.toml"
    kept = read_plan(file) if file.exists() else plan
    if kept == plan:
        return
    sizes = {kept: dimension} if grows_with_dimension(kept) else {}
    allowed = steps_within(kept, budget, {}, sizes)
    count = allowed if steps is None else steps
    cost = compose({kept: count}, budget.delta, sizes).epsilon.upper
    raise InvalidPlan(
        f"{file} is another plan than these options stand for ({differences(kept, plan)}): a run keeps "
        f"the plan it was charged for. That one allows {allowed} steps in all at epsilon "
        f"{budget.epsilon:g} (steps {allowed} there -> {count} here); {count} steps of it cost epsilon "
        f"{cost:.4g}. Go on under it with --plan {file} --steps {count} --epsilon of at least that, in "
        "place of options for noise, rate and clip; sound if nothing that the run released decided how "
        "many steps there are. Or name another --run-dir."
    )
