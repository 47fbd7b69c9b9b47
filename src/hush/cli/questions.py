"""`hush account`, `explain`, `calibrate`, `plans` and `compare`: the cost of plans, without torch."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hush.cli import options as opt
from hush.cli.options import about
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.guarantee import DEFAULT_DELTA, RECORD, Adjacency, Budget, Guarantee, at_most, check_delta
from hush.core.plan import Plan, plan_text, proof_note
from hush.core.value import check_count
from hush.report.text import Table
from hush.sampling import FullBatch


@dataclass(frozen=True, kw_only=True)
class Question(opt.Work):
    noise: opt.Noise = None
    records: opt.Records = None
    plan: opt.PlanName = None
    dimension: opt.Dimension = None
    group: opt.Group = 1
    neighbours: opt.Relation = None
    as_json: opt.AsJson = False

    def __post_init__(self) -> None:
        super().__post_init__()
        opt.refuse_together(plan=self.plan, noise=self.noise)
        opt.refuse_together(plan=self.plan, rate=self.rate, batch_size=self.batch_size)

    @property
    def adjacency(self) -> Adjacency:
        return Adjacency(group=self.group, neighbours=self.neighbours or RECORD.neighbours)

    def start(self) -> Plan:
        """The plan of that name or file, or the plan of DP-SGD; its noise is 1 by default."""
        if self.plan is not None:
            return opt.plan_at(self.plan, {})
        sampling = opt.sampling_of(self.rate, self.records, self.batch_size)
        return opt.plan_of(sampling, self.noise)


@dataclass(frozen=True, kw_only=True)
class Charged(Question):
    run_dir: Annotated[Path | None, typer.Argument(help="Folder of a run.")] = None
    ledger: Annotated[Path | None, about("Ledger of a run.")] = None
    delta: opt.ReportedDelta = None


@dataclass(frozen=True)
class _Charges:
    """Steps of each plan, and their guarantee."""

    counts: dict[Plan, int]
    dimensions: dict[Plan, int]
    adjacency: Adjacency
    guarantee: Guarantee
    notes: list[str]

    def print(self, answer: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
        """Print the guarantee, an answer about it and the charges; for a claim, its proved epsilon."""
        from hush.accounting.epsilon import compose
        from hush.report.facts import proved_counts

        if self.guarantee.basis != "proved":
            counts = proved_counts(self.counts)
            proved = compose(counts, self.guarantee.delta, self.dimensions, self.adjacency)
            answer, lines = {"proved": proved.to_plain()}, [f"  the same steps, proved: {proved}"]
        if as_json:
            plain = [{"plan": plan.to_plain(), "steps": count} for plan, count in self.counts.items()]
            print_json({**self.guarantee.to_plain(), **answer, "charged": plain, "notes": self.notes})
            return
        charges = [f"{counted(count, 'step')} of {plan}" for plan, count in self.counts.items()]
        print(self.guarantee, *lines, *(f"  {line}" for line in (*charges, *self.notes)), sep="\n")


def _charges(asked: Charged) -> _Charges:
    from hush.accounting.epsilon import compose

    if source := asked.run_dir or asked.ledger:
        return _ledger_charges(source, asked)
    if asked.plan is None and asked.noise is None:
        way = "Pass --noise, --rate and --steps; --plan and --steps; or a run's folder."
        raise InvalidPlan(f"no charges to account for. {way}")
    plan, adjacency = asked.start(), asked.adjacency
    counts = {plan: asked.count(plan)}
    dimensions = {} if asked.dimension is None else {plan: asked.dimension}
    delta = DEFAULT_DELTA if asked.delta is None else asked.delta
    notes = [f"delta {delta:g} by default: set --delta well below 1 / records"]
    guarantee = _for_units(compose(counts, delta, dimensions, adjacency), asked.records)
    return _Charges(counts, dimensions, adjacency, guarantee, notes if asked.delta is None else [])


def _ledger_charges(source: Path, asked: Charged) -> _Charges:
    """The charges of a ledger, checked against the other files of its run."""
    from hush.accounting.ledger import reported_delta
    from hush.training.run_folder import checked_ledger

    for name in ("plan", "noise", "rate", "records", "batch_size", "steps", "epochs", "dimension"):
        if (value := getattr(asked, name)) is not None:
            raise InvalidPlan(
                f"--{name.replace('_', '-')} {value} is for a question without a ledger: the ledger of "
                f"{source} has the charges. Leave out the option, or the ledger."
            )
    opt.refuse_together(run_dir=asked.run_dir, ledger=asked.ledger)
    ledger, notes = checked_ledger(source)
    delta, reason = reported_delta(ledger, asked.delta)
    if ledger.cut_short:
        cut = "its last line is cut short: charges may be missing, and epsilon is at least this"
        notes = [cut, *notes]
    guarantee = _for_units(ledger.epsilon(delta, group=asked.group, neighbours=asked.neighbours))
    adjacency = replace(ledger.adjacency, group=asked.group, neighbours=guarantee.neighbours)
    return _Charges(dict(ledger.counts), dict(ledger.dimensions), adjacency, guarantee, [reason, *notes])


def _for_units(guarantee: Guarantee, records: int | None = None) -> Guarantee:
    """The guarantee with the number of units; warns if delta is too large for them."""
    if records is not None:
        count = check_count("--records", records, "delta is compared with it", at_least=1)
        guarantee = replace(guarantee, records=count)
    if guarantee.records is not None:
        check_delta(guarantee.delta, guarantee.records, guarantee.unit)
    return guarantee


@opt.takes(Charged)
def account(asked: Charged) -> None:
    """Epsilon of a number of private steps, or of all charges on a ledger.

    A run's ledger is checked against its plan, anchor and checkpoint, also if it is named by --ledger.
    Delta is the run's own, unless --delta names another.

    Example: hush account --noise 1.0 --rate 0.01 --steps 10000

    Of five records together: hush account --noise 1.0 --rate 0.01 --steps 10000 --group 5
    """
    from hush.accounting.attacker import Attacker

    charges = _charges(asked)
    attacker = Attacker(charges.counts, charges.dimensions, charges.adjacency)
    best = {"advantage": attacker.advantage, "success": attacker.success}
    charges.print({"attacker": best}, [f"  {attacker}"], as_json=asked.as_json)


@opt.takes(Charged)
def explain(asked: Charged) -> None:
    """Success of the best attack on a release with this epsilon, before training or after.

    Example: hush explain --noise 1.0 --records 60000 --batch-size 600 --epochs 20

    Of a plan that `hush calibrate` wrote: hush explain --plan plan.toml --steps 2000
    """
    from hush.accounting.attacker import membership
    from hush.accounting.explanation import MIN_ERROR_RATE
    from hush.accounting.explanation import explain as explanation_of
    from hush.report.facts import attack_rows, explanation_facts

    charges = _charges(asked)
    meaning = explanation_of(charges.guarantee, charges.counts, charges.dimensions, charges.adjacency)
    header = ["the best attack", "at most", "by epsilon and delta alone"]
    table = Table(header=header, rows=attack_rows(meaning)).markdown()
    lines = [
        "\nAn attacker who sees all that is released, knows everything else and tests "
        f"{membership(charges.adjacency)}:\n\n{table}\n",
        f"  Gaussian DP: mu = {at_most(meaning.trade_off.mu)} (for error rates of {MIN_ERROR_RATE:g} or "
        "more)",
    ]
    charges.print(explanation_facts(meaning), lines, as_json=asked.as_json)


@opt.takes(Question)
def calibrate(
    asked: Question,
    epsilon: Annotated[float | None, opt.privacy("Budget: largest epsilon.")] = None,
    delta: opt.Delta = DEFAULT_DELTA,
    tpr: Annotated[float | None, opt.privacy("Risk: true positive rate at --fpr.")] = None,
    fpr: Annotated[float | None, opt.privacy("False positive rate of --tpr.")] = None,
    advantage: Annotated[float | None, opt.privacy("Risk: true less false positive rate.")] = None,
    posterior: Annotated[float | None, opt.privacy("Risk: rate of right membership guesses.")] = None,
    prior: Annotated[float | None, opt.privacy("Prior of membership for --posterior.")] = None,
    fit: Annotated[bool, opt.privacy("A noise scale for each block.", "--fit")] = False,
) -> None:
    """The plan that just meets a budget or a risk, ready to be saved as a plan file.

    Without --noise it finds the noise; with --noise, whichever of the steps and the rate is missing.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20

    To a risk: hush calibrate --tpr 0.05 --fpr 0.01 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting import calibrate as inverse
    from hush.accounting.attacker import Attacker, Risk
    from hush.accounting.epsilon import compose
    from hush.accounting.shaping import fit_noise

    attacks = {"tpr": tpr, "fpr": fpr, "advantage": advantage, "posterior": posterior, "prior": prior}
    risks = [name for name, value in attacks.items() if value is not None]
    if epsilon is not None and risks:
        raise InvalidPlan(f"--epsilon and --{risks[0]} are two limits, and a plan meets one. Pass one.")
    if epsilon is None and not risks:
        way = "Pass --epsilon; --tpr with --fpr; --advantage; or --posterior with --prior."
        raise InvalidPlan(f"the limit is missing. {way}")
    limit = Risk(**attacks) if epsilon is None else Budget(epsilon=epsilon, delta=delta)
    adjacency, dimension = asked.adjacency, asked.dimension
    if fit and (adjacency.slots > 1 or isinstance(limit, Risk)):
        other = limit if isinstance(limit, Risk) else adjacency
        raise InvalidPlan(
            f"--fit finds noise for an epsilon and {RECORD}, and {other} was asked for: its shape is "
            "proved best for that alone. Leave out --fit, or calibrate the plan it finds."
        )
    if asked.noise is None:
        start = asked.start()
        count = asked.count(start)
        if fit and isinstance(limit, Budget):
            found = fit_noise(start, limit, count, dimension)
        else:
            found = inverse.calibrate(start, limit, count, dimension, adjacency=adjacency)
    elif asked.rate is not None or asked.batch_size is not None:
        found = asked.start()
        if asked.steps is not None or asked.epochs is not None:
            text = "noise, rate and steps are given, and one of them is to be found. Leave one out, or "
            raise InvalidPlan(f"{text}compute their cost with `hush account`.")
        count = inverse.max_steps(found, limit, adjacency=adjacency)
    elif asked.steps is not None:
        count = check_count("--steps", asked.steps, "the rate is found for them", at_least=1)
        full = opt.plan_of(FullBatch(), asked.noise)
        found = inverse.max_rate(full, limit, count, adjacency=adjacency)
    else:
        raise InvalidPlan("with --noise, pass --steps to find the rate, or --rate to find the steps.")
    sizes = {} if dimension is None else {found: dimension}
    guarantee = _for_units(compose({found: count}, delta, sizes, adjacency), asked.records)
    facts: dict[str, Any] = {"steps": count, "plan": found.to_plain()}
    lines = [f"# {counted(count, 'step')}: {guarantee}"]
    if isinstance(limit, Risk):
        attained = limit.attained(Attacker({found: count}, dimension, adjacency))
        facts["risk"] = {**limit.to_plain(), "attained": attained}
        lines.append(f"# at most {limit}: {at_most(attained, 5)}")
    if asked.as_json:
        print_json({**guarantee.to_plain(), **facts})
        return
    print(*lines, f"\n{plan_text(found)}", sep="\n", end="")


