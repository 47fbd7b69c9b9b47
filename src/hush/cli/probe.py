"""`hush probe`: geometry of per-sample gradients, and which clipping would pay."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hush.cli.options import MODELS, AsJson, DataDir, Device, LearningRate, Quiet, device_of, installed
from hush.cli.output import print_json
from hush.cli.runs.experiment import LEARNING_RATE
from hush.core.errors import InvalidValue
from hush.core.extensions import choices
from hush.core.value import check_count

if TYPE_CHECKING:
    from hush.data.dataset import Dataset

_WARNING = (
    "no privacy: all of this is computed from the records without noise and describes them, so they "
    "must be public (or made up: --data synthetic)"
)


def probe(
    data: Annotated[
        str,
        typer.Option(
            help="Public data set, or `synthetic` for noise with random labels: "
            f"{choices('datasets', 'digits', 'synthetic')}",
            callback=installed("--data", "datasets", "digits", "synthetic"),
        ),
    ] = "digits",
    data_dir: DataDir = None,
    model: Annotated[
        str,
        typer.Option(
            help=f"Network: {choices('models', *MODELS)}",
            callback=installed("--model", "models", *MODELS),
        ),
    ] = "mlp",
    shape: Annotated[
        str, typer.Option(help="Of synthetic records: channels, height and width.")
    ] = "1,28,28",
    records: Annotated[
        int, typer.Option(help="How many to find directions with, and as many to measure.")
    ] = 400,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent before measuring.")] = 100,
    learning_rate: LearningRate = 0.05,
    device: Device = None,
    seed: Annotated[int, typer.Option(help="Of the initial weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Where CSV, JSON and PNG files go.")] = Path("runs/probe"),
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure the geometry of a model's gradients on public records; say which clipping would pay.

    Example: hush probe --data fashion-mnist --model mnist-cnn
    """
    import torch

    from hush.data import load, tensors
    from hush.models import build
    from hush.report.geometry import geometry_figure, numbers
    from hush.training.methods.public_bases import probe as measure
    from hush.training.progress import Progress

    LEARNING_RATE.check("--lr", learning_rate)
    check_count("--records", records, "they are counted", 2)
    check_count("--steps", steps, "they are counted")
    torch_device = device_of(device)
    torch.manual_seed(seed)
    dataset = _synthetic(shape, 2 * records) if data == "synthetic" else load(data, data_dir)
    x, y, _, _ = tensors(dataset)
    if 2 * records > len(x):
        raise InvalidValue(
            f"--records {records} needs twice as many, and {data} has {len(x)}: directions come from "
            f"other records than those measured. Pass at most --records {len(x) // 2}."
        )
    network = build(model, classes=dataset.classes, shape=dataset.shape, dtype=x.dtype).to(torch_device)
    reference, measured = (
        (x[part].to(torch_device), y[part].to(torch_device))
        for part in (slice(records), slice(records, 2 * records))
    )
    loss = torch.nn.CrossEntropyLoss()
    with Progress(f"measuring the gradients of {model} on {data}", visible=not quiet):
        geometry = measure(network, loss, reference, measured, steps=steps, learning_rate=learning_rate)
    title = f"gradients of {model} on {data} after {steps} steps, {geometry.dimension} parameters"
    figure = geometry_figure("probe", title, geometry, [_WARNING])
    files = [*figure.save(out), out / "probe.json"]
    report = {
        "data": data,
        "model": model,
        "steps": steps,
        **numbers(geometry),
        "notes": list(figure.notes),
    }
    files[-1].write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        print_json({**report, "files": [str(file) for file in files]})
        return
    print(f"{title}\n\n{figure.table().markdown()}\n")
    for note in figure.notes:
        print(f"  {note}")
    print(f"  written: {', '.join(map(str, files))}")


def _synthetic(shape: str, records: int) -> "Dataset":
    """Independent normal pixels and random labels, of ten classes."""
    import numpy as np
    import torch

    from hush.data.dataset import Dataset

    try:
        sizes = tuple(int(size) for size in shape.split(","))
        valid = 0 < len(sizes) <= 4 and min(sizes) > 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidValue(f"--shape {shape!r} must be sizes with commas. Pass e.g. --shape 3,32,32.")
    x, y = torch.randn(records, *sizes).numpy(), torch.randint(0, 10, (records,)).numpy()
    return Dataset(
        name="synthetic", x_train=x, y_train=y.astype(np.int64), x_test=x[:1], y_test=y[:1], classes=10
    )
