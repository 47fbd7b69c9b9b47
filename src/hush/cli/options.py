"""Options that several commands share, and the plan parts they are converted to."""

import re
from collections.abc import Callable
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


def one_of(option: str, *names: str, why: str) -> Callable[[str | None], str | None]:
    """Callback of an option with few values: raises for others before the command imports anything.

    Args:
        option: its name, with the dashes.
        names: its values.
        why: what is wrong with others.
    """

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise InvalidValue(
                f"{option} {value} must be one of {', '.join(names)}: {why}. Pass e.g. {option} "
                f"{names[0]}."
            )
        return value

    return check


def installed(option: str, kind: str, *own: str) -> Callable[[str | None], str | None]:
    """Callback of an option whose values other distributions extend; raises before torch is imported.

    Args:
        option: Name with the dashes.
        kind: Group of entry points after `hush.`.
        own: Values that hush has itself.
    """

    def check(value: str | None) -> str | None:
        if value is not None and value not in (*own, *extensions(kind)):
            raise InvalidValue(f"{option} {value} must be one of {choices(kind, *own)}")
        return value

    return check


def device_named(value: str | None) -> str | None:
    """Callback of --device: raises for what is none, before the command imports torch."""
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise InvalidValue(
            f"--device {value} must be cpu, cuda or cuda:N: noise is exact in double precision and "
            "drawn from a cryptographic stream, which hush has for these alone. Pass e.g. --device cpu."
        )
    return value


Data = Annotated[
    str,
    typer.Option(
        help=f"Data set: {choices('datasets', 'digits')}",
        callback=installed("--data", "datasets", "digits"),
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"Network, by default one that fits: {choices('models', *MODELS)}",
        callback=installed("--model", "models", *MODELS),
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.", callback=device_named),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress on standard error.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Plan file (TOML) in place of rate, noise and clip.")
]
Epsilon = Annotated[float, typer.Option(help="Budget: the epsilon that is not exceeded.")]
Delta = Annotated[float, typer.Option(help="Probability that the promise may fail.")]
ReportedDelta = Annotated[
    float | None,
    typer.Option(help="Probability that the promise may fail; the run's own, else at most 1e-5."),
]
Noise = Annotated[float | None, typer.Option(help="Noise multiplier, in units of the clip norm.")]
Rate = Annotated[float | None, typer.Option(help="Chance that a record takes part in a step.")]
Records = Annotated[int | None, typer.Option(help="Number of records in the data set.", min=1)]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size, in place of the rate.")]
Steps = Annotated[int | None, typer.Option(help="Number of steps.")]
Group = Annotated[int, typer.Option(help="Number of records that change together: group privacy.")]
Seed = Annotated[
    int | None,
    typer.Option(help="To repeat a run, for tests: who knows it knows the noise.", min=0, max=2**63 - 1),
]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data, in place of steps.")]
Features = Annotated[
    str | None,
    typer.Option(
        help=f"Features of images, computed once: {choices('features')}",
        callback=installed("--features", "features"),
    ),
]
RunDir = Annotated[Path | None, typer.Option(help="Folder of the run; a new one below runs by default.")]
Resume = Annotated[bool, typer.Option(help="Go on where the run in --run-dir stopped.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the data files; else HUSH_DATA.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate.")]

UnitsFile = Annotated[
    Path | None,
    typer.Option(
        "--units",
        help="Owner of each training record, to protect owners: one id a line, or a .npy array.",
    ),
]
PerUnit = Annotated[int | None, typer.Option(help="Records of one owner that a step takes at most.")]
UnitGradient = Annotated[
    str | None,
    typer.Option(
        help="mean (default) or sum of an owner's gradients, which is clipped.",
        callback=one_of("--unit-gradient", "mean", "sum", why="an owner adds one of the two"),
    ),
]
NeighboursOption = Annotated[
    str | None,
    typer.Option(
        "--neighbours",
        help="Adjacency: zero-out (default), add/remove (the number of records is private), replace.",
        callback=one_of("--neighbours", *Neighbours, why="the relation is part of what is promised"),
    ),
]
PublicCount = Annotated[
    int | None,
    typer.Option(
        "--records",
        help="Public constant near the number of records or owners, for --neighbours add/remove.",
    ),
]

TestBatch = Annotated[
    int | None,
    typer.Option(help="Expected records (or owners) in the test of each proposal: a selective run."),
]
TestNoise = Annotated[float | None, typer.Option(help="Noise multiplier of the test.")]
TestClip = Annotated[
    float | None, typer.Option(help="Bound on the change of the loss: each record's, or the mean's.")
]
TestThreshold = Annotated[
    float | None,
    typer.Option(
        help="Accept below this many test clips; -1, the paper's, by default; 0 discriminates best."
    ),
]
TestKind = Annotated[
    str | None,
    typer.Option(
        "--test",
        help="summed (by default) or mean, the DPSUR paper's.",
        callback=one_of("--test", "summed", "mean", why="its charge is proved for these two"),
    ),
]

