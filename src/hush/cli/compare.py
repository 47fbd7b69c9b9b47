"""`hush compare`: the mechanism that fits a budget."""

from typing import TYPE_CHECKING, Annotated

from hush.cli import options as opt
from hush.cli.options import about
from hush.cli.output import print_json
from hush.core.errors import InvalidValue
from hush.core.guarantee import RECORD, Budget
from hush.core.plan import plan_text
from hush.core.value import check_count
from hush.report.text import Table, bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hush.accounting.compare import Row

_LONGEST = 4.0
"""Noise of the longest bar, relative to DP-SGD."""


def compare(
    records: Annotated[int, about("Number of records in the data set.")],
    dimension: Annotated[int, about("Number of parameters.")],
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = 1e-5,
    rate: opt.Rate = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    linf_ratio: Annotated[float | None, about("Largest entry of a gradient over its norm.")] = None,
    subspaces: Annotated[str | None, about("Ranks and norms, e.g. 1000:2.5,290898:1.")] = None,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """The noise each mechanism needs for the same budget, steps and batch; least first.

    Example: hush compare --records 50000 --dimension 291898 --batch-size 1000 --steps 1500
    --epsilon 2 --linf-ratio 0.1
    """
    from hush.accounting.compare import Setting, check_cap
    from hush.accounting.compare import compare as rows_of
    from hush.training.progress import Progress

    opt.refuse_together(rate=rate, batch_size=batch_size)
    opt.refuse_together(steps=steps, epochs=epochs)
    check_count("--dimension", dimension, "it is a number of parameters", at_least=1)
    if linf_ratio is not None:
        check_cap("--linf-ratio", linf_ratio, dimension)
    plan = opt.plan_of(opt.sampling_of(rate, records, batch_size), 1.0)
    setting = Setting(
        records=records,
        rate=plan.sampling.participation,
        steps=opt.steps_of(steps, epochs, plan),
        dimension=dimension,
        budget=Budget(epsilon=epsilon, delta=delta),
        cap=linf_ratio,
        subspaces=_subspaces(subspaces),
    )
    with Progress("calibrating the noise", unit="mechanisms", visible=not quiet) as progress:
        rows = rows_of(setting, progress.advance)
    if as_json:
        plans = [None if row.plan is None else row.plan.to_plain() for row in rows]
        print_json(
            {
                **setting.budget.to_plain(),
                "neighbours": RECORD.neighbours,
                "unit": RECORD.unit,
                "rows": [{**vars(row), "plan": plan} for row, plan in zip(rows, plans, strict=True)],
            }
        )
        return
    print(_table(rows).markdown())
    print(
        f"\nfor epsilon {epsilon:g} at delta {delta:g} (dp, {RECORD.neighbours} {RECORD.unit}); noise "
        "in units of a typical gradient's Euclidean norm, on the sum of a batch; bars show the noise, "
        f"the longest {_LONGEST:g} times that of DP-SGD; cost is the variance relative to DP-SGD. 'All "
        "entries': as many gradients as twice sampling computes, scaled to the same batch."
    )
    best = next(row for row in rows if row.plan and row.plan.sampling.participation == setting.rate)
    assert best.plan is not None
    print(
        f"\n# {best.mechanism}: the least noise at this batch that needs no public basis. Save the "
        "following as plan.toml,\n# with your clipping norm; `hush explain --plan plan.toml --steps "
        f"{setting.steps}` says what it means.\n\n{plan_text(best.plan)}",
        end="",
    )


def _table(rows: "Sequence[Row]") -> Table:
    """Noise and cost of each mechanism, with a bar for the noise."""
    plain = next(row.deviation for row in rows if row.cost == 1)
    cells = [
        [
            row.mechanism,
            f"{row.deviation:.4g}",
            bar(row.deviation / (_LONGEST * plain)),
            f"{row.signal_to_noise:.3g}",
            f"{row.cost:.3g}",
            row.accountant,
        ]
        for row in rows
    ]
    header = ["mechanism", "noise", "", "signal/noise", "cost", "by"]
    return Table(header=header, rows=cells)


def _subspaces(text: str | None) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")] if text else []
        return tuple((int(rank), float(norm)) for rank, norm in pairs)
    except ValueError:
        raise InvalidValue(
            f"--subspaces {text} must be pairs of a rank and a norm. Pass e.g. 1000:2.5,290898:1."
        ) from None
