"""What `hush account` and `hush explain` are asked about: a plan's steps, or a ledger's charges."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hush.cli.options import (
    BatchSize,
    Epochs,
    Group,
    NeighboursOption,
    Noise,
    PlanFile,
    Rate,
    Records,
    ReportedDelta,
    Steps,
    plan_of,
    refuse_together,
    sampling_of,
    steps_of,
)
from hush.cli.output import counted
from hush.core.errors import InvalidPlan
from hush.core.guarantee import (
    DEFAULT_DELTA,
    Adjacency,
    Guarantee,
    Neighbours,
    advised_delta,
    check_delta,
)
from hush.core.plan import Plan, read_plan
from hush.core.value import check_count


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options of a question about charges, as they were passed: None where they were left out."""

    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run: its ledger, checked against the other files."),
    ] = None
    noise: Noise = None
    rate: Rate = None
    records: Records = None
    batch_size: BatchSize = None
    steps: Steps = None
    epochs: Epochs = None
    delta: ReportedDelta = None
    plan: PlanFile = None
    dimension: Annotated[
        int | None, typer.Option(help="Number of parameters, where the cost depends on it.")
    ] = None
    ledger: Annotated[Path | None, typer.Option(help="Ledger of a run: what was spent.")] = None
    group: Group = 1
    neighbours: NeighboursOption = None
    advise_delta: bool = field(default=False, metadata={"option": False})
    """Whether delta follows the number of records where it was left out."""


@dataclass(frozen=True, kw_only=True)
class Charges:
    """Steps of each plan, who is protected, and what is guaranteed."""

    counts: dict[Plan, int]
    dimensions: dict[Plan, int]
    adjacency: Adjacency
    guarantee: Guarantee
    notes: list[str]

    def to_plain(self) -> dict[str, Any]:
        """The charges and notes as plain data."""
        charged = [{"plan": plan.to_plain(), "steps": count} for plan, count in self.counts.items()]
        return {"charged": charged, "notes": self.notes}

    def lines(self) -> list[str]:
        """The charges and notes in words."""
        charged = [f"{counted(count, 'step')} of {plan}" for plan, count in self.counts.items()]
        return [*charged, *self.notes]


def charges_of(question: Question) -> Charges:
    """The charges that the options name, and their guarantee."""
    from hush.accounting.epsilon import compose

    source = question.run_dir or question.ledger
    for name in ("plan", "noise", "rate", "records", "batch_size", "steps", "epochs", "dimension"):
        value = getattr(question, name)
        if value is not None and source is not None:
            raise InvalidPlan(
                f"--{name.replace('_', '-')} {value} is for a question without a ledger: that of "
                f"{source} says what was charged, whatever is asked for. Leave it out, or leave out the "
                "ledger."
            )
    refuse_together(run_dir=question.run_dir, ledger=question.ledger)
    refuse_together(plan=question.plan, noise=question.noise)
    refuse_together(plan=question.plan, rate=question.rate, batch_size=question.batch_size)
    refuse_together(steps=question.steps, epochs=question.epochs)
    if source is not None:
        return _ledger_charges(question)
    if question.plan is not None:
        plan = read_plan(question.plan)
    elif question.noise is not None:
        sampling = sampling_of(question.rate, question.records, question.batch_size)
        plan = plan_of(sampling, question.noise)
    else:
        raise InvalidPlan(
            "nothing to account for. Pass --noise with --rate and --steps, or --plan with --steps, or a "
            "run's folder, or --ledger."
        )
    counts = {plan: steps_of(question.steps, question.epochs, plan)}
    dimensions = {} if question.dimension is None else {plan: question.dimension}
    adjacency = adjacency_of(question.group, question.neighbours)
    adjacency.check_records(question.records)
    delta, notes = question.delta, []
    if delta is None and question.records is not None and question.advise_delta:
        records = check_count("--records", question.records, "they are counted", at_least=1)
        delta = min(DEFAULT_DELTA, advised_delta(records))
        notes = [f"delta {delta:g}, as none was asked for: at most a tenth of 1/{records}"]
    guarantee = compose(counts, DEFAULT_DELTA if delta is None else delta, dimensions, adjacency)
    return Charges(
        counts=counts,
        dimensions=dimensions,
        adjacency=adjacency,
        guarantee=for_units(guarantee, question.records),
        notes=notes,
    )


def _ledger_charges(question: Question) -> Charges:
    """The charges of a ledger, checked against the files beside it where a run's folder has them."""
    from hush.accounting.ledger import reported_delta
    from hush.training.checks.run import checked_ledger, ledger_at

    if question.run_dir is not None:
        ledger, notes = checked_ledger(question.run_dir)
    else:
        assert question.ledger is not None
        ledger, notes = ledger_at(question.ledger)
    delta, reason = reported_delta(ledger, question.delta)
    relation = None if question.neighbours is None else Neighbours(question.neighbours)
    guarantee = for_units(ledger.epsilon(delta, group=question.group, neighbours=relation))
    return Charges(
        counts=dict(ledger.counts),
        dimensions=dict(ledger.dimensions),
        adjacency=replace(ledger.adjacency, group=question.group, neighbours=guarantee.neighbours),
        guarantee=guarantee,
        notes=[reason, *notes],
    )


def adjacency_of(group: int, neighbours: str | None) -> Adjacency:
    """What neighbours of a question without a ledger differ in."""
    relation = Neighbours.ZERO_OUT if neighbours is None else Neighbours(neighbours)
    return Adjacency(group=group, neighbours=relation)


def for_units(guarantee: Guarantee, records: int | None = None) -> Guarantee:
    """The guarantee, its delta held against the number of units where it is given or on the ledger."""
    if records is not None:
        count = check_count("--records", records, "they are counted", at_least=1)
        guarantee = replace(guarantee, records=count)
    if guarantee.records is not None:
        check_delta(guarantee.delta, guarantee.records, guarantee.unit)
    return guarantee
