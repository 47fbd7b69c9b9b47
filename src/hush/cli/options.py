"""Options that several commands share, and the values they are converted to."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli.output import counted
from hush.clipping import L2
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.extensions import choices, extensions
from hush.core.guarantee import Neighbours
from hush.core.parts import Always, Release, Sampling
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.value import check_count, with_article
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    import torch

MODELS = ("logistic", "mlp")
"""Names of the networks in `hush.models`, which imports torch."""


def about(description: str) -> Any:
    """Option with this help."""
    return typer.Option(help=description)


def device_named(value: str | None) -> str | None:
    """Callback of --device that raises for an unknown device, before the command imports torch."""
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise InvalidValue(
            f"--device {value} must be cpu, cuda or cuda:N: exact noise needs double precision and a "
            "cryptographic stream, which hush has for these alone. Pass e.g. --device cpu."
        )
    return value


def chosen(description: str, *names: str, why: str, name: str | None = None) -> Any:
    """Option with few values, which its help lists and which are checked before torch is imported."""

    def check(parameter: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in names:
            option = parameter.opts[0]
            raise InvalidValue(
                f"{option} {value} must be one of {', '.join(names)}: {why}. Pass e.g. {option} "
                f"{names[0]}."
            )
        return value

    declared = () if name is None else (name,)
    return typer.Option(*declared, help=f"{description}: {', '.join(names)}.", callback=check)


def installed(description: str, kind: str, *own: str) -> Any:
    """Option with hush's own values and the entry points of `hush.<kind>`."""

    def check(parameter: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in (*own, *extensions(kind)):
            raise InvalidValue(f"{parameter.opts[0]} {value} must be one of {choices(kind, *own)}")
        return value

    names = ", ".join((*own, *extensions(kind))) or "of other distributions"
    return typer.Option(help=f"{description}: {names}.", callback=check)


Data = Annotated[str, installed("Data set", "datasets", "digits")]
Model = Annotated[str | None, installed("Network, by default one that fits", "models", *MODELS)]
Features = Annotated[str | None, installed("Features of images, computed once", "features")]
DataDir = Annotated[Path | None, about("Folder with the data files; else HUSH_DATA.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.", callback=device_named)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Repeats a run, for tests: who knows it knows the noise.", min=0, max=2**63 - 1),
]
RunDir = Annotated[Path | None, about("Folder of the run; a new one below runs by default.")]
Resume = Annotated[bool, about("Continue the run in --run-dir.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress on standard error.")]

PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Plan file in place of rate, noise and clip.")
]
Epsilon = Annotated[float, about("Budget: largest epsilon.")]
Delta = Annotated[float, about("Probability that the guarantee may fail.")]
ReportedDelta = Annotated[float | None, about("Probability of failure; the run's, else 1e-5.")]
Noise = Annotated[float | None, about("Noise multiplier, in units of the clip norm.")]
Rate = Annotated[float | None, about("Probability that a record takes part in a step.")]
Records = Annotated[int | None, typer.Option(help="Number of records in the data set.", min=1)]
BatchSize = Annotated[int | None, about("Expected batch size, in place of the rate.")]
Steps = Annotated[int | None, about("Number of steps.")]
Epochs = Annotated[float | None, about("Passes over the data, in place of steps.")]
Dimension = Annotated[int | None, about("Number of parameters, if the cost depends on it.")]
Group = Annotated[int, about("Number of records that change together: group privacy.")]
AdjacencyName = Annotated[
    str | None,
    chosen(
        "Adjacency relation; zero-out by default, add/remove keeps the number of records private",
        *Neighbours,
        why="the guarantee depends on it",
        name="--neighbours",
    ),
]
UnitsFile = Annotated[
    Path | None,
    typer.Option(
        "--units",
        help="Owner of each training record, for user-level privacy: one id a line, or a .npy array.",
    ),
]


def refuse_together(**options: object) -> None:
    """Raise if more than one of these options is given, because one would be ignored."""
    passed = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(passed) > 1:
        raise InvalidPlan(f"{' and '.join(passed)} say the same thing twice. Pass one of them.")


