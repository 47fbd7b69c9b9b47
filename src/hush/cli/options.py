"""Options that several commands share, and how they become a plan."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hush.clipping import L2
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.part import Sampling
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    import torch

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Plan file (TOML) in place of rate, noise and clip.")
]
Epsilon = Annotated[float, typer.Option(help="Budget: the epsilon that is not exceeded.")]
Delta = Annotated[float, typer.Option(help="Probability that the promise may fail.")]
Noise = Annotated[float | None, typer.Option(help="Noise multiplier, in units of the clip norm.")]
Rate = Annotated[float | None, typer.Option(help="Chance that a record takes part in a step.")]
Records = Annotated[int | None, typer.Option(help="Number of records in the data set.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected batch size, in place of the rate.")]
Steps = Annotated[int | None, typer.Option(help="Number of steps.")]
Seed = Annotated[
    int | None,
    typer.Option(help="To repeat a run; who knows the seed knows the noise.", min=0, max=2**63 - 1),
]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data, in place of steps.")]


def refuse_together(**options: object) -> None:
    """Raise if more than one of these options is given: one of them would be dropped in silence."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InvalidPlan(f"{' and '.join(given)} say the same thing twice. Pass one of them.")


def sampling_of(rate: float | None, records: int | None, batch_size: int | None) -> Sampling:
    """The sampling that a rate, or a batch size out of so many records, stands for."""
    if rate is None:
        if records is None or batch_size is None:
            raise InvalidPlan(
                "the chance that a record takes part is not given: without it no epsilon can be "
                "computed. Pass --rate, or --records and --batch-size, or --plan."
            )
        if not 0 < batch_size <= records:
            raise InvalidValue(
                f"--batch-size {batch_size} must be > 0 and <= the {records} records: a record takes "
                f"part with a chance of at most 1. Pass e.g. --batch-size {max(1, records // 100)}."
            )
        rate = batch_size / records
    return FullBatch() if rate == 1 else Poisson(rate=rate)


def plan_of(sampling: Sampling, noise: float, clip: float = 1.0) -> Plan:
    """Plain DP-SGD with these numbers."""
    return Plan(sampling=sampling, clipping=L2(norm=clip), noise=Gaussian(multiplier=noise))


def steps_of(steps: int | None, epochs: float | None, plan: Plan) -> int:
    """The number of steps, where an epoch is as many as touch each record once on average."""
    if steps is not None:
        return steps
    if epochs is None:
        raise InvalidValue("the number of steps is not given. Pass --steps or --epochs.")
    if not 0 < epochs < 1e9:
        raise InvalidValue(f"--epochs {epochs} must be > 0 and below 1e9. Pass e.g. --epochs 10.")
    return max(1, round(epochs / plan.sampling.participation))


def device_of(name: str | None) -> "torch.device":
    """The device by that name, or the best one there is."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()  # a device that keeps no values cannot train
        torch.Generator(device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidValue(f"--device {name}: {reason}. Pass e.g. --device cpu.") from None
    return device
