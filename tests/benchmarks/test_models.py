"""The benchmark of real models: rows that are measured, and columns that fail on their own."""

import argparse
import importlib
import json
import subprocess
import sys
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


def test_a_column_that_raises_says_so_and_the_next_one_runs(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: nn.Module, task: Any) -> Any:
        raise TypeError("not | this\nmodel")

    monkeypatch.setitem(models.COLUMNS, "fastDP", broken)
    measured = bench(models, "GPT-2")
    (row,) = measured.rows("fastDP")
    assert str(row) == "| GPT-2 | fastDP | 4 of 8 | - | - | - | - | TypeError: not / this |"
    (row,) = measured.rows("plain")
    assert row.times_plain == 1


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


@pytest.mark.slow
def test_the_memory_of_a_step_is_without_that_of_the_steps_beside_it(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"held": 0, "cached": 0, "peak": 0}

    def hold(number: int) -> None:
        memory["held"] += number
        memory["peak"] = max(memory["peak"], memory["held"] + memory["cached"])

    def step(needs: int, keeps: int) -> None:
        hold(needs + keeps)
        memory["held"] -= needs
        memory["cached"] += needs  # the allocator gives back nothing by itself

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: memory.update(cached=0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: memory["held"] + memory["cached"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: memory["peak"])
    monkeypatch.setattr(
        torch.cuda,
        "reset_peak_memory_stats",
        lambda: memory.update(peak=memory["held"] + memory["cached"]),
    )
    mebibyte = 2**20
    hold(100 * mebibyte)  # models of 30 and of 70 MiB
    first = models.Meter(lambda: step(10 * mebibyte, 0), 30 * mebibyte)
    graph = iter([200 * mebibyte, 0])  # captured in the first step, and kept
    second = models.Meter(lambda: step(500 * mebibyte, next(graph)), 70 * mebibyte)
    for _ in range(2):
        second.measure()
        first.measure()
    assert (first.mebibytes, second.mebibytes) == (40, 70 + 200 + 500)


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(FOLDER / "models.py"), "--small", "--repeats", "1", "--out", str(out)]
    command += ["--models", "BERT-base;GPT-2", "--columns", "plain;hush", "--precision", "bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(out.read_text())
    assert [(row["model"], row["column"]) for row in rows] == [
        ("BERT-base", "plain"), ("BERT-base", "hush"), ("GPT-2", "plain"), ("GPT-2", "hush"),
    ]  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| BERT", "| GPT"))]
    assert len(lines) == 4 + 2 * 2, "the rows, and a line a model in the tables of time and of memory"
