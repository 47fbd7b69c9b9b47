"""`hush compare` and `hush tune-selective`: the noise that mechanisms need for the same guarantee."""

from typing import TYPE_CHECKING, Annotated

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
    Epsilon,
    Quiet,
    Rate,
    Steps,
    plan_of,
    refuse_together,
    sampling_of,
    steps_of,
)
from hush.cli.output import print_json
from hush.core.errors import HushError, InvalidValue
from hush.core.guarantee import RECORD, Budget
from hush.core.plan import plan_text
from hush.core.value import check_count
from hush.noise import Gaussian
from hush.report.bars import bars, room
from hush.report.figure import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hush.accounting.compare import Row

_LONGEST = 4.0
"""Noise of the longest bar, in units of plain DP-SGD's; some mechanisms have hundreds of times it."""


def compare(
    records: Annotated[int, typer.Option(help="Number of records in the data set.")],
    dimension: Annotated[int, typer.Option(help="Number of parameters.")],
    epsilon: Epsilon = 3.0,
    delta: Delta = 1e-5,
    rate: Rate = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    linf_ratio: Annotated[
        float | None, typer.Option(help="Largest entry of a gradient over its Euclidean norm.")
    ] = None,
    subspaces: Annotated[
        str | None, typer.Option(help="Ranks and norms of subspaces, e.g. 1000:2.5,290898:1.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """The noise each mechanism needs for the same budget, steps and batch; least first.

    Example: hush compare --records 50000 --dimension 291898 --batch-size 1000 --steps 1500
    --epsilon 2 --linf-ratio 0.1
    """
    from hush.accounting.compare import Setting, check_cap
    from hush.accounting.compare import compare as rows_of
    from hush.training.progress import Progress

    refuse_together(rate=rate, batch_size=batch_size)
    refuse_together(steps=steps, epochs=epochs)
    check_count("--dimension", dimension, "it is counted", at_least=1)
    if linf_ratio is not None:
        check_cap("--linf-ratio", linf_ratio, dimension)
    plan = plan_of(sampling_of(rate, records, batch_size), 1.0)
    setting = Setting(
        records=records,
        rate=plan.sampling.participation,
        steps=steps_of(steps, epochs, plan),
        dimension=dimension,
        budget=Budget(epsilon=epsilon, delta=delta),
        cap=linf_ratio,
        subspaces=_subspaces(subspaces),
    )
    with Progress("calibrating the noise", unit="mechanisms", visible=not quiet) as progress:
        rows = rows_of(setting, progress.advance)
    if as_json:
        statement = {**setting.budget.to_plain(), "neighbours": RECORD.neighbours, "unit": RECORD.unit}
        plans = [None if row.plan is None else row.plan.to_plain() for row in rows]
        print_json(
            {
                **statement,
                "rows": [{**vars(row), "plan": plan} for row, plan in zip(rows, plans, strict=True)],
            }
        )
        return
    print(_table(rows).markdown())
    print(
        f"\nfor epsilon {epsilon:g} at delta {delta:g} (dp, {RECORD.neighbours} {RECORD.unit}); noise "
        "in units of a typical gradient's Euclidean norm, on the sum of a batch; bars are of the noise, "
        f"the longest {_LONGEST:g} times that of plain DP-SGD; cost is the variance over that of plain "
        "DP-SGD. 'All entries': as many gradients as twice sampling computes, scaled to the same batch. "
        "'As published' numbers are for comparison and promise nothing."
    )
    at_this_batch = [
        (row.mechanism, row.plan)
        for row in rows
        if row.plan is not None and row.plan.sampling.participation == setting.rate
    ]
    mechanism, best = at_this_batch[0]
    print(
        f"\n# {mechanism}: the least noise at this batch that needs no public basis. Save what follows "
        "as plan.toml,\n# with your clipping norm in place of its own; `hush explain --plan plan.toml "
        f"--steps {setting.steps}` says what it means.\n\n{plan_text(best)}",
        end="",
    )


def _table(rows: "Sequence[Row]") -> Table:
    """Noise and cost of each mechanism, with a bar for the noise."""
    plain = next(row.deviation for row in rows if row.cost == 1)
    header = ["mechanism", "noise", "as published", "signal/noise", "cost", "by"]
    cells = [
        [
            row.mechanism,
            f"{row.deviation:.4g}",
            "-" if row.published is None else f"{row.published:.4g}",
            f"{row.signal_to_noise:.3g}",
            f"{row.cost:.3g}",
            row.accountant,
        ]
        for row in rows
    ]
    beside = len(
        Table(header=[*header, ""], rows=[[*row, ""] for row in cells]).markdown().split("\n")[0]
    )
    width, blocks = room(beside)
    drawn = bars([row.deviation for row in rows], full=_LONGEST * plain, width=width, blocks=blocks)
    lines = [[*row[:2], bar, *row[2:]] for row, bar in zip(cells, drawn, strict=True)]
    return Table(header=[*header[:2], "", *header[2:]], rows=lines)


def tune_selective(
    records: Annotated[int, typer.Option(help="Number of records in the data set.")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size of the training.")],
    updates: Annotated[int, typer.Option(help="Accepted updates wanted.")],
    epsilon: Epsilon,
    delta: Delta = 1e-5,
    acceptance: Annotated[float, typer.Option(help="Share of trials to be accepted.")] = 0.5,
    signal: Annotated[
        float,
        typer.Option(help="Mean change of a record's loss, in standard deviations: a public guess."),
    ] = 0.1,
    contrast: Annotated[
        float, typer.Option(help="How much more often helpful proposals must be accepted.")
    ] = 2.0,
    clip: Annotated[float, typer.Option(help="Largest Euclidean norm of a gradient.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """The least training noise for a number of accepted updates: both tests, and the better one's plan.

    Example: hush tune-selective --records 60000 --batch-size 2048 --updates 646 --epsilon 1
    """
    from hush.accounting.selective_tuning import tune_selective as tune

    start = plan_of(sampling_of(None, records, batch_size), 1.0, clip)
    budget = Budget(epsilon=epsilon, delta=delta)
    tuned, failed = {}, {}
    for test in ("summed", "mean"):
        try:
            tuned[test] = tune(
                start,
                records=records,
                budget=budget,
                updates=updates,
                test=test,
                acceptance=acceptance,
                signal=signal,
                contrast=contrast,
            )
        except HushError as error:
            failed[test] = error
    if not tuned:
        raise failed["summed"]
    noise = {
        test: choice.plan.noise.multiplier
        for test, choice in tuned.items()
        if isinstance(choice.plan.noise, Gaussian)
    }
    best = min(noise, key=noise.__getitem__)
    if as_json:
        tests = {
            test: {
                "plan": choice.plan.to_plain(),
                "trials": choice.trials,
                "guarantee": choice.guarantee.to_plain(),
                "helpful": choice.helpful,
                "harmful": choice.harmful,
            }
            for test, choice in tuned.items()
        }
        reasons = {test: str(error) for test, error in failed.items()}
        print_json({"best": best, "tests": tests, "failed": reasons})
        return
    for test, choice in tuned.items():
        print(
            f"# {test}: training noise {noise[test]:.4g} for {choice.trials} trials; accepts "
            f"{choice.helpful:.0%} of helpful and {choice.harmful:.0%} of harmful proposals"
        )
    for test, reason in failed.items():
        print(f"# {test}: {reason}")
    print(f"# {best} test, {tuned[best].guarantee}\n")
    print(plan_text(tuned[best].plan), end="")


def _subspaces(text: str | None) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")] if text else []
        return tuple((int(rank), float(norm)) for rank, norm in pairs)
    except ValueError:
        raise InvalidValue(
            f"--subspaces {text} must be pairs of a rank and a norm. Pass e.g. 1000:2.5,290898:1."
        ) from None
