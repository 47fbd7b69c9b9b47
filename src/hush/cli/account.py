"""`hush account`: epsilon of a plan, or of a ledger."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
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
from hush.core.guarantee import check_delta
from hush.core.plan import read_plan
from hush.core.ranges import check_count

if TYPE_CHECKING:
    from hush.accounting.ledger.ledger import Ledger


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
    delta: Delta = 1e-5,
    plan: PlanFile = None,
    dimension: Annotated[
        int | None, typer.Option(help="Number of parameters, where the cost depends on it.")
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger of a run: what was spent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Epsilon of a number of private steps, or of everything on a ledger.

    A run's ledger is checked against its plan, anchor and checkpoint, also if it is named by --ledger.

    Example: hush account --noise 1.0 --rate 0.01 --steps 10000
    """
    from hush.accounting.attacker import Attacker
    from hush.accounting.epsilon import compose

    refuse_together(run_dir=run_dir, ledger=ledger, plan=plan, noise=noise)
    refuse_together(run_dir=run_dir, ledger=ledger, dimension=dimension)
    refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    refuse_together(steps=steps, epochs=epochs)
    notes: list[str] = []
    if run_dir is not None or ledger is not None:
        charges, notes = _read_ledger(run_dir, ledger)
        counts, sizes = charges.counts, charges.dimensions
        guarantee = charges.epsilon(delta)
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
        guarantee = compose(counts, delta, sizes)
        if records is not None:
            check_delta(delta, check_count("--records", records, "they are counted", at_least=1))
            guarantee = replace(guarantee, records=records)
    attacker = Attacker(counts, sizes)
    if as_json:
        charged = [{"plan": each.to_plain(), "steps": count} for each, count in counts.items()]
        best = {"advantage": attacker.advantage, "success": attacker.success}
        print_json({**guarantee.to_plain(), "attacker": best, "charged": charged, "notes": notes})
        return
    print(guarantee)
    print(f"  {attacker}")
    for each, count in counts.items():
        print(f"  {count} steps of {each}")
    for note in notes:
        print(f"  {note}")


def _read_ledger(run_dir: Path | None, path: Path | None) -> "tuple[Ledger, list[str]]":
    """The ledger of a run or of a path, and notes on what was or could not be checked."""
    from hush.training.checks.run import checked_ledger, ledger_at

    if run_dir is not None:
        return checked_ledger(run_dir)
    assert path is not None
    return ledger_at(path)
