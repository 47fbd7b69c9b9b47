"""`hush compare` and `probe`: which mechanism fits a budget and a model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hush.cli import options as opt
from hush.cli.experiment import LEARNING_RATE
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
_WARNING = (
    "no privacy: all of this is computed from the records without noise, so the records must be public"
)


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


def probe(
    data: opt.Data = "digits",
    data_dir: opt.DataDir = None,
    model: opt.Model = "mlp",
    records: Annotated[int, about("Records for directions, and as many to measure.")] = 400,
    steps: Annotated[int, about("Steps of gradient descent before measuring.")] = 100,
    learning_rate: opt.LearningRate = 0.05,
    device: opt.Device = None,
    seed: Annotated[int, about("Seed of the initial weights.")] = 0,
    out: Annotated[Path, about("Folder for probe.json.")] = Path("runs/probe"),
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the geometry of a model's gradients on public records, and which clipping fits it.

    Example: hush probe --data fashion-mnist --model mnist-cnn
    """
    import torch

    from hush.core.atomic_files import check_folder
    from hush.data import load, tensors
    from hush.models import build
    from hush.report.geometry import advice, numbers, summary_table
    from hush.training.methods.public_bases import probe as measure
    from hush.training.progress import Progress

    LEARNING_RATE.check("--lr", learning_rate)
    check_count("--records", records, "gradients are measured", 2)
    check_count("--steps", steps, "the model is trained first")
    torch_device = opt.device_of(device)
    torch.manual_seed(seed)
    dataset = load(data, data_dir)
    x, y, _, _ = tensors(dataset)
    if 2 * records > len(x):
        raise InvalidValue(
            f"--records {records} needs twice as many, and {data} has {len(x)}: directions come from "
            f"other records than those measured. Pass at most --records {len(x) // 2}."
        )
    network = build(model or "mlp", classes=dataset.classes, shape=dataset.shape, dtype=x.dtype).to(
        torch_device
    )
    check_folder("--out", out)
    reference, measured = (
        (x[part].to(torch_device), y[part].to(torch_device))
        for part in (slice(records), slice(records, 2 * records))
    )
    loss = torch.nn.CrossEntropyLoss()
    with Progress(f"measuring the gradients of {model} on {data}", visible=not quiet):
        geometry = measure(network, loss, reference, measured, steps=steps, learning_rate=learning_rate)
    title = f"gradients of {model} on {data} after {steps} steps, {geometry.dimension} parameters"
    notes = [_WARNING, *advice(geometry)]
    report = {"data": data, "model": model, "steps": steps, **numbers(geometry), "notes": notes}
    (out / "probe.json").write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        print_json(report)
        return
    print(f"{title}\n\n{summary_table(geometry).markdown()}\n")
    for note in notes:
        print(f"  {note}")
    print(f"  written: {out / 'probe.json'}")
