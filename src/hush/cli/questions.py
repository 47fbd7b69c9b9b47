"""`hush account`, `explain`, `calibrate`, `plan`, `plans` and `compare`; imports without torch."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hush.cli import options as opt
from hush.cli.output import counted, print_json
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.guarantee import DEFAULT_DELTA, RECORD, Adjacency, Budget, Guarantee, at_most, check_delta
from hush.core.plan import Plan, plan_text, proof_note
from hush.core.value import check_count
from hush.report.text import Table

_comparing = partial(opt.about, panel="Gradients and methods")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(opt.StepOptions):
    noise: opt.Noise = None
    records: opt.Records = None
    plan: opt.PlanName = None
    dimension: opt.Dimension = None
    group: opt.Group = 1
    neighbours: opt.AdjacencyOption = None
    as_json: opt.AsJson = False

    def __post_init__(self) -> None:
        super().__post_init__()
        opt.reject_together(plan=self.plan, noise=self.noise)
        opt.reject_together(plan=self.plan, rate=self.rate, batch_size=self.batch_size)

    @property
    def adjacency(self) -> Adjacency:
        return Adjacency(group=self.group, neighbours=self.neighbours or RECORD.neighbours)

    def start(self) -> Plan:
        """Plan of --plan, or DP-SGD; its noise multiplier is 1 by default."""
        if self.plan is not None:
            return opt.plan_at(self.plan, {})
        sampling = opt.sampling_of(self.rate, self.records, self.batch_size)
        return opt.plan_of(sampling, self.noise)


@dataclass(frozen=True, kw_only=True)
class CostOptions(PlanOptions):
    run_dir: Annotated[Path | None, typer.Argument(help="Folder of a run.")] = None
    ledger: Annotated[Path | None, opt.privacy("Ledger file, instead of a run's folder.")] = None
    opacus: Annotated[Path | None, opt.privacy("Checkpoint or accountant of Opacus: .pt, .json.")] = None
    delta: opt.ReportedDelta = None


@dataclass(frozen=True)
class _Charges:
    """Number of steps of each plan, and the guarantee of all steps."""

    counts: dict[Plan, int]
    dimensions: dict[Plan, int]
    adjacency: Adjacency
    guarantee: Guarantee
    notes: list[str]

    def print(self, answer: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
        """Print the guarantee, `answer` or `lines`, and the charges.

        For a published guarantee without our proof, the proved epsilon replaces `answer` or `lines`.
        """
        from hush.accounting.epsilon import compose
        from hush.report.facts import proved_counts

        if self.guarantee.basis != "proved":
            counts = proved_counts(self.counts)
            proved = compose(counts, self.guarantee.delta, self.dimensions, self.adjacency)
            answer, lines = (
                {"proved": proved.to_plain()},
                [f"  the same accepted updates, proved (per-acceptance accounting): {proved}"],
            )
        if as_json:
            plain = [{"plan": plan.to_plain(), "steps": count} for plan, count in self.counts.items()]
            print_json({**self.guarantee.to_plain(), **answer, "charged": plain, "notes": self.notes})
            return
        charges = [f"{counted(count, 'step')} of {plan}" for plan, count in self.counts.items()]
        print(self.guarantee, *lines, *(f"  {line}" for line in (*charges, *self.notes)), sep="\n")


def _charges(asked: CostOptions) -> _Charges:
    from hush.accounting.epsilon import compose

    opt.reject_together(run_dir=asked.run_dir, ledger=asked.ledger, opacus=asked.opacus)
    if source := asked.run_dir or asked.ledger or asked.opacus:
        return _charges_of_file(source, asked)
    if asked.plan is None and asked.noise is None:
        way = "Pass --noise, --rate and --steps; --plan and --steps; or a run's folder."
        raise InvalidPlan(f"there are no steps to account for. {way}")
    plan, adjacency = asked.start(), asked.adjacency
    counts = {plan: asked.count(plan)}
    dimensions = {} if asked.dimension is None else {plan: asked.dimension}
    delta, notes = _delta(asked)
    guarantee = _for_units(compose(counts, delta, dimensions, adjacency), asked.records)
    return _Charges(counts, dimensions, adjacency, guarantee, notes)


def _delta(asked: CostOptions) -> tuple[float, list[str]]:
    """Delta, and a note if it is the default."""
    if asked.delta is not None:
        return asked.delta, []
    return DEFAULT_DELTA, [f"delta {DEFAULT_DELTA:g} by default: set --delta well below 1 / records"]


def _charges_of_file(source: Path, asked: CostOptions) -> _Charges:
    """Charges of a ledger, verified against the other files of its run; or charges of an Opacus run."""
    from hush.accounting.ledger import reported_delta
    from hush.accounting.opacus import from_opacus
    from hush.training.run_folder import checked_ledger

    for name in ("plan", "noise", "rate", "records", "batch_size", "steps", "epochs", "dimension"):
        if (value := getattr(asked, name)) is not None:
            raise InvalidPlan(
                f"--{name.replace('_', '-')} {value} cannot be combined with {source}, which contains "
                "the charges. Leave out the option, or the file."
            )
    if asked.opacus is not None:
        run, (delta, notes) = from_opacus(source), _delta(asked)
        guarantee = run.epsilon(delta, group=asked.group, neighbours=asked.adjacency.neighbours)
        gaps = [f"check: {gap}" for gap in run.gaps]
        return _Charges(dict(run.counts), {}, asked.adjacency, guarantee, [*notes, *gaps])
    ledger, notes = checked_ledger(source)
    delta, reason = reported_delta(ledger, asked.delta)
    if ledger.cut_short:
        cut = "the ledger's last line is incomplete: charges may be missing, and epsilon may be larger"
        notes = [cut, *notes]
    guarantee = _for_units(ledger.epsilon(delta, group=asked.group, neighbours=asked.neighbours))
    adjacency = replace(ledger.adjacency, group=asked.group, neighbours=guarantee.neighbours)
    return _Charges(
        dict(ledger.accounted), dict(ledger.dimensions), adjacency, guarantee, [reason, *notes]
    )


def _for_units(guarantee: Guarantee, records: int | None = None) -> Guarantee:
    """Guarantee with the number of records or users; warn if delta is too large for this number."""
    if records is not None:
        count = check_count("--records", records, "delta is compared with it", at_least=1)
        guarantee = replace(guarantee, records=count)
    if guarantee.records is not None:
        check_delta(guarantee.delta, guarantee.records, guarantee.unit)
    return guarantee


@opt.takes(CostOptions)
def account(asked: CostOptions) -> None:
    """Compute epsilon of private steps, of a run or of a ledger.

    The ledger of a run is verified against the other files of the run.

    Example: hush account --noise 1.0 --rate 0.01 --steps 10000

    Group privacy for five records: hush account --noise 1.0 --rate 0.01 --steps 10000 --group 5

    A run: hush account runs/digits-1

    A run of Opacus, with its known gaps: hush account --opacus checkpoint.pt
    """
    from hush.accounting.attacker import Attacker

    charges = _charges(asked)
    attacker = Attacker(charges.counts, charges.dimensions, charges.adjacency)
    best = {"advantage": attacker.advantage, "success": attacker.success}
    charges.print({"attacker": best}, [f"  {attacker}"], as_json=asked.as_json)


@opt.takes(CostOptions)
def explain(asked: CostOptions) -> None:
    """Bound the success of the best membership attack on a plan, a run or a ledger.

    Example: hush explain --noise 1.0 --records 60000 --batch-size 600 --epochs 20

    A plan file: hush explain --plan plan.toml --steps 2000
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
        "\nAn attacker who sees all releases, knows all other records and tests "
        f"{membership(charges.adjacency)}:\n\n{table}\n",
        f"  Gaussian DP: mu = {at_most(meaning.trade_off.mu)} (for error rates of {MIN_ERROR_RATE:g} or "
        "more)",
    ]
    charges.print(explanation_facts(meaning), lines, as_json=asked.as_json)


