"""`hush schema` and `hush predict`: schemas of files, and predictions for new records."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from hush.cli import options as opt
from hush.cli.experiment import read_settings
from hush.cli.output import counted, print_error, print_json
from hush.core.errors import CheckpointError, Unsupported
from hush.schema import schema_of, schema_text

if TYPE_CHECKING:
    from torch import Tensor

    from hush.training.tables import EncodedTable

_FILE = "CSV, JSON lines, Parquet, .npz, or a folder of images by class."


def schema(
    data: Annotated[Path, typer.Argument(help=_FILE)],
    target: opt.Target = None,
) -> None:
    """Draft the schema of a file: bounds and categories that occur in its records.

    **The draft is not private.** Draft the schema from public records with the same columns, or replace
    its bounds and categories by public knowledge before training.

    Example: hush schema public.csv --target income > schema.toml
    """
    from hush.training.tables import draft_schema, open_table

    print_error(f"the draft has values that occur in {data}; use it only if these records are public")
    drafted = schema_text(draft_schema(open_table(data), target or ()))
    print(
        f"# Drafted by looking at the records of {data.name}, which is not private: unless they\n"
        "# are public, replace bounds and categories by public knowledge. A run publishes its schema.\n"
    )
    print(drafted, end="")


def predict(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run of `hush train --data FILE`.")],
    data: Annotated[Path, typer.Argument(help=f"New records: {_FILE}")],
    out: Annotated[Path, opt.running("CSV file of the predictions.")] = Path("predictions.csv"),
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Predict the targets of new records with the model of a run.

    If the file has the target columns, the command also prints the score. The guarantee of the run
    covers its training records; predictions have no additional privacy cost.

    Example: hush predict runs/people-1 new.csv
    """
    import torch
    from safetensors.torch import load_file

    from hush.models import build
    from hush.training.tables import EncodedTable, open_table, parts_of

    settings: dict[str, Any] = read_settings(run_dir, dict)
    weights = run_dir / "model.safetensors"
    if not {"schema", "target", "model"} <= settings.keys():
        text = f"{run_dir} is not a run on a file with a schema. Pass the folder of a run of "
        raise Unsupported(f"{text}`hush train --data FILE --schema FILE`.")
    if not weights.exists():
        raise CheckpointError(f"{run_dir} has no model.safetensors: finish the run with --resume.")
    table = EncodedTable(open_table(data), schema_of(settings["schema"]), settings["target"], new=True)
    where = opt.device_of(device)
    shape = table.rows([0])[0].shape[1:]
    model = build(settings["model"], classes=table.outputs, shape=shape).to(where)
    model.load_state_dict(load_file(weights, device=str(where)))
    model.eval()
    sums: Any = 0.0
    with out.open("w", newline="", encoding="utf-8") as file, torch.no_grad():
        writer = csv.writer(file, lineterminator="\n")
        ends = ("",) if table.numeric else ("", " probability")
        writer.writerow([f"{name}{end}" for name in table.targets for end in ends])
        for part in parts_of(len(table)):
            inputs, targets = table.rows(part)
            outputs = model(inputs.to(where)).cpu().double()
            for cells in zip(*_columns(table, outputs), strict=True):
                writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells])
            if table.labelled:
                sums = sums + _sums(table, outputs, targets)
    score = _score(table, sums) if table.labelled else {}
    facts = {"records": len(table), "predictions": str(out), **score}
    if as_json:
        print_json(facts)
        return
    print(f"{counted(len(table), 'prediction')} in {out}")
    if score:
        print(", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in score.items()))


def _columns(table: "EncodedTable", outputs: "Tensor") -> list[list[Any]]:
    """Columns of the predictions: values in units of the schema, and probabilities of classes."""
    if table.numeric:
        return _in_units(table, outputs).T.tolist()  # type: ignore[no-any-return]
    if table.classes:
        probabilities, places = (part[:, None] for part in outputs.softmax(1).max(1))
    else:
        places = (outputs > 0).long()
        probabilities = outputs.abs().sigmoid()
    columns = []
    for number, name in enumerate(table.targets):
        values: Any = table.schema[name]
        columns.append([values.values[place] for place in places[:, number].tolist()])
        columns.append(probabilities[:, number].tolist())
    return columns


def _in_units(table: "EncodedTable", scaled: "Tensor") -> Any:
    declared: Any = [table.schema[name] for name in table.targets]
    return np.stack([each.unscale(scaled[:, i].double().numpy()) for i, each in enumerate(declared)], 1)


def _sums(table: "EncodedTable", outputs: "Tensor", targets: "Tensor") -> Any:
    """Sums over records from which `_score` computes the score."""
    if table.numeric:
        predicted, true = _in_units(table, outputs), _in_units(table, targets)
        return np.stack([(predicted - true) ** 2, true, true**2]).sum(1)
    if table.classes:
        hits = (outputs.argmax(1) == targets).sum()
        return np.array([int(hits), *targets.bincount(minlength=table.classes).tolist()])
    hits = ((outputs > 0) == (targets > 0.5)).sum()
    return np.array([int(hits), *targets.sum(0).tolist()])


def _score(table: "EncodedTable", sums: Any) -> dict[str, float]:
    """Score of the predictions, and of the best constant prediction."""
    rows = len(table)
    if table.numeric:
        errors, true, squares = sums
        spread = np.maximum(squares - true**2 / rows, 1e-300)
        return {"rmse": float((errors / rows).mean() ** 0.5), "r2": float((1 - errors / spread).mean())}
    if table.classes:
        return {"accuracy": sums[0] / rows, "accuracy_of_the_majority": sums[1:].max() / rows}
    labels = len(table.targets)
    majority = np.maximum(sums[1:], rows - sums[1:]).sum()
    return {"accuracy": sums[0] / rows / labels, "accuracy_of_the_majority": majority / rows / labels}
