"""Plans, seeds and steps that the tests of training begin with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.parts import Clipping, Noise, Release, Sampling
from hush.training.loop import Run

ENOUGH = hush.Budget(epsilon=1e3, delta=1e-5)


def plan_of(
    sampling: Sampling | None = None,
    clipping: Clipping | None = None,
    noise: Noise | float = 1.0,
    release: Release | None = None,
) -> hush.Plan:
    """A plan of the parts given; Gaussian noise by its multiplier."""
    return hush.Plan(
        sampling=sampling or hush.FullBatch(),
        clipping=clipping or hush.L2(1.0),
        noise=hush.Gaussian(noise) if isinstance(noise, float) else noise,
        release=release or hush.Always(),
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randomness(seed: int = 0) -> hush.Randomness:
    return hush.Randomness(generator=seeded(seed))


def step_of(
    model: nn.Module,
    plan: hush.Plan | None = None,
    loss: Any = None,
    *,
    lr: float = 0.1,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    seed: int | None = None,
    **options: Any,
) -> hush.PrivateStep:
    """A step on the trainable parameters of a model; its randomness is seeded if a seed is given."""
    optimizer = make([value for value in model.parameters() if value.requires_grad], lr=lr)
    if seed is not None:
        options["randomness"] = randomness(seed)
    return hush.PrivateStep(
        model, loss or nn.CrossEntropyLoss(), optimizer, plan or plan_of(), **options
    )


def run(step: hush.PrivateStep, data: Any, steps: int = 1, **reading: Any) -> hush.PrivateStep:
    """The step, after so many batches."""
    for batch in step.batches(data, steps=steps, **reading):
        step(batch)
    return step


def train(
    model: nn.Module,
    plan: hush.Plan,
    data: Any,
    *,
    lr: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    budget: hush.Budget = ENOUGH,
    **options: Any,
) -> Run:
    """A run of `hush.train`, with the options of `hush.Checkpoints` and `hush.Logging` by name alone."""
    kinds: dict[str, Any] = {"checkpoints": hush.Checkpoints, "logging": hush.Logging}
    for name, kind in kinds.items():
        own = {key: options.pop(key) for key in kind.__dataclass_fields__ if key in options}
        options[name] = kind(**own)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    return hush.train(model, nn.CrossEntropyLoss(), optimizer, plan, data, budget=budget, **options)


def weights_of(model: nn.Module) -> Tensor:
    """A copy of all parameters, in one row."""
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def released(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Values that statistics release from here on, in their order."""
    values: list[Tensor] = []

    def fingerprint(noisy: list[Tensor]) -> str:
        values.extend(value.clone() for value in noisy)
        return f"released {len(values)}"

    monkeypatch.setattr("hush.training.methods.statistics.fingerprint", fingerprint)
    return values


def all_but(records: int, *slots: int) -> Tensor:
    """Which slots hold a record: all others than these."""
    present = torch.ones(records, dtype=torch.bool)
    present[list(slots)] = False
    return present
