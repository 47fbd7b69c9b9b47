"""`hush account`, `explain` and `calibrate`: the privacy cost of plans and ledgers, without torch."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli import options as opt
from hush.cli.options import about
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidPlan
from hush.core.guarantee import (
    DEFAULT_DELTA,
    RECORD,
    Adjacency,
    Budget,
    Guarantee,
    Neighbours,
    check_delta,
)
from hush.core.plan import Plan, plan_text, read_plan
from hush.core.value import check_count
from hush.report.text import Table, percent
from hush.sampling import FullBatch

if TYPE_CHECKING:
    from hush.accounting.attacker import Limit, Risk


@dataclass(frozen=True)
class _Charges:
    """Steps of each plan, and their guarantee."""

    counts: dict[Plan, int]
    dimensions: dict[Plan, int]
    adjacency: Adjacency
    guarantee: Guarantee
    notes: list[str]

    def to_plain(self) -> dict[str, Any]:
        charged = [{"plan": plan.to_plain(), "steps": count} for plan, count in self.counts.items()]
        return {"charged": charged, "notes": self.notes}

    def print(self) -> None:
        charged = [f"{counted(count, 'step')} of {plan}" for plan, count in self.counts.items()]
        for line in (*charged, *self.notes):
            print(f"  {line}")


def _charges(
    run_dir: Annotated[Path | None, typer.Argument(help="Folder of a run.")] = None,
    noise: opt.Noise = None,
    rate: opt.Rate = None,
    records: opt.Records = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    delta: opt.ReportedDelta = None,
    plan: opt.PlanFile = None,
    dimension: opt.Dimension = None,
    ledger: Annotated[Path | None, about("Ledger of a run.")] = None,
    group: opt.Group = 1,
    neighbours: opt.AdjacencyName = None,
    as_json: opt.AsJson = False,
) -> _Charges:
    """The charges that the options name, and their guarantee."""
    from hush.accounting.epsilon import compose

    if source := run_dir or ledger:
        asked = {"plan": plan, "noise": noise, "rate": rate, "records": records}
        asked |= {"batch-size": batch_size, "steps": steps, "epochs": epochs, "dimension": dimension}
        for name, value in asked.items():
            if value is not None:
                raise InvalidPlan(
                    f"--{name} {value} is for a question without a ledger: the ledger of {source} has "
                    "the charges. Leave out the option, or the ledger."
                )
        opt.refuse_together(run_dir=run_dir, ledger=ledger)
        return _ledger_charges(source, run_dir is not None, delta, group, neighbours)
    opt.refuse_together(plan=plan, noise=noise)
    opt.refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    opt.refuse_together(steps=steps, epochs=epochs)
    if plan is not None:
        priced = read_plan(plan)
    elif noise is not None:
        priced = opt.plan_of(opt.sampling_of(rate, records, batch_size), noise)
    else:
        raise InvalidPlan(
            "nothing to account for. Pass --noise with --rate and --steps, or --plan with --steps, or a "
            "run's folder, or --ledger."
        )
    counts = {priced: opt.steps_of(steps, epochs, priced)}
    dimensions = {} if dimension is None else {priced: dimension}
    adjacency = _adjacency(group, neighbours)
    notes = [f"delta {DEFAULT_DELTA:g} by default: set --delta well below 1 / records"]
    guarantee = compose(counts, DEFAULT_DELTA if delta is None else delta, dimensions, adjacency)
    guarantee = _for_units(guarantee, records)
    return _Charges(counts, dimensions, adjacency, guarantee, notes if delta is None else [])


def _ledger_charges(
    path: Path, is_run: bool, delta: float | None, group: int, neighbours: str | None
) -> _Charges:
    """The charges of a ledger, checked against the other files of its run."""
    from hush.accounting.ledger import reported_delta
    from hush.training.run_check import checked_ledger, ledger_at

    ledger, notes = checked_ledger(path) if is_run else ledger_at(path)
    chosen, reason = reported_delta(ledger, delta)
    relation = None if neighbours is None else Neighbours(neighbours)
    guarantee = _for_units(ledger.epsilon(chosen, group=group, neighbours=relation))
    adjacency = replace(ledger.adjacency, group=group, neighbours=guarantee.neighbours)
    return _Charges(dict(ledger.counts), dict(ledger.dimensions), adjacency, guarantee, [reason, *notes])


def _takes_charges(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_charges`."""
    command.__signature__ = inspect.signature(_charges)  # type: ignore[attr-defined]
    command.__annotations__ = _charges.__annotations__
    return command


