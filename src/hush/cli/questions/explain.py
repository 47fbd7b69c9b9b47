"""`hush explain`: what a plan or a ledger means to someone who is in the data."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Epochs,
    Group,
    NeighboursOption,
    Noise,
    PlanFile,
    Rate,
    Records,
    Steps,
)
from hush.cli.output import print_json
from hush.cli.questions.charges import Question, charges_of
from hush.report.figure import Table

if TYPE_CHECKING:
    from hush.accounting.explanation import Explanation


def explain(
    run_dir: Annotated[Path | None, typer.Argument(help="Folder of a run, in place of a plan.")] = None,
    noise: Noise = None,
    rate: Rate = None,
    records: Records = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability that the promise may fail; else the run's own, or from the records."
        ),
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
    """What an epsilon means: how far the best attack gets, before anything is trained.

    Example: hush explain --noise 1.0 --records 60000 --batch-size 600 --epochs 20

    Of a plan that `hush calibrate` wrote: hush explain --plan plan.toml --steps 2000
    """
    from hush.accounting.explanation import FALSE_POSITIVE_RATES
    from hush.accounting.explanation import explain as explanation_of
    from hush.accounting.trade_off import MIN_ERROR_RATE

    asked = charges_of(
        Question(
            run_dir=run_dir,
            ledger=ledger,
            plan=plan,
            noise=noise,
            rate=rate,
            records=records,
            batch_size=batch_size,
            steps=steps,
            epochs=epochs,
            dimension=dimension,
            delta=delta,
            group=group,
            neighbours=neighbours,
            advise_delta=True,
        )
    )
    meaning = explanation_of(asked.guarantee, asked.counts, asked.dimensions, asked.adjacency)
    curve = meaning.trade_off
    gaussian = {"mu": curve.mu, "regret": curve.regret, "min_error_rate": MIN_ERROR_RATE}
    if as_json:
        rates = {"false_positive_rates": list(FALSE_POSITIVE_RATES)}
        attacks = {"attack": asdict(meaning.attack), "from_epsilon": asdict(meaning.from_epsilon)}
        print_json(
            {**asked.guarantee.to_plain(), **rates, **attacks, "gaussian": gaussian, **asked.to_plain()}
        )
        return
    from hush.accounting.attacker import membership

    print(asked.guarantee)
    print(
        f"\nAn attacker who sees all that is released, knows everything else and tests "
        f"{membership(asked.adjacency)}:\n\n{_table(meaning).markdown()}\n"
    )
    at_one = meaning.attack.true_positive_rates[1]
    print(
        f"  of any other secret of theirs: guesses that are right 1% of the time without the release "
        f"are right at most {_percent(at_one)} of the time with it\n"
        f"  no easier to tell apart than two unit normals at distance mu = {curve.mu:.4g} (Gaussian DP, "
        f"for error rates of {MIN_ERROR_RATE:g} or more; regret at most {curve.regret:.2g})"
    )
    for line in asked.lines():
        print(f"  {line}")


def _table(meaning: "Explanation") -> Table:
    """The rates that hold, beside those that would follow from epsilon and delta alone."""
    from hush.accounting.explanation import FALSE_POSITIVE_RATES

    columns = (meaning.attack, meaning.from_epsilon)
    found = [
        [
            f"members found, at {100 * rate:g}% false alarms",
            *(_percent(c.true_positive_rates[k]) for c in columns),
        ]
        for k, rate in enumerate(FALSE_POSITIVE_RATES)
    ]
    return Table(
        header=["the best attack", "at most", "by epsilon and delta alone"],
        rows=[
            ["guesses that are right, from even odds", *(_percent(c.posterior) for c in columns)],
            ["advantage: found less false alarms", *(_percent(c.advantage) for c in columns)],
            *found,
        ],
    )


def _percent(share: float) -> str:
    """A share in percent, rounded up to a tenth, or to two digits where it is small."""
    from decimal import ROUND_CEILING, Context

    return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(100 * share):f}%"
