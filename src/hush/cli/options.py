"""Options that several commands share, and the values they are converted to."""

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
from hush.core.parts import Always, Release, Sampling
from hush.core.plan import Plan, read_plan
from hush.core.release import Selective
from hush.core.value import check_count, with_article
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    import torch

MODELS = ("logistic", "mlp")
"""Names of the networks in `hush.models`, which imports torch."""


def about(description: str, *names: str, panel: str | None = None, **checks: Any) -> Any:
    """Option with this help, in a panel of the command's help."""
    return typer.Option(*names, help=description, rich_help_panel=panel, **checks)


_data = partial(about, panel="Data and model")
privacy = partial(about, panel="Privacy")
training = partial(about, panel="Training")
testing = partial(about, panel="Selective release")
running = partial(about, panel="Run and output")


def device_named(value: str | None) -> str | None:
    """Callback of --device, before the command imports torch."""
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        text = (
            f"--device {value} must be cpu, cuda or cuda:N, which have double precision for exact noise."
        )
        raise InvalidValue(f"{text} Pass e.g. --device cpu.")
    return value


def _seed(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 2**63:
        raise InvalidValue("--seed must be a whole number from 0 to 2^63 - 1. Pass e.g. --seed 1.")
    return value


def _installed(kind: str, description: str, *own: str) -> Any:
    """Option with hush's own names and the entry points of `hush.<kind>`; checked without torch."""
    known = (*own, *extensions(kind))

    def check(parameter: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and value not in known:
            raise InvalidValue(f"{parameter.opts[0]} {value} must be one of {choices(kind, *own)}")
        return value

    listed = ", ".join(known) or "of other distributions"
    return _data(f"{description}: {listed}.", callback=check)


Data = Annotated[str, _installed("datasets", "Data set", "digits")]
Model = Annotated[str | None, _installed("models", "Network, by default one that fits", *MODELS)]
Features = Annotated[str | None, _installed("features", "Features of images, computed once")]
DataDir = Annotated[Path | None, _data("Folder with the data files; else HUSH_DATA.")]
_DEVICE = running("cpu, cuda or cuda:N; cuda if there is one.", callback=device_named)
Device = Annotated[str | None, _DEVICE]
_SEED = running("Repeats a run, for tests: a known seed is known noise.", callback=_seed)
Seed = Annotated[int | None, _SEED]
RunDir = Annotated[Path | None, running("Folder of the run; a new one below runs by default.")]
Resume = Annotated[bool, running("Continue the run in --run-dir.")]
LearningRate = Annotated[float, training("Learning rate.", "--lr")]
AsJson = Annotated[bool, running("Print one JSON object instead of text.", "--json")]
Quiet = Annotated[bool, running("Show no progress on standard error.", "--quiet")]

PlanName = Annotated[str | None, privacy("Plan file, or a name of `hush plans`.", "--plan")]
Epsilon = Annotated[float, privacy("Budget: largest epsilon.")]
Delta = Annotated[float, privacy("Probability that the guarantee may fail.")]
ReportedDelta = Annotated[float | None, privacy("Probability of failure; the run's, else 1e-5.")]
Noise = Annotated[float | None, privacy("Noise multiplier, in units of the clip norm.")]
Rate = Annotated[float | None, privacy("Probability that a record takes part in a step.")]
Records = Annotated[int | None, privacy("Number of records in the data set.")]
BatchSize = Annotated[int | None, privacy("Expected batch size, in place of the rate.")]
Steps = Annotated[int | None, training("Number of steps.")]
Epochs = Annotated[float | None, training("Passes over the data, in place of steps.")]
Dimension = Annotated[int | None, privacy("Number of parameters, if the cost depends on it.")]
Group = Annotated[int, privacy("Number of records that change together: group privacy.")]
_RELATION = "Adjacency relation; add/remove keeps the number of records private; else zero-out."
Relation = Annotated[Neighbours | None, privacy(_RELATION)]
_UNITS = "Owner of each training record, for user-level privacy: one id a line, or a .npy array."
UnitsFile = Annotated[Path | None, privacy(_UNITS, "--units")]


def takes(group: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command that adds the options of a dataclass, which it receives first."""

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


def refuse_together(**options: object) -> None:
    """Raise if more than one of these options is given, because one would be ignored."""
    passed = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(passed) > 1:
        raise InvalidPlan(f"{' and '.join(passed)} say the same thing twice. Pass one of them.")


@dataclass(frozen=True, kw_only=True)
class Work:
    rate: Rate = None
    batch_size: BatchSize = None
    steps: Steps = None
    epochs: Epochs = None

    def __post_init__(self) -> None:
        refuse_together(rate=self.rate, batch_size=self.batch_size)
        refuse_together(steps=self.steps, epochs=self.epochs)

    def count(self, plan: Plan, epochs: float | None = None) -> int:
        """Number of steps; without an option, of this many epochs."""
        if self.steps is not None:
            return check_count("--steps", self.steps, "the cost of each step is added up")
        passes = epochs if self.epochs is None else self.epochs
        if passes is None:
            raise InvalidValue("the number of steps is not given. Pass --steps or --epochs.")
        if not 0 < passes < 1e9:
            raise InvalidValue(f"--epochs {passes} must be > 0 and below 1e9. Pass e.g. --epochs 10.")
        return max(1, round(passes / plan.sampling.participation))


def sampling_of(
    rate: float | None, records: int | None, batch_size: int | None, unit: str = "record"
) -> Sampling:
    """Poisson sampling of units of privacy at `rate` or `batch_size` / `records`; at 1, a full batch."""
    if rate is None:
        if records is None or batch_size is None:
            way = "Pass --rate, or --records and --batch-size, or --plan."
            raise InvalidPlan(f"the probability that a record takes part is not given. {way}")
        records = check_count("--records", records, "the rate is a share of them", at_least=1)
        rate = share_of("--batch-size", batch_size, records, unit)
    return FullBatch() if rate == 1 else Poisson(rate=rate)


def share_of(option: str, batch: int, records: int, unit: str) -> float:
    """Sampling rate of an expected batch, or an error if it is larger than the data."""
    if not 0 < batch <= records:
        raise InvalidValue(
            f"{option} {batch} must be > 0 and <= the {counted(records, unit)}: {with_article(unit)} "
            f"takes part with probability at most 1. Pass e.g. {option} {max(1, records // 100)}."
        )
    return batch / records


def plan_of(
    sampling: Sampling,
    noise: float | None = None,
    clip: float | None = None,
    release: Release = Always(),
) -> Plan:
    """The plan of DP-SGD: L2 clipping at `clip`, Gaussian noise of multiplier `noise`; 1 by default."""
    clipping, law = L2(1.0 if clip is None else clip), Gaussian(1.0 if noise is None else noise)
    return Plan(sampling=sampling, clipping=clipping, noise=law, release=release)


HYPERPARAMETERS = {
    "rate": ("sampling", "rate"),
    "coordinate-rate": ("sampling", "coordinate_rate"),
    "clip": ("clipping", "clip_norm"),
    "cap": ("clipping", "cap"),
    "noise": ("noise", "multiplier"),
    "beta": ("noise", "beta"),
    "bound": ("noise", "bound"),
    "test-rate": ("release", "test_rate"),
    "test-noise": ("release", "test_multiplier"),
    "test-clip": ("release", "test_clip"),
    "test-threshold": ("release", "threshold"),
    "test": ("release", "test"),
}
"""Part of a plan and argument of a named plan, by option."""


def is_named(plan: str | None) -> bool:
    """Whether this is a name of `hush plans`; raises for a name that is neither that nor a file."""
    from hush.plans import NAMES

    if plan is not None and plan not in NAMES and not Path(plan).suffix and not Path(plan).exists():
        raise InvalidPlan(
            f"--plan {plan} is neither a plan file nor a named plan: {', '.join(NAMES)}. `hush plans` "
            "describes them, and `hush plans NAME` prints one as a file."
        )
    return plan in NAMES


def plan_at(plan: str, options: dict[str, Any], **sizes: int) -> Plan:
    """The plan of a file, or a named plan with the given options (None: its own).

    `sizes` are the numbers of parameters and of public records, for plans that depend on them.
    """
    from hush.plans import NAMES

    passed = {name: value for name, value in options.items() if value is not None}
    if not is_named(plan):
        for name in passed:
            refuse_together(plan=plan, **{name: name})
        return read_plan(Path(plan))
    known, arguments = inspect.signature(NAMES[plan].make).parameters, {}
    for name, value in passed.items():
        part, argument = HYPERPARAMETERS[name]
        if argument not in known:
            kind = type(getattr(NAMES[plan].make(), part)).__name__
            raise InvalidPlan(
                f"--{name} is no hyperparameter of --plan {plan}: its {part} is {kind}. Leave it out, "
                f"or edit a plan file: hush plans {plan} > plan.toml."
            )
        arguments[argument] = value
    arguments |= {name: size for name, size in sizes.items() if name in known}
    return NAMES[plan].make(**arguments)


def release_of(records: int, unit: str, batch: int | None, tests: dict[str, Any]) -> Release:
    """The release rule of the `--test...` options; without a test batch, every update is released."""
    passed = {name: value for name, value in tests.items() if name[:4] == "test" and value is not None}
    if batch is None:
        for name in passed:
            text = f"--{name} needs a test batch: no update would be tested. Pass --test-batch."
            raise InvalidPlan(text)
        return Always()
    kind = passed.pop("test", "summed")
    # docs/results/selective.md compares the two tests at equal epsilon
    clip, noise = (0.01, 8.0) if kind == "summed" else (0.001, 1.3)
    return Selective(
        rate=share_of("--test-batch", batch, records, unit),
        clip=passed.get("test-clip", clip),
        multiplier=passed.get("test-noise", noise),
        threshold=passed.get("test-threshold", -1.0),
        test=kind,
    )


def device_of(name: str | None) -> "torch.device":
    """The torch device called `name`; by default a GPU if torch has one, else the CPU."""
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(device_named(name) or ("cuda" if available else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= available:
        text = f"--device {name}: torch finds {available} CUDA device(s), numbered from 0. Pass e.g. "
        raise InvalidValue(f"{text}--device cpu, or install a torch that was built for this GPU.")
    return device