@opt.takes(PlanOptions)
def calibrate(
    asked: PlanOptions,
    epsilon: Annotated[float | None, opt.privacy("Budget: largest epsilon.")] = None,
    delta: opt.Delta = DEFAULT_DELTA,
    tpr: Annotated[float | None, opt.privacy("Risk limit: true positive rate at --fpr.")] = None,
    fpr: Annotated[float | None, opt.privacy("False positive rate for --tpr.")] = None,
    advantage: Annotated[float | None, opt.privacy("Risk limit: membership advantage.")] = None,
    posterior: Annotated[float | None, opt.privacy("Risk limit: posterior of membership.")] = None,
    prior: Annotated[float | None, opt.privacy("Prior of membership for --posterior.")] = None,
    fit: Annotated[bool, opt.privacy("Fit a noise multiplier per block.", "--fit")] = False,
) -> None:
    """Find the plan that meets a privacy budget or a risk limit, and print it as a plan file.

    Without --noise, find the noise. With --noise and --rate, find the steps.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20

    Risk limit: hush calibrate --tpr 0.05 --fpr 0.01 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting import calibrate as inverse
    from hush.accounting.attacker import Attacker, Risk
    from hush.accounting.epsilon import compose

    attacks = {"tpr": tpr, "fpr": fpr, "advantage": advantage, "posterior": posterior, "prior": prior}
    risks = [name for name, value in attacks.items() if value is not None]
    if epsilon is not None and risks:
        raise InvalidPlan(f"--epsilon and --{risks[0]} are two limits. Pass only one of them.")
    if epsilon is None and not risks:
        way = "Pass --epsilon; --tpr with --fpr; --advantage; or --posterior with --prior."
        raise InvalidPlan(f"the limit is missing. {way}")
    limit = Risk(**attacks) if epsilon is None else Budget(epsilon=epsilon, delta=delta)
    adjacency, dimension = asked.adjacency, asked.dimension
    if asked.noise is None:
        start = asked.start()
        count = asked.count(start)
        calibration = inverse.fit_noise if fit else inverse.calibrate
        found = calibration(start, limit, count, dimension, adjacency=adjacency)
    else:
        found = asked.start()
        if asked.steps is not None or asked.epochs is not None:
            text = (
                "noise, rate and steps are all given, so no value is unknown. Leave out the steps, or "
            )
            raise InvalidPlan(f"{text}compute their cost with `hush account`.")
        count = inverse.max_steps(found, limit, adjacency=adjacency)
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
    """List the named plans (methods of papers); with a name, print its plan file.

    Example: hush plans dpsur > plan.toml
    """
    from hush.plans import NAMES

    if name is None and as_json:
        print_json({key: {"summary": it.summary, "paper": it.paper} for key, it in NAMES.items()})
    elif name is None:
        for key, each in NAMES.items():
            print(f"{key}: {each.summary}\n    {each.paper}")
    elif not opt.is_named(name):
        raise InvalidPlan(f"{name} is a plan file. Pass a named plan: {', '.join(NAMES)}.")
    elif as_json:
        print_json(opt.plan_at(name, {}).to_plain())
    else:
        named, plan = NAMES[name], NAMES[name].make()
        print(f"# {named.summary}\n# {named.paper}\n# Proof: docs/guarantees/{proof_note(plan)}\n")
        print(plan_text(plan), end="")


def plan(
    records: Annotated[int, opt.privacy("Number of records in the data set.")],
    parameters: Annotated[float, opt.privacy("Number of trained parameters, e.g. 1.1e6.")],
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = DEFAULT_DELTA,
    epochs: Annotated[float, opt.training("Compute limit: passes over the data.")] = 50,
    clip: Annotated[float, opt.privacy("Clipping norm of the plan.")] = 1.0,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find the batch size and the number of steps with the best signal-to-noise ratio.

    The compute limit is --epochs. The output is a plan file with the curve in its comments. See
    docs/choosing.md.

    Example: hush plan --records 50000 --parameters 1.1e6 --epsilon 3 > plan.toml
    """
    from hush.accounting import planning
    from hush.accounting.epsilon import compose
    from hush.training.progress import Progress

    for name, value in (("--parameters", parameters), ("--epochs", epochs)):
        if not 0 < value < 1e15:
            raise InvalidValue(f"{name} {value} must be > 0 and below 1e15.")
    with Progress("calibrating the noise", unit="batch sizes", visible=not quiet) as progress:
        points = planning.curve(
            records=records,
            parameters=max(1, round(parameters)),
            budget=Budget(epsilon=epsilon, delta=delta),
            gradients=max(1, round(epochs * records)),
            clip_norm=clip,
            done=progress.advance,
        )
    best = planning.best(points)
    guarantee = _for_units(compose({best.plan: best.steps}, delta), records)
    if as_json:
        rows = [{**vars(point), "plan": point.plan.to_plain()} for point in points]
        print_json({**guarantee.to_plain(), "points": rows, "best": rows[points.index(best)]})
        return
    cells = [
        [
            f"{point.batch:g}" + " (best)" * (point is best),
            f"{point.steps}",
            f"{point.plan.noise.to_plain()['multiplier']:.3g}",
            f"{point.noise:.3g}",
            f"{point.effective:.3g}",
        ]
        for point in points
    ]
    header = ["batch size", "steps", "noise multiplier", "noise / batch", "steps without noise"]
    table = Table(header=header, rows=cells).markdown()
    print(*(f"# {line}" for line in table.splitlines()), sep="\n")
    print(f"#\n# train with --steps {best.steps}: {guarantee}\n\n{plan_text(best.plan)}", end="")


