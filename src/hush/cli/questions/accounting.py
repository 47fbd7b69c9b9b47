"""`hush account` and `hush calibrate`: the epsilon of a plan or a ledger, and its inverse."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli.option_group import options_of
from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
    Group,
    NeighboursOption,
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
from hush.cli.output import counted, print_json
from hush.cli.questions.charges import Question, adjacency_of, charges_of, for_units
from hush.core.errors import InvalidPlan
from hush.core.guarantee import DEFAULT_DELTA, RECORD, Adjacency, Budget
from hush.core.plan import Plan, plan_text, read_plan
from hush.sampling import FullBatch

if TYPE_CHECKING:
    from hush.accounting.attacker import Limit, Risk


@options_of(Question)
def account(question: Question, as_json: AsJson = False) -> None:
    """Epsilon of a number of private steps, or of everything on a ledger.

    A run's ledger is checked against its plan, anchor and checkpoint, also if it is named by --ledger.
    It is answered for at the delta that the run was made for, unless --delta names another.

    Example: hush account --noise 1.0 --rate 0.01 --steps 10000

    Of five records together: hush account --noise 1.0 --rate 0.01 --steps 10000 --group 5
    """
    from hush.accounting.attacker import Attacker

    asked = charges_of(question)
    attacker = Attacker(asked.counts, asked.dimensions, asked.adjacency)
    if as_json:
        best = {"advantage": attacker.advantage, "success": attacker.success}
        print_json({**asked.guarantee.to_plain(), "attacker": best, **asked.to_plain()})
        return
    print(asked.guarantee)
    print(f"  {attacker}")
    for line in asked.lines():
        print(f"  {line}")


def calibrate(
    epsilon: Annotated[
        float | None, typer.Option(help="Budget: the epsilon that is not exceeded.")
    ] = None,
    delta: Delta = DEFAULT_DELTA,
    tpr: Annotated[
        float | None, typer.Option(help="Risk, in place of epsilon: share of members found at --fpr.")
    ] = None,
    fpr: Annotated[float | None, typer.Option(help="Share of false alarms that --tpr is for.")] = None,
    advantage: Annotated[
        float | None, typer.Option(help="Risk: share of members found less that of false alarms.")
    ] = None,
    posterior: Annotated[
        float | None, typer.Option(help="Risk: chance that a guess of membership is right.")
    ] = None,
    prior: Annotated[
        float | None, typer.Option(help="Chance of membership beforehand that --posterior is for.")
    ] = None,
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
    group: Group = 1,
    neighbours: NeighboursOption = None,
    as_json: AsJson = False,
) -> None:
    """The plan that just meets a budget or a risk, ready to be saved as a plan file.

    Without --noise it finds the noise; with --noise, whichever of the steps and the rate is missing.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20

    To a risk: hush calibrate --tpr 0.05 --fpr 0.01 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting import calibrate as inverse
    from hush.accounting.epsilon import compose
    from hush.accounting.shaping import fit_noise

    refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    refuse_together(plan=plan, noise=noise)
    refuse_together(steps=steps, epochs=epochs)
    adjacency = adjacency_of(group, neighbours)
    adjacency.check_records(records)
    attacks = {"tpr": tpr, "fpr": fpr, "advantage": advantage, "posterior": posterior, "prior": prior}
    limit = _limit(epsilon, delta, attacks)
    if fit and (adjacency.slots > 1 or not isinstance(limit, Budget)):
        asked = adjacency if isinstance(limit, Budget) else limit
        raise InvalidPlan(
            f"--fit finds noise for an epsilon and {RECORD}, and {asked} was asked for: its shape is "
            "proved best for that alone. Leave out --fit, or what it is not for, or calibrate the plan "
            "it finds."
        )
    sampled = rate is not None or batch_size is not None
    if plan is not None or noise is None:
        start = read_plan(plan) if plan else plan_of(sampling_of(rate, records, batch_size), 1)
        count = steps_of(steps, epochs, start)
        if fit and isinstance(limit, Budget):
            fitting = fit_noise(start, limit, count, dimension)
        else:
            fitting = inverse.calibrate(start, limit, count, dimension, adjacency=adjacency)
    elif sampled:
        fitting = plan_of(sampling_of(rate, records, batch_size), noise)
        if steps is not None or epochs is not None:
            raise InvalidPlan(
                "noise, rate and steps are all given, so there is nothing to find. Leave one of them "
                "out, or ask `hush account` what they cost."
            )
        count = inverse.max_steps(fitting, limit, adjacency=adjacency)
    else:
        if steps is None:
            raise InvalidPlan(
                "with --noise, pass --steps to find the rate, or --rate to find the steps."
            )
        fitting = inverse.max_rate(plan_of(FullBatch(), noise), limit, steps, adjacency=adjacency)
        count = steps
    sizes = {} if dimension is None else {fitting: dimension}
    guarantee = for_units(compose({fitting: count}, delta, sizes, adjacency), records)
    risk: dict[str, Any] = {}
    if not isinstance(limit, Budget):
        risk = _risk(limit, fitting, count, dimension, adjacency, delta, found_noise=noise is None)
    if as_json:
        plain = {**guarantee.to_plain(), "steps": count, "plan": fitting.to_plain()}
        print_json({**plain, "risk": risk} if risk else plain)
        return
    print(f"# {counted(count, 'step')}: {guarantee}")
    if risk:
        print(f"# at most {limit}: {risk['attained']:.5g}")
    if "through_epsilon" in risk:
        other = risk["through_epsilon"]
        print(
            f"# epsilon {other['epsilon']:.4g} at delta {delta:g} implies that of any mechanism, and "
            f"takes {other['noise']:.4g} times this noise"
        )
    print(f"\n{plan_text(fitting)}", end="")


def _limit(epsilon: float | None, delta: float, attacks: dict[str, float | None]) -> "Limit":
    """The budget or the risk that was asked for."""
    from hush.accounting.attacker import Risk

    asked = [name for name, value in attacks.items() if value is not None]
    if epsilon is not None and asked:
        raise InvalidPlan(
            f"--epsilon and --{asked[0]} are two limits, and a plan just meets one of them. Pass one."
        )
    if epsilon is None and not asked:
        raise InvalidPlan(
            "nothing says how private the plan is to be. Pass --epsilon, or a risk: --tpr with --fpr, "
            "--advantage, or --posterior with --prior."
        )
    return Risk(**attacks) if epsilon is None else Budget(epsilon=epsilon, delta=delta)


def _risk(
    risk: "Risk",
    plan: Plan,
    steps: int,
    dimension: int | None,
    adjacency: Adjacency,
    delta: float,
    *,
    found_noise: bool,
) -> dict[str, Any]:
    """The risk, what the plan attains of it, and the noise that the way through epsilon takes."""
    from hush.accounting.attacker import Attacker
    from hush.accounting.calibrate import calibrate as find_noise

    attained = risk.attained(Attacker({plan: steps}, dimension, adjacency))
    report: dict[str, Any] = {**risk.to_plain(), "attained": attained}
    multiplier = plan.noise.to_plain().get("multiplier")
    if found_noise and multiplier is not None:
        budget = risk.budget(delta)
        other = find_noise(plan, budget, steps, dimension, adjacency=adjacency)
        ratio = other.noise.to_plain()["multiplier"] / multiplier
        report["through_epsilon"] = {**budget.to_plain(), "noise": ratio}
    return report
