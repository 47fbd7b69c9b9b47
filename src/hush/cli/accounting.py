"""`hush account` and `hush calibrate`: the epsilon of a plan or a ledger, and its inverse."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
    Epsilon,
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
from hush.core.errors import InvalidPlan
from hush.core.guarantee import RECORD, Adjacency, Budget, Guarantee, Neighbours, check_delta
from hush.core.plan import plan_text, read_plan
from hush.core.ranges import check_count
from hush.sampling import FullBatch

if TYPE_CHECKING:
    from hush.accounting.ledger.ledger import Ledger

_DELTA = 1e-5
"""Delta where none was asked for and no run has one: for up to tens of thousands of records."""


def account(
    run_dir: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run: its ledger, checked against the other files."),
    ] = None,
    noise: Noise = None,
    rate: Rate = None,
    records: Records = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Probability that the promise may fail; the run's own, or else 1e-5."),
    ] = None,
    plan: PlanFile = None,
    dimension: Annotated[
        int | None, typer.Option(help="Number of parameters, where the cost depends on it.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger of a run: what was spent.")] = None,
    group: Group = 1,
    neighbours: NeighboursOption = None,
    as_json: AsJson = False,
) -> None:
    """Epsilon of a number of private steps, or of everything on a ledger.

    A run's ledger is checked against its plan, anchor and checkpoint, also if it is named by --ledger.
    It is answered for at the delta that the run was made for, unless --delta names another.

    Example: hush account --noise 1.0 --rate 0.01 --steps 10000

    Of five records together: hush account --noise 1.0 --rate 0.01 --steps 10000 --group 5
    """
    from hush.accounting.attacker import Attacker
    from hush.accounting.epsilon import compose

    questions: dict[str, object] = {
        "--plan": plan,
        "--noise": noise,
        "--rate": rate,
        "--records": records,
        "--batch-size": batch_size,
        "--steps": steps,
        "--epochs": epochs,
        "--dimension": dimension,
    }
    for option, value in questions.items():
        if value is not None and (run_dir or ledger) is not None:
            raise InvalidPlan(
                f"{option} {value} is for a question without a ledger: that of {run_dir or ledger} says "
                "what was charged, whatever is asked for. Leave it out, or leave out the ledger."
            )
    refuse_together(run_dir=run_dir, ledger=ledger)
    refuse_together(plan=plan, noise=noise)
    refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    refuse_together(steps=steps, epochs=epochs)
    notes: list[str] = []
    relation = None if neighbours is None else Neighbours(neighbours)
    if run_dir is not None or ledger is not None:
        charges, notes = _read_ledger(run_dir, ledger)
        counts, sizes = charges.counts, charges.dimensions
        chosen, reason = _delta_of(charges, delta)
        guarantee = _for_units(charges.epsilon(chosen, group=group, neighbours=relation))
        adjacency = replace(charges.adjacency, group=group, neighbours=guarantee.neighbours)
        notes = [reason, *notes]
    else:
        if plan is not None:
            value = read_plan(plan)
        elif noise is not None:
            value = plan_of(sampling_of(rate, records, batch_size), noise)
        else:
            raise InvalidPlan(
                "nothing to account for. Pass --noise with --rate and --steps, or --plan with "
                "--steps, or a run's folder, or --ledger."
            )
        counts = {value: steps_of(steps, epochs, value)}
        sizes = {} if dimension is None else {value: dimension}
        adjacency = _adjacency(group, neighbours)
        adjacency.check_records(records)
        chosen = _DELTA if delta is None else delta
        guarantee = _for_units(compose(counts, chosen, sizes, adjacency), records)
    attacker = Attacker(counts, sizes, adjacency)
    if as_json:
        charged = [{"plan": part.to_plain(), "steps": count} for part, count in counts.items()]
        best = {"advantage": attacker.advantage, "success": attacker.success}
        print_json({**guarantee.to_plain(), "attacker": best, "charged": charged, "notes": notes})
        return
    print(guarantee)
    print(f"  {attacker}")
    for part, count in counts.items():
        print(f"  {counted(count, 'step')} of {part}")
    for note in notes:
        print(f"  {note}")


def calibrate(
    epsilon: Epsilon,
    delta: Delta = _DELTA,
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
    """The plan that just meets a budget, ready to be saved as a plan file.

    Without --noise it finds the noise; with --noise, whichever of the steps and the rate is missing.

    Example: hush calibrate --epsilon 3 --records 60000 --batch-size 600 --epochs 20
    """
    from hush.accounting import calibrate as inverse
    from hush.accounting.epsilon import compose
    from hush.accounting.shaping.fit import fit_noise

    refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    refuse_together(plan=plan, noise=noise)
    refuse_together(steps=steps, epochs=epochs)
    adjacency = _adjacency(group, neighbours)
    adjacency.check_records(records)
    if fit and adjacency.slots > 1:
        raise InvalidPlan(
            f"--fit finds noise for {RECORD}, and {adjacency} was asked for: its shape is proved best "
            "for that alone. Leave out --fit, --group and --neighbours, or calibrate the plan it finds."
        )
    budget = Budget(epsilon=epsilon, delta=delta)
    sampled = rate is not None or batch_size is not None
    if plan is not None or noise is None:
        start = read_plan(plan) if plan else plan_of(sampling_of(rate, records, batch_size), 1)
        count = steps_of(steps, epochs, start)
        if fit:
            fitting = fit_noise(start, budget, count, dimension)
        else:
            fitting = inverse.calibrate(start, budget, count, dimension, adjacency=adjacency)
    elif sampled:
        fitting = plan_of(sampling_of(rate, records, batch_size), noise)
        if steps is not None or epochs is not None:
            raise InvalidPlan(
                "noise, rate and steps are all given, so there is nothing to find. Leave one of them "
                "out, or ask `hush account` what they cost."
            )
        count = inverse.max_steps(fitting, budget, adjacency=adjacency)
    else:
        if steps is None:
            raise InvalidPlan(
                "with --noise, pass --steps to find the rate, or --rate to find the steps."
            )
        fitting = inverse.max_rate(plan_of(FullBatch(), noise), budget, steps, adjacency=adjacency)
        count = steps
    sizes = {} if dimension is None else {fitting: dimension}
    guarantee = _for_units(compose({fitting: count}, delta, sizes, adjacency), records)
    if as_json:
        print_json({**guarantee.to_plain(), "steps": count, "plan": fitting.to_plain()})
        return
    print(f"# {counted(count, 'step')}: {guarantee}\n")
    print(plan_text(fitting), end="")


def _read_ledger(run_dir: Path | None, path: Path | None) -> "tuple[Ledger, list[str]]":
    """The ledger of a run or of a path, and notes on what was or could not be checked."""
    from hush.training.checks.run import checked_ledger, ledger_at

    if run_dir is not None:
        return checked_ledger(run_dir)
    assert path is not None
    return ledger_at(path)


def _adjacency(group: int, neighbours: str | None) -> Adjacency:
    """What neighbours of a question without a ledger differ in."""
    relation = Neighbours.ZERO_OUT if neighbours is None else Neighbours(neighbours)
    return Adjacency(group=group, neighbours=relation)


def _delta_of(ledger: "Ledger", requested: float | None) -> tuple[float, str]:
    """The delta to answer for: the one asked for, else the run's; and which of them it is, in words."""
    stored = ledger.delta
    if requested is None and stored is None:
        return _DELTA, f"delta {_DELTA:g} by default: the ledger does not say what the run was made for"
    if requested is None or requested == stored:
        assert stored is not None
        return stored, f"delta {stored:g}, as the run was made for"
    own = "" if stored is None else f"; the run was made for delta {stored:g}"
    return requested, f"delta {requested:g}, as asked for{own}"


def _for_units(guarantee: Guarantee, records: int | None = None) -> Guarantee:
    """The guarantee, its delta held against the number of units where it is given or on the ledger."""
    if records is not None:
        count = check_count("--records", records, "they are counted", at_least=1)
        guarantee = replace(guarantee, records=count)
    if guarantee.records is not None:
        check_delta(guarantee.delta, guarantee.records, guarantee.unit)
    return guarantee
