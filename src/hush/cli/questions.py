"""`hush account`, `explain`, `calibrate` and `compare`: the cost of plans and ledgers, without torch."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli import options as opt
from hush.cli.options import about
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.guarantee import (
    DEFAULT_DELTA,
    RECORD,
    Adjacency,
    Budget,
    Guarantee,
    Neighbours,
    at_most,
    check_delta,
)
from hush.core.plan import Plan, plan_text
from hush.core.value import check_count
from hush.report.text import Table
from hush.sampling import FullBatch

if TYPE_CHECKING:
    from hush.accounting.attacker import Limit


@dataclass(frozen=True)
class _Charges:
    """Steps of each plan, and their guarantee."""

    counts: dict[Plan, int]
    dimensions: dict[Plan, int]
    adjacency: Adjacency
    guarantee: Guarantee
    notes: list[str]

    @property
    def proved(self) -> Guarantee | None:
        """The proved guarantee of the same steps, if their plans have a published claim."""
        from hush.accounting.epsilon import compose
        from hush.report.facts import proved_counts

        if self.guarantee.basis == "proved":
            return None
        counts = proved_counts(self.counts)
        return compose(counts, self.guarantee.delta, self.dimensions, self.adjacency)

    def print(self, answer: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
        """Print the guarantee, an answer about it and the charges; for a claim, its proved epsilon."""
        proved, charged = self.proved, list(self.counts.items())
        if proved is not None:
            answer, lines = {"proved": proved.to_plain()}, [f"  the same steps, proved: {proved}"]
        if as_json:
            plain = [{"plan": plan.to_plain(), "steps": count} for plan, count in charged]
            answer = {**self.guarantee.to_plain(), **answer, "charged": plain, "notes": self.notes}
            print_json(answer)
            return
        charges = [f"{counted(count, 'step')} of {plan}" for plan, count in charged]
        print(self.guarantee, *lines, *(f"  {line}" for line in (*charges, *self.notes)), sep="\n")


def _charges(
    run_dir: Annotated[Path | None, typer.Argument(help="Folder of a run.")] = None,
    noise: opt.Noise = None,
    rate: opt.Rate = None,
    records: opt.Records = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    delta: opt.ReportedDelta = None,
    plan: opt.PlanName = None,
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
        return _ledger_charges(source, delta, group, neighbours)
    _check_exclusive(plan, noise, rate, batch_size, steps, epochs)
    if plan is None and noise is None:
        raise InvalidPlan(
            "no charges to account for. Pass --noise with --rate and --steps, --plan with --steps, "
            "a run's folder, or --ledger."
        )
    priced = opt.priced_plan(plan, noise, rate, records, batch_size)
    counts = {priced: opt.steps_of(steps, epochs, priced)}
    dimensions = {} if dimension is None else {priced: dimension}
    adjacency = _adjacency(group, neighbours)
    notes = [f"delta {DEFAULT_DELTA:g} by default: set --delta well below 1 / records"]
    guarantee = compose(counts, DEFAULT_DELTA if delta is None else delta, dimensions, adjacency)
    guarantee = _for_units(guarantee, records)
    return _Charges(counts, dimensions, adjacency, guarantee, notes if delta is None else [])


def _ledger_charges(path: Path, delta: float | None, group: int, neighbours: str | None) -> _Charges:
    """The charges of a ledger, checked against the other files of its run."""
    from hush.accounting.ledger import reported_delta
    from hush.training.run_folder import checked_ledger

    ledger, notes = checked_ledger(path)
    chosen, reason = reported_delta(ledger, delta)
    if ledger.cut_short:
        notes = [
            "its last line is cut short: charges may be missing, and epsilon is at least this",
            *notes,
        ]
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
    best = {"advantage": attacker.advantage, "success": attacker.success}
    charges.print({"attacker": best}, [f"  {attacker}"], as_json=options["as_json"])


@_takes_charges
def explain(**options: Any) -> None:
    """Success of the best attack on a release with this epsilon, before training or after.

    Example: hush explain --noise 1.0 --records 60000 --batch-size 600 --epochs 20

    Of a plan that `hush calibrate` wrote: hush explain --plan plan.toml --steps 2000
    """
    from hush.accounting.attacker import membership
    from hush.accounting.explanation import MIN_ERROR_RATE
    from hush.accounting.explanation import explain as explanation_of
    from hush.report.facts import attack_rows, explanation_facts

    charges = _charges(**options)
    meaning = explanation_of(charges.guarantee, charges.counts, charges.dimensions, charges.adjacency)
    header = ["the best attack", "at most", "by epsilon and delta alone"]
    table = Table(header=header, rows=attack_rows(meaning)).markdown()
    lines = [
        "\nAn attacker who sees all that is released, knows everything else and tests "
        f"{membership(charges.adjacency)}:\n\n{table}\n",
        f"  Gaussian DP: mu = {at_most(meaning.trade_off.mu)} (for error rates of {MIN_ERROR_RATE:g} or "
        "more)",
    ]
    charges.print(explanation_facts(meaning), lines, as_json=options["as_json"])


def _check_exclusive(
    plan: str | None,
    noise: float | None,
    rate: float | None,
    batch_size: int | None,
    steps: int | None,
    epochs: float | None,
) -> None:
    """Raise if two options say the same thing."""
    opt.refuse_together(plan=plan, noise=noise)
    opt.refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    opt.refuse_together(steps=steps, epochs=epochs)


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
    epsilon: Annotated[float | None, opt.privacy("Budget: largest epsilon.")] = None,
    delta: opt.Delta = DEFAULT_DELTA,
    tpr: Annotated[float | None, opt.privacy("Risk: true positive rate at --fpr.")] = None,
    fpr: Annotated[float | None, opt.privacy("False positive rate of --tpr.")] = None,
    advantage: Annotated[float | None, opt.privacy("Risk: true less false positive rate.")] = None,
    posterior: Annotated[float | None, opt.privacy("Risk: rate of right membership guesses.")] = None,
    prior: Annotated[float | None, opt.privacy("Prior of membership for --posterior.")] = None,
    noise: opt.Noise = None,
    rate: opt.Rate = None,
    records: opt.Records = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    plan: opt.PlanName = None,
    dimension: opt.Dimension = None,
    fit: Annotated[bool, opt.privacy("A noise scale for each block.", "--fit")] = False,
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
    from hush.accounting.attacker import Attacker
    from hush.accounting.epsilon import compose
    from hush.accounting.shaping import fit_noise

    _check_exclusive(plan, noise, rate, batch_size, steps, epochs)
    adjacency = _adjacency(group, neighbours)
    attacks = {"tpr": tpr, "fpr": fpr, "advantage": advantage, "posterior": posterior, "prior": prior}
    limit = _limit(epsilon, delta, attacks)
    if fit and (adjacency.slots > 1 or not isinstance(limit, Budget)):
        asked = adjacency if isinstance(limit, Budget) else limit
        raise InvalidPlan(
            f"--fit finds noise for an epsilon and {RECORD}, and {asked} was asked for: its shape is "
            "proved best for that alone. Leave out --fit, or calibrate the plan it finds."
        )
    if noise is None:
        start = opt.priced_plan(plan, None, rate, records, batch_size)
        count = opt.steps_of(steps, epochs, start)
        if fit and isinstance(limit, Budget):
            found = fit_noise(start, limit, count, dimension)
        else:
            found = inverse.calibrate(start, limit, count, dimension, adjacency=adjacency)
    elif rate is not None or batch_size is not None:
        found = opt.priced_plan(None, noise, rate, records, batch_size)
        if steps is not None or epochs is not None:
            raise InvalidPlan(
                "noise, rate and steps are all given, and one of them is to be found. Leave one of them "
                "out, or ask `hush account` what they cost."
            )
        count = inverse.max_steps(found, limit, adjacency=adjacency)
    elif steps is not None:
        count = check_count("--steps", steps, "the rate is found for them", at_least=1)
        found = inverse.max_rate(opt.plan_of(FullBatch(), noise), limit, count, adjacency=adjacency)
    else:
        raise InvalidPlan("with --noise, pass --steps to find the rate, or --rate to find the steps.")
    sizes = {} if dimension is None else {found: dimension}
    guarantee = _for_units(compose({found: count}, delta, sizes, adjacency), records)
    risk: dict[str, Any] = {}
    if not isinstance(limit, Budget):
        attained = limit.attained(Attacker({found: count}, dimension, adjacency))
        risk = {"risk": {**limit.to_plain(), "attained": attained}}
    if as_json:
        print_json({**guarantee.to_plain(), "steps": count, "plan": found.to_plain(), **risk})
        return
    print(f"# {counted(count, 'step')}: {guarantee}")
    if risk:
        print(f"# at most {limit}: {at_most(attained, 5)}")
    print(f"\n{plan_text(found)}", end="")


def plans(
    name: Annotated[str | None, typer.Argument(help="Plan to print as a plan file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Named plans: the methods of the papers. With a name, the plan as a file to edit.

    Example: hush plans dpsur > plan.toml
    """
    from hush.plans import NAMES

    if name is not None:
        plan = opt.plan_at(name, {}) if opt.is_named(name) else None
        if plan is None:
            raise InvalidPlan(f"{name} is a file and not a named plan: {', '.join(NAMES)}.")
        if as_json:
            print_json(plan.to_plain())
            return
        named = NAMES[name]
        print(f"# {named.summary}\n# {named.paper}\n# Proof: docs/guarantees/{named.proof}\n")
        print(plan_text(plan), end="")
        return
    if as_json:
        print_json(
            {name: {"summary": each.summary, "paper": each.paper} for name, each in NAMES.items()}
        )
        return
    for name, each in NAMES.items():
        print(f"{name}: {each.summary}\n    {each.paper}")


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