def sampling_of(
    rate: float | None, records: int | None, batch_size: int | None, unit: str = "record"
) -> Sampling:
    """Poisson sampling at `rate`, or at `batch_size` / `records`; a full batch at rate 1.

    Args:
        rate: Probability that a unit of privacy takes part.
        records: Number of units of privacy.
        batch_size: Expected number of them in a batch.
        unit: Name of one of them.
    """
    if rate is None:
        if records is None or batch_size is None:
            raise InvalidPlan(
                "the probability that a record takes part is not given, and epsilon depends on it. Pass "
                "--rate, or --records and --batch-size, or --plan."
            )
        rate = share_of("--batch-size", batch_size, records, unit, records // 100)
    return FullBatch() if rate == 1 else Poisson(rate=rate)


def share_of(option: str, batch: int, records: int, unit: str, example: int) -> float:
    """Sampling rate of an expected batch, or an error if it is larger than the data."""
    if not 0 < batch <= records:
        raise InvalidValue(
            f"{option} {batch} must be > 0 and <= the {counted(records, unit)}: {with_article(unit)} "
            f"takes part with probability at most 1. Pass e.g. {option} {max(1, example)}."
        )
    return batch / records


def plan_of(sampling: Sampling, noise: float, clip: float = 1.0, release: Release | None = None) -> Plan:
    """The plan of DP-SGD: L2 clipping at `clip`, Gaussian noise of multiplier `noise`."""
    noisy = Gaussian(multiplier=noise)
    return Plan(sampling=sampling, clipping=L2(norm=clip), noise=noisy, release=release or Always())


def steps_of(steps: int | None, epochs: float | None, plan: Plan) -> int:
    """The number of steps; an epoch is as many as sample each record once in expectation."""
    if steps is not None:
        return check_count("--steps", steps, "the cost of each step is added up")
    if epochs is None:
        raise InvalidValue("the number of steps is not given. Pass --steps or --epochs.")
    if not 0 < epochs < 1e9:
        raise InvalidValue(f"--epochs {epochs} must be > 0 and below 1e9. Pass e.g. --epochs 10.")
    return max(1, round(epochs / plan.sampling.participation))


def release_of(
    records: int,
    unit: str,
    test: str | None,
    *,
    batch: int | None,
    noise: float | None,
    clip: float | None,
    threshold: float | None,
) -> Release:
    """The release rule of the `--test...` options; without a test batch, every update is released.

    Args:
        records: Number of units of privacy.
        unit: Name of a unit of privacy.
        test: Statistic of the test, "summed" or "mean".
        batch: Expected number of units in a test.
        noise: Noise multiplier of the test.
        clip: Bound on the change of the loss.
        threshold: Accept below this many clips.
    """
    if batch is None:
        options = {"-noise": noise, "-clip": clip, "-threshold": threshold, "": test}
        for name in [name for name, value in options.items() if value is not None]:
            raise InvalidPlan(
                f"--test{name} needs a test batch: no update would be tested. Pass --test-batch."
            )
        return Always()
    # docs/results/selective.md compares the two tests at equal epsilon
    kind: Any = test or "summed"
    default_clip, default_noise = (0.01, 8.0) if kind == "summed" else (0.001, 1.3)
    return Selective(
        rate=share_of("--test-batch", batch, records, unit, min(256, records)),
        clip=default_clip if clip is None else clip,
        multiplier=default_noise if noise is None else noise,
        threshold=-1.0 if threshold is None else threshold,
        test=kind,
    )


def device_of(name: str | None) -> "torch.device":
    """The torch device called `name`; by default a GPU if torch has one, else the CPU."""
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(device_named(name) or ("cuda" if available else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= available:
        raise InvalidValue(
            f"--device {name}: torch finds {available} CUDA device(s), numbered from 0. Pass e.g. "
            "--device cpu, or install a torch that was built for this GPU."
        )
    return device
