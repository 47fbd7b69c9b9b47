"""`hush calibrate`: the noise, rate or number of steps that a budget allows."""

from dataclasses import replace
from typing import Annotated

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
    Epsilon,
    Noise,
    PlanFile,
    Rate,
    Records,
    Steps,
    plan_of,
    refuse_together,
    sampling_of,
    steps_of,
)
from hush.cli.output import print_json
from hush.core.errors import InvalidPlan
from hush.core.guarantee import Budget, check_delta
from hush.core.plan import plan_text, read_plan
from hush.core.ranges import check_count
from hush.sampling import FullBatch


def calibrate(
    epsilon: Epsilon,
    delta: Delta = 1e-5,
    noise: Noise = None,
    rate: Rate = None,
    records: Records = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    plan: PlanFile = None,
    dimension: Annotated[
        int | None, typer.Option(help="Number of parameters, where the noise depends on it.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="A noise scale for each block of the plan's clipping.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The plan that just meets a budget, ready to be saved as a plan file.

    Without --noise it finds the noise; with --noise, whichever of the steps and the rate is missing.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting import calibrate as inverse
    from hush.accounting.epsilon import epsilon as epsilon_of
    from hush.accounting.shaping.fit import fit_noise

    refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    refuse_together(plan=plan, noise=noise)
    refuse_together(steps=steps, epochs=epochs)
    budget = Budget(epsilon=epsilon, delta=delta)
    sampled = rate is not None or batch_size is not None
    if plan is not None or noise is None:
        start = read_plan(plan) if plan else plan_of(sampling_of(rate, records, batch_size), 1)
        count = steps_of(steps, epochs, start)
        fitting = (fit_noise if fit else inverse.calibrate)(start, budget, count, dimension)
    elif sampled:
        fitting = plan_of(sampling_of(rate, records, batch_size), noise)
        if steps is not None or epochs is not None:
            raise InvalidPlan(
                "noise, rate and steps are all given, so there is nothing to find. Leave one of them "
                "out, or ask `hush account` what they cost."
            )
        count = inverse.max_steps(fitting, budget)
    else:
        if steps is None:
            raise InvalidPlan(
                "with --noise, pass --steps to find the rate, or --rate to find the steps."
            )
        fitting = inverse.max_rate(plan_of(FullBatch(), noise), budget, steps=steps)
        count = steps
    guarantee = epsilon_of(fitting, steps=count, delta=delta, dimension=dimension)
    if records is not None:
        check_delta(delta, check_count("--records", records, "they are counted", at_least=1))
        guarantee = replace(guarantee, records=records)
    if as_json:
        print_json({**guarantee.to_plain(), "steps": count, "plan": fitting.to_plain()})
        return
    print(f"# {count} steps: {guarantee}\n")
    print(plan_text(fitting), end="")
