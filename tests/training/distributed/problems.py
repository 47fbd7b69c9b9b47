"""Small problems that the ranks of a group train on."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hush
from hush.training.loop import Run
from hush.training.step import PrivateStep
from tests.training import helpers

RECORDS, RATE = 40, 0.25


def model_of(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5))


def data_of(seed: int = 0, records: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        3 * torch.randn(records, 8, generator=generator),
        torch.randint(0, 5, (records,), generator=generator),
    )


def plan_of(**parts: Any) -> hush.Plan:
    return helpers.plan_of(**{"sampling": hush.Poisson(RATE), **parts})


def step_of(model: nn.Module | None = None, **options: Any) -> PrivateStep:
    usual: dict[str, Any] = {"records": RECORDS, "execution": hush.Execution(physical_batch=5)}
    usual |= {"plan": plan_of(), "make": partial(torch.optim.SGD, momentum=0.9)}
    return helpers.step_of(model or model_of(), **{**usual, **options})


def train(
    steps: int, plan: hush.Plan | None = None, data: Any = None, epsilon: float = 500.0, **options: Any
) -> tuple[Tensor, Run]:
    """Weights and result of a run of `hush.train`."""
    model = model_of()
    trained = hush.train(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plan or plan_of(),
        data or data_of(),
        budget=hush.Budget(epsilon=epsilon, delta=1e-3),
        steps=steps,
        randomness=helpers.randomness(),
        execution=hush.Execution(physical_batch=5),
        **options,
    )
    return helpers.weights_of(model), trained
