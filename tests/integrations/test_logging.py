"""Loggers: which keys reach TensorBoard and MLflow."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import InvalidValue
from hush.integrations.logging import MLflowLogger, TensorBoardLogger
from tests.training.helpers import plan_of, train

PUBLIC = {"epsilon", "delta", "learning_rate"}
HELD_OUT = {"evaluation/loss", "evaluation/accuracy"}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def trained(logger: Any) -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(60, 4), torch.arange(60) % 3, nn.Linear(4, 3)
    plan = plan_of(hush.Poisson(0.5), hush.L2(0.8), 4.0)
    train(model, plan, (x, y), lr=0.5, steps=5, evaluation=(x + 1, y), every=5, callbacks=[logger])


def test_tensorboard_gets_public_numbers_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writer = Mock()
    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda _: writer)
    logger = TensorBoardLogger(tmp_path, every=2)
    trained(logger)
    logger.close()
    writer.close.assert_called_once()
    keys: dict[int, set[str]] = {number: set() for number in range(1, 6)}
    for written in writer.add_scalar.call_args_list:
        name, _, step = written.args
        keys[step].add(name)
    assert keys == {1: set(), 2: PUBLIC, 3: set(), 4: PUBLIC, 5: PUBLIC | HELD_OUT}


def test_mlflow_gets_sensitive_numbers_that_are_named_under_keys_that_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[tuple[dict[str, float], int, str | None]] = []

    def log_metrics(values: dict[str, float], step: int, run_id: str | None) -> None:
        lines.append((values, step, run_id))

    stand_in(monkeypatch, "mlflow", log_metrics=log_metrics)
    trained(MLflowLogger("run", every=5, sensitive=["batch_size", "loss", "skipped", "clipped_share"]))
    ((values, step, run),) = lines
    assert (step, run) == (5, "run")
    marked = {"sensitive/batch_size", "sensitive/loss", "sensitive/skipped", "sensitive/clipped_share"}
    assert set(values) == PUBLIC | HELD_OUT | marked


def test_a_name_that_is_not_sensitive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "mlflow")
    for wrong in ("loss", ["epsilon"]):
        with pytest.raises(InvalidValue, match="must be a list of names among batch_size"):
            MLflowLogger(sensitive=wrong)


def test_a_library_that_is_missing_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"mlflow is not installed.*pip install '\.\[mlflow\]'"):
        MLflowLogger()