@_takes_charges
def account(**options: Any) -> None:
    """Epsilon of a number of private steps, or of all charges on a ledger.

    A run's ledger is checked against its plan, anchor and checkpoint, also if it is named by --ledger.
    Delta is the run's own, unless --delta names another.

    Example: hush account --noise 1.0 --rate 0.01 --steps 10000

    Of five records together: hush account --noise 1.0 --rate 0.01 --steps 10000 --group 5
    """
    from hush.accounting.attacker import Attacker

    charges = _charges(**options)
    attacker = Attacker(charges.counts, charges.dimensions, charges.adjacency)
    if options["as_json"]:
        best = {"advantage": attacker.advantage, "success": attacker.success}
        print_json({**charges.guarantee.to_plain(), "attacker": best, **charges.to_plain()})
        return
    print(charges.guarantee)
    print(f"  {attacker}")
    charges.print()


@_takes_charges
def explain(**options: Any) -> None:
    """What an epsilon means: the success of the best attack, before anything is trained.

    Example: hush explain --noise 1.0 --records 60000 --batch-size 600 --epochs 20

    Of a plan that `hush calibrate` wrote: hush explain --plan plan.toml --steps 2000
    """
    from hush.accounting.attacker import membership
    from hush.accounting.explanation import FALSE_POSITIVE_RATES, MIN_ERROR_RATE
    from hush.accounting.explanation import explain as explanation_of

    charges = _charges(**options)
    meaning = explanation_of(charges.guarantee, charges.counts, charges.dimensions, charges.adjacency)
    curve = meaning.trade_off
    if options["as_json"]:
        print_json(
            {
                **charges.guarantee.to_plain(),
                "false_positive_rates": list(FALSE_POSITIVE_RATES),
                "attack": asdict(meaning.attack),
                "from_epsilon": asdict(meaning.from_epsilon),
                "gaussian": {"mu": curve.mu, "regret": curve.regret, "min_error_rate": MIN_ERROR_RATE},
                **charges.to_plain(),
            }
        )
        return
    columns = (meaning.attack, meaning.from_epsilon)
    rows = [
        ["guesses that are right, from even odds", *(percent(c.posterior) for c in columns)],
        ["advantage: found less false alarms", *(percent(c.advantage) for c in columns)],
    ]
    for k, rate in enumerate(FALSE_POSITIVE_RATES):
        found = (percent(column.true_positive_rates[k]) for column in columns)
        rows.append([f"members found, at {100 * rate:g}% false alarms", *found])
    table = Table(header=["the best attack", "at most", "by epsilon and delta alone"], rows=rows)
    print(
        f"{charges.guarantee}\n\nAn attacker who sees all that is released, knows everything else and "
        f"tests {membership(charges.adjacency)}:\n\n{table.markdown()}\n\n"
        "  any other secret: guesses that are right 1% of the time without the release are right at "
        f"most {percent(meaning.attack.true_positive_rates[1])} of the time with it\n"
        f"  Gaussian DP: mu = {curve.mu:.4g} (for error rates of {MIN_ERROR_RATE:g} or more; regret at "
        f"most {curve.regret:.2g})"
    )
    charges.print()


def _adjacency(group: int, neighbours: str | None) -> Adjacency:
    return Adjacency(group=group, neighbours=Neighbours(neighbours or Neighbours.ZERO_OUT))


def _for_units(guarantee: Guarantee, records: int | None = None) -> Guarantee:
    """The guarantee with the number of units; warns if delta is too large for them."""
    if records is not None:
        count = check_count("--records", records, "delta is compared with it", at_least=1)
        guarantee = replace(guarantee, records=count)
    if guarantee.records is not None:
        check_delta(guarantee.delta, guarantee.records, guarantee.unit)
    return guarantee


