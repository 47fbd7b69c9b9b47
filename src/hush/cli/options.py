"""Options that several commands share, and their conversion to plans."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli.output import counted
from hush.clipping import L2
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.extensions import choices, extensions
from hush.core.guarantee import Neighbours
from hush.core.parts import Sampling
from hush.core.plan import Plan, read_plan
from hush.core.value import check_count, with_article
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    import torch

MODELS = ("logistic", "mlp", "linear", "cnn")
"""Names of the networks in `hush.models`, which imports torch."""


def about(description: str, *names: str, panel: str | None = None, **checks: Any) -> Any:
    """Option with a help text, in a panel of the help page."""
    return typer.Option(*names, help=description, rich_help_panel=panel, **checks)


_data = partial(about, panel="Data and model")
privacy = partial(about, panel="Privacy")
training = partial(about, panel="Training")
testing = partial(about, panel="Selective release")
running = partial(about, panel="Run and output")


def device_named(value: str | None) -> str | None:
    """Validate --device before the command imports torch."""
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        text = f"--device {value} must be cpu, cuda or cuda:N: exact noise needs double precision."
        raise InvalidValue(f"{text} Pass e.g. --device cpu.")
    return value


def _seed(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 2**63:
        raise InvalidValue("--seed must be a whole number from 0 to 2^63 - 1. Pass e.g. --seed 1.")
    return value


def _installed(
    kind: str, description: str, *own: str, other: Callable[[str], bool] | None = None, or_else: str = ""
) -> Any:
    """Option that accepts names of hush, entry points of `hush.<kind>`, and values that `other` accepts.

    It does not import torch.
    """
    known = (*own, *extensions(kind))

    def check(parameter: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in known and not (other is not None and other(value)):
            text = f"{parameter.opts[0]} {value} must be one of {choices(kind, *own)}"
            raise InvalidValue(f"{text} Or pass {or_else}." if or_else else text)
        return value

    listed = ", ".join(known) or "of other distributions"
    return _data(f"{description}: {listed}{f'; or {or_else}' * bool(or_else)}.", callback=check)


def is_file(data: str) -> bool:
    """Whether --data is the path of a file or folder, and not the name of a data set."""
    named = data == "digits" or data in extensions("datasets")
    return not named and (bool(Path(data).suffix) or Path(data).exists())


_FILES = "the path of a CSV, JSON lines, Parquet or .npz file or of a folder of images by class"
_OWN = "module:function"
Data = Annotated[str, _installed("datasets", "Data set", "digits")]
DataOrFile = Annotated[str, _installed("datasets", "Data set", "digits", other=is_file, or_else=_FILES)]
Target = Annotated[list[str] | None, _data("Target column of a file; repeat it for several.")]
Schema = Annotated[Path | None, _data("Public schema of a file; `hush schema FILE` drafts one.")]
TestData = Annotated[Path | None, _data("File of test records, which need no protection.")]
Model = Annotated[
    str | None,
    _installed(
        *("models", "Network, by default one that fits", *MODELS),
        other=lambda name: ":" in name,
        or_else=_OWN,
    ),
]
Features = Annotated[str | None, _installed("features", "Features of images, computed once")]
DataDir = Annotated[Path | None, _data("Folder with the data files; by default $HUSH_DATA.")]
_DEVICE = running("cpu, cuda or cuda:N; by default cuda if available.", callback=device_named)
Device = Annotated[str | None, _DEVICE]
_SEED = running("Repeatable run, for tests only: the seed reveals the noise.", callback=_seed)
Seed = Annotated[int | None, _SEED]
RunDir = Annotated[Path | None, running("Folder of the run; by default a new folder in runs/.")]
Resume = Annotated[bool, running("Continue the run in --run-dir.")]
LearningRate = Annotated[float, training("Learning rate.", "--lr")]
AsJson = Annotated[bool, running("Print JSON instead of text.", "--json")]
Quiet = Annotated[bool, running("Do not show progress.", "--quiet")]

PlanName = Annotated[
    str | None, privacy("Plan file, or a named plan; `hush plans` lists them.", "--plan")
]
Epsilon = Annotated[float, privacy("Privacy budget: largest epsilon.")]
Delta = Annotated[float, privacy("Delta of the guarantee; well below 1 / records.")]
ReportedDelta = Annotated[float | None, privacy("Delta; by default the delta of the run, or 1e-5.")]
Noise = Annotated[float | None, privacy("Noise multiplier: noise scale / clipping norm.")]
Rate = Annotated[float | None, privacy("Sampling rate: probability that a record is in a batch.")]
Records = Annotated[int | None, privacy("Number of records in the data set.")]
BatchSize = Annotated[int | None, privacy("Expected batch size, instead of --rate.")]
Steps = Annotated[int | None, training("Number of steps.")]
Epochs = Annotated[float | None, training("Passes over the data, instead of --steps.")]
Dimension = Annotated[int | None, privacy("Number of parameters, if the privacy cost depends on it.")]
Group = Annotated[int, privacy("Group size, for group privacy.")]
_ADJACENCY = "Adjacency; zero-out by default. Under add/remove, the number of records is private."
AdjacencyOption = Annotated[Neighbours | None, privacy(_ADJACENCY)]
_UNITS = "User ids for user-level privacy: one line per training record, or a .npy array."
UnitsFile = Annotated[Path | None, privacy(_UNITS, "--units")]


def takes(group: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that adds the fields of a dataclass to the options of a command.

    An instance of the dataclass is the command's first argument.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = inspect.signature(group).parameters
        own = list(inspect.signature(command).parameters.values())[1:]

        @wraps(command)
        def run(**options: Any) -> None:
            common = {name: options.pop(name) for name in shared if name in options}
            command(group(**common), **options)

        listed = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*shared.values(), *own)]
        run.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in listed}
        return run

    return decorate


def reject_together(**options: object) -> None:
    """Raise if more than one of these options is passed."""
    passed = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(passed) > 1:
        raise InvalidPlan(f"{' and '.join(passed)} set the same value. Pass only one of them.")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    rate: Rate = None
    batch_size: BatchSize = None
    steps: Steps = None
    epochs: Epochs = None

    def __post_init__(self) -> None:
        reject_together(rate=self.rate, batch_size=self.batch_size)
        reject_together(steps=self.steps, epochs=self.epochs)

    def count(self, plan: Plan, epochs: float | None = None) -> int:
        """Number of steps; by default the number of steps in `epochs` passes over the data."""
        if self.steps is not None:
            return check_count("--steps", self.steps, "the cost of each step is added up")
        passes = epochs if self.epochs is None else self.epochs
        if passes is None:
            raise InvalidValue("the number of steps is missing. Pass --steps or --epochs.")
        if not 0 < passes < 1e9:
            raise InvalidValue(f"--epochs {passes} must be > 0 and below 1e9. Pass e.g. --epochs 10.")
        return max(1, round(passes / plan.sampling.average_participation))


def sampling_of(
    rate: float | None, records: int | None, batch_size: int | None, unit: str = "record"
) -> Sampling:
    """Poisson sampling at `rate`, or at `batch_size / records`; a full batch if the rate is 1."""
    if rate is None:
        if records is None or batch_size is None:
            way = "Pass --rate, or --records and --batch-size, or --plan."
            raise InvalidPlan(f"the sampling rate is missing. {way}")
        records = check_count("--records", records, "the rate is a share of them", at_least=1)
        rate = share_of("--batch-size", batch_size, records, unit)
    return FullBatch() if rate == 1 else Poisson(rate=rate)


def share_of(option: str, batch: int, records: int, unit: str) -> float:
    """Sampling rate for an expected batch size; raise if the batch is larger than the data."""
    if not 0 < batch <= records:
        raise InvalidValue(
            f"{option} {batch} must be > 0 and <= the {counted(records, unit)}: {with_article(unit)} "
            f"is sampled with probability at most 1. Pass e.g. {option} {max(1, records // 100)}."
        )
    return batch / records


def plan_of(sampling: Sampling, noise: float | None = None, clip: float | None = None) -> Plan:
    """Plan of DP-SGD: l2 clipping with norm `clip` and Gaussian noise with multiplier `noise`.

    The default of both is 1.
    """
    clipping, law = L2(1.0 if clip is None else clip), Gaussian(1.0 if noise is None else noise)
    return Plan(sampling=sampling, clipping=clipping, noise=law)


HYPERPARAMETERS = {
    "rate": ("sampling", "rate"),
    "coordinate-rate": ("sampling", "coordinate_rate"),
    "clip": ("clipping", "clip_norm"),
    "cap": ("clipping", "cap"),
    "linf": ("clipping", "linf"),
    "noise": ("noise", "multiplier"),
    "bands": ("noise", "bands"),
    "beta": ("noise", "beta"),
    "bound": ("noise", "bound"),
    "test-rate": ("release", "test_rate"),
    "test-noise": ("release", "test_multiplier"),
    "test-clip": ("release", "test_clip"),
    "test-threshold": ("release", "threshold"),
    "test": ("release", "test"),
}
"""Part of a plan, and argument of a named plan, by option name."""


def is_named(plan: str | None) -> bool:
    """Whether `plan` is a named plan; raise if it is neither a named plan nor a file."""
    from hush.plans import NAMES

    if plan is not None and plan not in NAMES and not Path(plan).suffix and not Path(plan).exists():
        raise InvalidPlan(
            f"--plan {plan} is neither a plan file nor a named plan: {', '.join(NAMES)}. `hush plans` "
            "describes the named plans, and `hush plans NAME` prints one as a plan file."
        )
    return plan in NAMES


def plan_at(plan: str, options: dict[str, Any], **sizes: float) -> Plan:
    """Read a plan file, or create a named plan with these options (None: the default of the plan).

    `sizes` contains numbers on which some plans depend, such as the number of parameters.
    """
    from hush.plans import NAMES

    passed = {name: value for name, value in options.items() if value is not None}
    if not is_named(plan):
        for name in passed:
            reject_together(plan=plan, **{name: name})
        return read_plan(Path(plan))
    known, arguments = inspect.signature(NAMES[plan].make).parameters, {}
    for name, value in passed.items():
        part, argument = HYPERPARAMETERS[name]
        if argument not in known:
            kind = type(getattr(NAMES[plan].make(), part)).__name__
            instead = " (DPSUR's threshold beta is --test-threshold)" * (plan[:5] + name == "dpsurbeta")
            raise InvalidPlan(
                f"--{name} is not an option of --plan {plan}: its {part} is {kind}{instead}. Leave it "
                f"out, or edit a plan file: hush plans {plan} > plan.toml."
            )
        arguments[argument] = value
    arguments |= {name: size for name, size in sizes.items() if name in known}
    return NAMES[plan].make(**arguments)


def device_of(name: str | None) -> "torch.device":
    """Device of this name; by default a GPU if torch finds one, otherwise the CPU."""
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(device_named(name) or ("cuda" if available else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= available:
        text = f"--device {name}: torch finds {available} CUDA device(s), numbered from 0. Pass e.g. "
        raise InvalidValue(f"{text}--device cpu, or install a build of torch for this GPU.")
    return device
