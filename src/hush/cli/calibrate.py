"""`hush calibrate`: how much noise a budget asks for."""

from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
    Epsilon,
    PlanFile,
    Rate,
    Records,
    Steps,
    plan_of,
    sampling_of,
    steps_of,
)
from hush.cli.output import print_json
from hush.core.guarantee import Budget
from hush.core.plan_file import plan_text, read_plan


def calibrate(
    epsilon: Epsilon,
    delta: Delta = 1e-5,
    rate: Rate = None,
    records: Records = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    plan: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """The plan whose noise just meets a budget, ready to be saved as a plan file.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting.calibrate import calibrate as calibrated
    from hush.accounting.charge import epsilon as epsilon_of

    budget = Budget(epsilon=epsilon, delta=delta)
    start = read_plan(plan) if plan is not None else plan_of(sampling_of(rate, records, batch_size), 1)
    count = steps_of(steps, epochs, start)
    found = calibrated(start, budget, steps=count)
    guarantee = epsilon_of(found, steps=count, delta=delta)
    if as_json:
        print_json({**guarantee.to_plain(), "steps": count, "plan": found.to_plain()})
        return
    print(f"# {count} steps: {guarantee}\n")
    print(plan_text(found), end="")