@opt.takes(opt.StepOptions)
def compare(
    work: opt.StepOptions,
    records: Annotated[int, opt.privacy("Number of records in the data set.")],
    dimension: Annotated[int, opt.privacy("Number of parameters.")],
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = DEFAULT_DELTA,
    linf_ratio: Annotated[float | None, _comparing("linf norm / l2 norm of a gradient.")] = None,
    subspaces: Annotated[str | None, _comparing("Ranks and norms, e.g. 1000:2.5,290898:1.")] = None,
    acceptance: Annotated[float, _comparing("Acceptance rate of DPSUR.")] = 0.5,
    queries: Annotated[int, _comparing("Number of queries of PATE.")] = 200,
    public_records: Annotated[int, _comparing("Public records of the same distribution.")] = 0,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compare methods of papers under the same budget: noise, cost and requirements.

    Example: hush compare --records 50000 --dimension 291898 --batch-size 1000 --steps 1500
    --epsilon 2 --linf-ratio 0.1
    """
    from hush.accounting.compare import Setting, check_cap, recommendation
    from hush.accounting.compare import compare as rows_of
    from hush.training.progress import Progress

    check_count("--dimension", dimension, "it is the number of parameters", at_least=1)
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
        "gradients of norm 1 (PATE: on a count; bounded support: before clamping). Variance and "
        "gradients per update are relative to plain DP-SGD. Per-instance: epsilon at a synthetic "
        "location, not a guarantee. Measured: page of docs/results. `hush plans NAME` prints a plan.\n\n"
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