# The summed test by default: docs/results/selective.md compares the two at equal epsilon.
_TEST_NOISE = {"summed": 8.0, "mean": 1.3}
_TEST_CLIP = {"summed": 0.01, "mean": 0.001}


def refuse_together(**options: object) -> None:
    """Raise if more than one of these options is given: one of them would be dropped in silence."""
    passed = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(passed) > 1:
        raise InvalidPlan(f"{' and '.join(passed)} say the same thing twice. Pass one of them.")


def check_units(
    units: Path | None,
    per_unit: int | None,
    unit_gradient: str | None,
    neighbours: str | None,
    records: int | None,
) -> None:
    """Raise where options that say who is protected lack one another."""
    for option, value in (("--per-unit", per_unit), ("--unit-gradient", unit_gradient)):
        if value is not None and units is None:
            raise InvalidValue(
                f"{option} {value} is for owners of several records, and without --units each record is "
                "protected on its own. Pass --units FILE with the owner of each record, or leave it out."
            )
    if per_unit is not None:
        check_count("--per-unit", per_unit, "a drawn owner takes part with one record at least", 1)
    if records is not None:
        check_count("--records", records, "the divisor of the update is a public number", 1)
    if units is not None and per_unit is None:
        raise InvalidValue(
            f"--units {units} does not say how many records of one owner a step takes, which the "
            "guarantee names. Pass e.g. --per-unit 1."
        )
    if neighbours == Neighbours.ADD_REMOVE and records is None:
        raise InvalidValue(
            "--neighbours add/remove keeps the number of records (or owners) private: the rate, the "
            "divisor and the steps follow a public constant near it instead. Pass e.g. --records 60000."
        )


def sampling_of(
    rate: float | None, records: int | None, batch_size: int | None, unit: str = "record"
) -> Sampling:
    """Poisson sampling at `rate`, or at `batch_size` / `records`; a full batch at rate 1.

    Args:
        rate: chance that a unit of privacy takes part.
        records: number of units of privacy.
        batch_size: expected number of them in a batch.
        unit: what one of them is called.
    """
    if rate is None:
        if records is None or batch_size is None:
            raise InvalidPlan(
                "the chance that a record takes part is not given: without it no epsilon can be "
                "computed. Pass --rate, or --records and --batch-size, or --plan."
            )
        if not 0 < batch_size <= records:
            raise InvalidValue(
                f"--batch-size {batch_size} must be > 0 and <= the {counted(records, unit)}: "
                f"{with_article(unit)} takes part with a chance of at most 1. Pass e.g. --batch-size "
                f"{max(1, records // 100)}."
            )
        rate = batch_size / records
    return FullBatch() if rate == 1 else Poisson(rate=rate)


def plan_of(sampling: Sampling, noise: float, clip: float = 1.0) -> Plan:
    """The plan of plain DP-SGD: L2 clipping at `clip`, Gaussian noise of multiplier `noise`."""
    return Plan(sampling=sampling, clipping=L2(norm=clip), noise=Gaussian(multiplier=noise))


def steps_of(steps: int | None, epochs: float | None, plan: Plan) -> int:
    """The number of steps; an epoch is as many as sample each record once in expectation."""
    if steps is not None:
        return steps
    if epochs is None:
        raise InvalidValue("the number of steps is not given. Pass --steps or --epochs.")
    if not 0 < epochs < 1e9:
        raise InvalidValue(f"--epochs {epochs} must be > 0 and below 1e9. Pass e.g. --epochs 10.")
    return max(1, round(epochs / plan.sampling.participation))


def release_of(
    records: int,
    batch: int | None,
    noise: float | None,
    clip: float | None,
    threshold: float | None,
    test: str | None,
    unit: str = "record",
) -> Release:
    """The release rule of the `--test...` options; without a test batch, every update is released.

    Args:
        records: number of units of privacy.
        batch: expected number of them in a test.
        noise: noise multiplier of the test.
        clip: bound on the change of the loss.
        threshold: accepted below this many clips.
        test: kind of the test.
        unit: what a unit of privacy is called.
    """
    if batch is None:
        options = {
            "--test-noise": noise,
            "--test-clip": clip,
            "--test-threshold": threshold,
            "--test": test,
        }
        for option, value in options.items():
            if value is not None:
                raise InvalidPlan(
                    f"{option} is for a test that is not there: no update would be tested. Pass "
                    "--test-batch as well."
                )
        return Always()
    if not 0 < batch <= records:
        raise InvalidValue(
            f"--test-batch {batch} must be > 0 and <= the {counted(records, unit)}: "
            f"{with_article(unit)} is tested with a chance of at most 1. Pass e.g. --test-batch "
            f"{min(256, records)}."
        )
    kind: Any = test or "summed"
    return Selective(
        rate=batch / records,
        clip=_TEST_CLIP[kind] if clip is None else clip,
        multiplier=_TEST_NOISE[kind] if noise is None else noise,
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
            "--device cpu, or install a torch that was built for the GPU at hand."
        )
    return device
