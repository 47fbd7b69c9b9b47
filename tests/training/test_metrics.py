"""Metrics that callbacks get."""

from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import InvalidValue
from hush.training.loop import Run
from hush.training.metrics import StepMetrics
from tests.training.helpers import plan_of, train

X = 0.5 * torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
PLAN = plan_of(hush.Poisson(0.5), hush.L2(1.1), 4.0)
BUDGET = hush.Budget(epsilon=20.0, delta=1e-3)
PUBLIC = {"epsilon", "delta", "learning_rate"}


def trained(callback: Any, scheduler: Any = None, data: Any = (X, Y), **options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if scheduler is not None:
        options["scheduler"] = scheduler(optimizer)
    fixed: dict[str, Any] = {"budget": BUDGET, "steps": 4, "callbacks": [callback]}
    return train(model, PLAN, data, optimizer=optimizer, **fixed, **options)


def test_a_callback_gets_what_is_charged_or_public_after_every_step() -> None:
    lines: list[tuple[int, dict[str, float]]] = []
    run = trained(
        lambda step, metrics: lines.append((step, dict(metrics))),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        evaluation=(X + 1, Y),
        every=2,
    )
    assert [step for step, _ in lines] == [1, 2, 3, 4]
    assert [line["learning_rate"] for _, line in lines] == [0.5, 0.25, 0.125, 0.0625]
    assert [line["epsilon"] for _, line in lines] == pytest.approx(
        [hush.epsilon(PLAN, steps, 1e-3).epsilon.upper for steps in (1, 2, 3, 4)]
    )
    scores = {"evaluation/loss", "evaluation/accuracy"}
    assert [set(line) for _, line in lines] == [PUBLIC, PUBLIC | scores] * 2
    assert lines[3][1]["evaluation/loss"] == run.metrics[1]["loss"]
    assert lines[3][1]["epsilon"] == run.guarantee.epsilon.upper


def test_nothing_public_follows_the_records() -> None:
    """Same metrics whoever is there: of epsilon, delta and the schedule, no number is of the records."""

    def lines(present: torch.Tensor) -> list[dict[str, float]]:
        told: list[dict[str, float]] = []
        data = hush.Source((X, Y), present=present)
        trained(lambda _, metrics: told.append(dict(metrics)), data=data)
        return told

    assert lines(torch.arange(60) > 30) == lines(torch.arange(60) > 5)


def test_metrics_are_of_one_step() -> None:
    kept: list[StepMetrics] = []
    trained(lambda _, metrics: kept.append(metrics))
    with pytest.raises(InvalidValue, match="'epsilon' of step 1 was read after step 4"):
        kept[0]["epsilon"]
    with pytest.raises(KeyError, match=r"no metric 'loss'.*does not cover metrics of the training"):
        kept[0]["loss"]