def calibrate(
    epsilon: Annotated[float | None, about("Budget: largest epsilon.")] = None,
    delta: opt.Delta = DEFAULT_DELTA,
    tpr: Annotated[float | None, about("Risk: true positive rate at --fpr.")] = None,
    fpr: Annotated[float | None, about("False positive rate that --tpr is for.")] = None,
    advantage: Annotated[float | None, about("Risk: true less false positive rate.")] = None,
    posterior: Annotated[float | None, about("Risk: rate of right membership guesses.")] = None,
    prior: Annotated[float | None, about("Prior of membership for --posterior.")] = None,
    noise: opt.Noise = None,
    rate: opt.Rate = None,
    records: opt.Records = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    plan: opt.PlanFile = None,
    dimension: opt.Dimension = None,
    fit: Annotated[bool, typer.Option("--fit", help="A noise scale for each block.")] = False,
    group: opt.Group = 1,
    neighbours: opt.AdjacencyName = None,
    as_json: opt.AsJson = False,
) -> None:
    """The plan that just meets a budget or a risk, ready to be saved as a plan file.

    Without --noise it finds the noise; with --noise, whichever of the steps and the rate is missing.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20

    To a risk: hush calibrate --tpr 0.05 --fpr 0.01 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting import calibrate as inverse
    from hush.accounting.epsilon import compose
    from hush.accounting.shaping import fit_noise

    opt.refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    opt.refuse_together(plan=plan, noise=noise)
    opt.refuse_together(steps=steps, epochs=epochs)
    adjacency = _adjacency(group, neighbours)
    attacks = {"tpr": tpr, "fpr": fpr, "advantage": advantage, "posterior": posterior, "prior": prior}
    limit = _limit(epsilon, delta, attacks)
    if fit and (adjacency.slots > 1 or not isinstance(limit, Budget)):
        asked = adjacency if isinstance(limit, Budget) else limit
        raise InvalidPlan(
            f"--fit finds noise for an epsilon and {RECORD}, and {asked} was asked for: its shape is "
            "proved best for that alone. Leave out --fit, or calibrate the plan it finds."
        )
    if plan is not None or noise is None:
        start = read_plan(plan) if plan else opt.plan_of(opt.sampling_of(rate, records, batch_size), 1)
        count = opt.steps_of(steps, epochs, start)
        if fit and isinstance(limit, Budget):
            found = fit_noise(start, limit, count, dimension)
        else:
            found = inverse.calibrate(start, limit, count, dimension, adjacency=adjacency)
    elif rate is not None or batch_size is not None:
        found = opt.plan_of(opt.sampling_of(rate, records, batch_size), noise)
        if steps is not None or epochs is not None:
            raise InvalidPlan(
                "noise, rate and steps are all given, so there is nothing to find. Leave one of them "
                "out, or ask `hush account` what they cost."
            )
        count = inverse.max_steps(found, limit, adjacency=adjacency)
    elif steps is not None:
        count = steps
        found = inverse.max_rate(opt.plan_of(FullBatch(), noise), limit, steps, adjacency=adjacency)
    else:
        raise InvalidPlan("with --noise, pass --steps to find the rate, or --rate to find the steps.")
    sizes = {} if dimension is None else {found: dimension}
    guarantee = _for_units(compose({found: count}, delta, sizes, adjacency), records)
    risk: dict[str, Any] = {}
    if not isinstance(limit, Budget):
        risk = _risk(limit, found, count, dimension, adjacency, delta, found_noise=noise is None)
    if as_json:
        plain = {**guarantee.to_plain(), "steps": count, "plan": found.to_plain()}
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
    print(f"\n{plan_text(found)}", end="")


def _limit(epsilon: float | None, delta: float, attacks: dict[str, float | None]) -> "Limit":
    """The budget or the risk of the options."""
    from hush.accounting.attacker import Risk

    asked = [name for name, value in attacks.items() if value is not None]
    if epsilon is not None and asked:
        raise InvalidPlan(
            f"--epsilon and --{asked[0]} are two limits, and a plan just meets one of them. Pass one."
        )
    if epsilon is None and not asked:
        raise InvalidPlan(
            "the limit is missing. Pass --epsilon, or a risk: --tpr with --fpr, --advantage, or "
            "--posterior with --prior."
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
    """The risk, the attained value, and the noise that calibration by epsilon would need."""
    from hush.accounting.attacker import Attacker
    from hush.accounting.calibrate import calibrate as find_noise

    report = {
        **risk.to_plain(),
        "attained": risk.attained(Attacker({plan: steps}, dimension, adjacency)),
    }
    multiplier = plan.noise.to_plain().get("multiplier")
    if found_noise and multiplier is not None:
        budget = risk.budget(delta)
        other = find_noise(plan, budget, steps, dimension, adjacency=adjacency)
        ratio = other.noise.to_plain()["multiplier"] / multiplier
        report["through_epsilon"] = {**budget.to_plain(), "noise": ratio}
    return report
