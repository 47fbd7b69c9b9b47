"""The benchmark of real models: rows that are measured, and columns that fail on their own."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/models.py, whose neighbours are imported as those of a script are."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("models")


def bench(models: ModuleType, model: str, precision: str = "float32") -> Any:
    options = argparse.Namespace(
        logical=None, physical=4, repeats=1, seconds=1.0, dropout=False, small=True
    )
    return models.Bench(model, precision, options)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_private_step_is_timed_beside_a_plain_one(models: ModuleType, precision: str) -> None:
    (row,) = bench(models, "BERT-base, LoRA", precision).rows("hush")
    assert (row.logical, row.physical, row.note) == (8, 4, "")
    assert row.milliseconds > 0
    assert row.times_plain > 0


def test_a_column_that_runs_out_of_memory_is_tried_with_fewer_records(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(model: nn.Module, task: Any) -> Any:
        if task.physical > 1:
            raise torch.OutOfMemoryError("no more\nof it")
        return models.plain(model, task)

    monkeypatch.setitem(models.COLUMNS, "Opacus hooks", hungry)
    first, second = bench(models, "GPT-2").rows("Opacus hooks")
    assert (first.physical, first.milliseconds, first.note) == (4, None, "out of memory")
    assert second.physical == 1
    assert second.milliseconds > 0
    table = models.summary([first, second], ["plain", "Opacus hooks"])
    assert f"| GPT-2 | - | {second.times_plain:.2f} (1) |" in table.splitlines()


def test_parameters_that_a_step_leaves_as_they_were_are_counted(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(model: nn.Module, task: Any) -> Any:
        return lambda: None

    monkeypatch.setitem(models.COLUMNS, "fastDP", idle)
    (row,) = bench(models, "BERT-base, LoRA").rows("fastDP")
    assert row.note == "10 of 10 parameters not trained"  # two layers of two updates, and the classifier


def test_a_step_that_does_not_clip_is_marked(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models.doubt("BERT-base, LoRA", "hush") == ""
    monkeypatch.setitem(models.COLUMNS, "fastDP", models.plain)
    assert models.doubt("BERT-base, LoRA", "fastDP").startswith("its clipped sum is off by")