def plans(
    name: Annotated[str | None, typer.Argument(help="Plan to print as a plan file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Named plans: the methods of the papers. With a name, the plan as a file to edit.

    Example: hush plans dpsur > plan.toml
    """
    from hush.plans import NAMES

    if name is None and as_json:
        print_json({key: {"summary": it.summary, "paper": it.paper} for key, it in NAMES.items()})
    elif name is None:
        for key, each in NAMES.items():
            print(f"{key}: {each.summary}\n    {each.paper}")
    elif not opt.is_named(name):
        raise InvalidPlan(f"{name} is a file and not a named plan: {', '.join(NAMES)}.")
    elif as_json:
        print_json(opt.plan_at(name, {}).to_plain())
    else:
        named, plan = NAMES[name], NAMES[name].make()
        print(f"# {named.summary}\n# {named.paper}\n# Proof: docs/guarantees/{proof_note(plan)}\n")
        print(plan_text(plan), end="")


@opt.takes(opt.Work)
def compare(
    work: opt.Work,
    records: Annotated[int, opt.privacy("Number of records in the data set.")],
    dimension: Annotated[int, opt.privacy("Number of parameters.")],
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = DEFAULT_DELTA,
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

    check_count("--dimension", dimension, "it is a number of parameters", at_least=1)
    if linf_ratio is not None:
        check_cap("--linf-ratio", linf_ratio, dimension)
    plan = opt.plan_of(opt.sampling_of(work.rate, records, work.batch_size))
    setting = Setting(
        records=records,
        rate=plan.sampling.participation,
        steps=work.count(plan),
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
    columns = ["method", "plan", "noise", "variance", "gradients", "per-instance", "needs", "measured"]
    cells = []
    for row in rows:
        noise = _cell(row.deviation) + " votes" * (row.name == "pate")
        instance = "" if row.per_instance is None else at_most(row.per_instance, 3)
        cells.append([row.method, row.name, noise, _cell(row.variance), _cell(row.gradients)])
        cells[-1] += [instance, row.needs, row.measured]
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
        way = "must be pairs of a rank and a norm. Pass e.g. 1000:2.5,290898:1."
        raise InvalidValue(f"--subspaces {text} {way}") from None
