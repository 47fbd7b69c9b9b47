"""Tensors, data sets, memory-mapped arrays and tables: the same records train alike, bit for bit."""

import gc
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import hush
from hush.core.errors import DataError
from tests.training.helpers import plan_of, run, step_of, weights_of
from tests.training.sources.problems import Items

RECORDS, WIDTH = 24, 3
X = torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.arange(RECORDS) % 2
REVERSED = range(RECORDS - 1, -1, -1)
Pair = namedtuple("Pair", ["x", "y"])
NAMES = ["age", "hours", "income"]


PAIRS = Items(lambda index: (X[index], int(Y[index])), RECORDS)
NAMED = Items(lambda i: {"input": X[i].tolist(), "label": int(Y[i]), "name": f"person {i}"}, RECORDS)
"""Dictionaries of lists and numbers, as a Hugging Face data set gives."""


def columns() -> dict[str, Any]:
    numbers = {name: X[:, place].numpy() for place, name in enumerate(NAMES)}
    return {**numbers, "label": Y.numpy(), "city": np.asarray(["Oslo", "Bergen"] * (RECORDS // 2))}


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(columns())


def hugging_face(form: str | None = None) -> Any:
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    columns = arrow.table({"input": X.tolist(), "label": Y.tolist()})
    # named, as the library's hash of what it holds fails with some releases of pyarrow
    made = datasets.Dataset(datasets.table.InMemoryTable(columns), fingerprint="rows")
    made.set_format(form)
    return made


def mapped(folder: Path, dtype: str = "<f4") -> Any:
    np.save(folder / "x.npy", X.numpy().astype(dtype))
    np.save(folder / "y.npy", Y.numpy())
    return tuple(np.load(folder / name, mmap_mode="r") for name in ("x.npy", "y.npy"))


KINDS: dict[str, Any] = {
    "tensor data set": lambda _: TensorDataset(X, Y),
    "named tuples": lambda _: Items(lambda index: Pair(X[index], int(Y[index])), RECORDS),
    "workers": lambda _: hush.Source(PAIRS, workers=2),
    "subset": lambda _: Subset(PAIRS, range(RECORDS)),
    "subset of tensors": lambda _: Subset(TensorDataset(X.flip(0), Y.flip(0)), REVERSED),
    "collated": lambda _: hush.Source(PAIRS, collate_fn=torch.utils.data.default_collate),
    "arrays": lambda _: (X.numpy(), Y.numpy()),
    "memory-mapped": mapped,
    "memory-mapped, big-endian": lambda folder: mapped(folder, ">f4"),
    "rows": lambda _: hush.Source(NAMED, inputs="input", targets="label"),
    "table": lambda _: hush.Source(frame(), inputs=NAMES, targets="label"),
    "Hugging Face": lambda _: hush.Source(hugging_face(), targets="label"),
    "Hugging Face, as torch": lambda _: hush.Source(hugging_face("torch"), targets="label"),
}


def trained(data: Any, **options: Any) -> Tensor:
    """Weights after a few steps."""
    torch.manual_seed(0)
    settings = {"records": RECORDS, "execution": hush.Execution(physical_batch=5), **options}
    present = settings.pop("present", None)
    plan = plan_of(hush.Poisson(0.6), noise=0.5)
    step = step_of(nn.Linear(WIDTH, 2), plan, lr=1.0, seed=1, **settings)
    return weights_of(run(step, data, 3, present=present).model)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_trains_alike(kind: str, tmp_path: Path) -> None:
    assert torch.equal(trained(KINDS[kind](tmp_path)), trained((X, Y)))


@pytest.mark.parametrize(
    "options",
    [
        {"present": torch.arange(RECORDS) % 5 > 0},
        {"units": hush.Units(owners=torch.arange(RECORDS) // 4, per_unit=3), "records": None},
        {"neighbours": hush.Neighbours.ADD_REMOVE, "records": 25},
    ],
)
def test_sources_go_with_everything_that_a_step_can_do(options: dict[str, Any]) -> None:
    source = hush.Source(PAIRS, workers=int("units" in options))
    assert torch.equal(trained(source, **options), trained((X, Y), **options))


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (["age", "city"], "label", "column 'city' is not numeric"),
        (["age", "town"], "label", "no column 'town'; the columns are age, hours"),
        (["age"], None, "no target was named"),
        (None, "label", "column 'city' is not numeric"),
    ],
)
def test_columns_that_are_no_numbers_are_refused(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        hush.Source(frame(), inputs=inputs, targets=targets)[0]
    assert "Oslo" not in str(raised.value)
    with pytest.raises(DataError, match=r"DataFrame, Series.*hush\.Source\(frame, inputs="):
        len(hush.Source((frame()[["age"]], frame()["label"])))


def test_a_table_has_missing_values_functions_and_dictionaries_of_columns() -> None:
    table = frame()
    both = hush.Source(table, inputs={"x": ["age", "hours"], "y": "income"}, targets="label")[3]
    assert torch.equal(both[0]["x"], X[3, :2])
    assert torch.equal(both[0]["y"], X[3, 2])
    inputs, target = hush.Source(table, inputs=lambda row: [row["age"], 1.0], targets="label")[3]
    assert inputs.tolist() == [float(X[3, 0]), 1.0]
    assert int(target) == 1
    table["count"] = pytest.importorskip("pandas").array([1, None] * (RECORDS // 2), dtype="Int64")
    with pytest.raises(DataError, match="column 'count' is not numeric"):
        hush.Source(table, inputs=["count"], targets="label")[0]


@pytest.fixture(autouse=True)
def _no_leftover_workers() -> Iterator[None]:
    """Workers end with their source."""
    yield
    gc.collect()
    assert torch.multiprocessing.active_children() == []