def compare(
    records: Annotated[int, opt.privacy("Number of records in the data set.")],
    dimension: Annotated[int, opt.privacy("Number of parameters.")],
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = 1e-5,
    rate: opt.Rate = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    linf_ratio: Annotated[float | None, about("Largest entry of a gradient over its norm.")] = None,
    subspaces: Annotated[str | None, about("Ranks and norms, e.g. 1000:2.5,290898:1.")] = None,
    acceptance: Annotated[float, about("Share of DPSUR's trials that are accepted.")] = 0.5,
    queries: Annotated[int, about("Number of noisy votes of PATE.")] = 200,
    public_records: Annotated[int, about("Public records of the same kind.")] = 0,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """The methods of the papers at one budget: noise, cost, needs, and which one to use.

    Example: hush compare --records 50000 --dimension 291898 --batch-size 1000 --steps 1500
    --epsilon 2 --linf-ratio 0.1
    """
    from hush.accounting.compare import Setting, check_cap, recommendation
    from hush.accounting.compare import compare as rows_of
    from hush.training.progress import Progress

    _check_exclusive(None, None, rate, batch_size, steps, epochs)
    check_count("--dimension", dimension, "it is a number of parameters", at_least=1)
    if linf_ratio is not None:
        check_cap("--linf-ratio", linf_ratio, dimension)
    plan = opt.priced_plan(None, None, rate, records, batch_size)
    setting = Setting(
        records=records,
        rate=plan.sampling.participation,
        steps=opt.steps_of(steps, epochs, plan),
        dimension=dimension,
        budget=Budget(epsilon=epsilon, delta=delta),
        cap=linf_ratio,
        subspaces=_subspaces(subspaces),
        acceptance=acceptance,
        queries=queries,
        public_records=public_records,
    )
    with Progress("calibrating the noise", unit="methods", visible=not quiet) as progress:
        rows = rows_of(setting, progress.advance)
    advice = recommendation(setting)
    if as_json:
        plain = [{**vars(row), "plan": row.plan and row.plan.to_plain()} for row in rows]
        relation = {"neighbours": RECORD.neighbours, "unit": RECORD.unit}
        print_json({**setting.budget.to_plain(), **relation, "rows": plain, "recommendation": advice})
        return
    cells = []
    for row in rows:
        local = row.per_instance
        cells.append(
            [
                row.method,
                row.name,
                _cell(row.deviation) + (" votes" if row.name == "pate" else ""),
                _cell(row.variance),
                _cell(row.gradients),
                "" if local is None else at_most(local, 3),
                row.needs,
                row.measured,
            ]
        )
    columns = ["method", "plan", "noise", "variance", "gradients", "per-instance", "needs", "measured"]
    print(Table(header=columns, rows=cells).markdown())
    print(
        f"\nEpsilon {epsilon:g} at delta {delta:g} (dp, {RECORD.neighbours} {RECORD.unit}) for "
        f"{setting.steps} updates. Noise: standard deviation on a coordinate of the mean gradient, for "
        "gradients of norm 1 (PATE: on a count; bounded support: before clamping). Variance, and "
        "gradients for each update, are relative to plain DP-SGD. Per-instance: epsilon at a synthetic "
        "location, no guarantee. Measured: pages of docs/results. `hush plans NAME` prints a plan.\n\n"
        f"{advice}"
    )


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else "too much" if math.isinf(value) else f"{value:.4g}"


def _subspaces(text: str | None) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")] if text else []
        return tuple((int(rank), float(norm)) for rank, norm in pairs)
    except ValueError:
        raise InvalidValue(
            f"--subspaces {text} must be pairs of a rank and a norm. Pass e.g. 1000:2.5,290898:1."
        ) from None
