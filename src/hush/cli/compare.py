"""`hush compare`: the noise each mechanism needs for the same guarantee."""

from typing import Annotated

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Delta,
    Epochs,
    Epsilon,
    Rate,
    Steps,
    plan_of,
    refuse_together,
    sampling_of,
    steps_of,
)
from hush.cli.output import print_json, progress_lines
from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget
from hush.core.ranges import check_count
from hush.report.figure import Table


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
    as_json: AsJson = False,
) -> None:
    """The noise each mechanism needs for the same budget, steps and batch; least first.

    Example: hush compare --records 50000 --dimension 291898 --batch-size 1000 --steps 1500
    --epsilon 2 --linf-ratio 0.1
    """
    from hush.accounting.compare import Setting, check_cap
    from hush.accounting.compare import compare as rows_of

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
    with progress_lines("calibrating the noise of each mechanism"):
        rows = rows_of(setting)
    if as_json:
        print_json({"rows": [vars(row) for row in rows]})
        return
    table = Table(
        header=[
            "mechanism",
            "noise per coordinate",
            "as published",
            "variance",
            "signal/noise",
            "cost",
            "by",
        ],
        rows=[
            [
                row.mechanism,
                f"{row.deviation:.4g}",
                "-" if row.published is None else f"{row.published:.4g}",
                f"{row.variance:.4g}",
                f"{row.signal_to_noise:.4g}",
                f"{row.cost:.3g}",
                row.accountant,
            ]
            for row in rows
        ],
    )
    print(table.markdown())
    print(
        "\nnoise in units of a typical gradient's Euclidean norm, on the sum of a batch; cost is the "
        "variance over that of plain DP-SGD. 'All entries': as many gradients as twice sampling "
        "computes, scaled to the same batch. 'As published' numbers are for comparison and promise "
        "nothing."
    )


def _subspaces(text: str | None) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")] if text else []
        return tuple((int(rank), float(norm)) for rank, norm in pairs)
    except ValueError:
        raise InvalidValue(
            f"--subspaces {text} must be pairs of a rank and a norm. Pass e.g. 1000:2.5,290898:1."
        ) from None
