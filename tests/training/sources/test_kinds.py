"""Tensors, data sets, memory-mapped arrays and tables: the same records train alike, bit for bit."""

import gc
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import hush
from hush.core.errors import DataError
from hush.training.data import count, take

RECORDS, WIDTH = 24, 3
X = torch.randn(RECORDS, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.arange(RECORDS) % 2
REVERSED = range(RECORDS - 1, -1, -1)
NAMES = ["age", "hours", "income"]


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index], int(Y[index])


class NamedRows(Pairs):
    """Dictionaries of lists and numbers, as a Hugging Face data set gives."""

    def __getitem__(self, index: int) -> Any:
        return {"input": X[index].tolist(), "label": int(Y[index]), "name": f"person {index}"}


class Series:
    """Column of a table, as much of it as is used."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.dtype = self.values.dtype

    @property
    def iloc(self) -> Any:
        return self

    def __getitem__(self, rows: list[int]) -> "Series":
        return Series(self.values[rows])

    def to_numpy(self) -> Any:
        return self.values


class Table:
    """Stand-in for a DataFrame, for where pandas is not installed."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.data = {name: np.asarray(values) for name, values in columns.items()}
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    @property
    def iloc(self) -> "Rows":
        return Rows(self)

    def __getitem__(self, name: str) -> Series:
        return Series(self.data[name])


class Rows:
    def __init__(self, table: Table) -> None:
        self.table = table

    def __getitem__(self, rows: list[int]) -> Table:
        return Table({name: values[rows] for name, values in self.table.data.items()})


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


def row_function(row: Any) -> Tensor:
    return torch.tensor([row[name] for name in NAMES])


KINDS: dict[str, Any] = {
    "tensor data set": lambda _: TensorDataset(X, Y),
    "data set": lambda _: Pairs(),
    "workers": lambda _: hush.Source(Pairs(), workers=2),
    "subset": lambda _: Subset(Pairs(), range(RECORDS)),
    "subset of tensors": lambda _: Subset(TensorDataset(X.flip(0), Y.flip(0)), REVERSED),
    "subset of a subset": lambda _: Subset(Subset(TensorDataset(X, Y), REVERSED), REVERSED),
    "collated": lambda _: hush.Source(Pairs(), collate_fn=torch.utils.data.default_collate),
    "tensors, collated": lambda _: hush.Source((X, Y), collate_fn=torch.utils.data.default_collate),
    "arrays": lambda _: (X.numpy(), Y.numpy()),
    "array and tensor": lambda _: (X.numpy(), Y),
    "memory-mapped": mapped,
    "memory-mapped, big-endian": lambda folder: mapped(folder, ">f4"),
    "memory-mapped, workers": lambda folder: hush.Source(mapped(folder), workers=1),
    "rows": lambda _: hush.Source(NamedRows(), inputs="input", targets="label"),
    "rows, arguments": lambda _: hush.Source(NamedRows(), inputs={"input": "input"}, targets="label"),
    "stand-in table": lambda _: hush.Source(Table(columns()), inputs=NAMES, targets="label"),
    "stand-in table, function": lambda _: hush.Source(
        Table(columns()), inputs=row_function, targets="label"
    ),
    "table": lambda _: hush.Source(frame(), inputs=NAMES, targets="label"),
    "table, function": lambda _: hush.Source(frame(), inputs=row_function, targets="label"),
    "Hugging Face": lambda _: hush.Source(hugging_face(), targets="label"),
    "Hugging Face, as torch": lambda _: hush.Source(hugging_face("torch"), targets="label"),
    "Hugging Face, workers": lambda _: hush.Source(hugging_face(), targets="label", workers=1),
}


def trained(data: Any, **options: Any) -> Tensor:
    """Weights after a few steps."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 2)
    settings = {"records": RECORDS, "execution": hush.Execution(physical_batch=5), **options}
    reading = {name: settings.pop(name) for name in ("present",) if name in settings}
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=1.0),
        hush.Plan(
            sampling=hush.Poisson(rate=0.6),
            clipping=hush.L2(norm=1.0),
            noise=hush.Gaussian(multiplier=0.5),
        ),
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(1)),
        **settings,
    )
    for batch in step.batches(data, steps=3, **reading):
        step(batch)
    return model.weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_trains_alike(kind: str, tmp_path: Path) -> None:
    assert torch.equal(trained(KINDS[kind](tmp_path)), trained((X, Y)))


SETTINGS: dict[str, dict[str, Any]] = {
    "empty slots": {"present": torch.arange(RECORDS) % 5 > 0},
    "units": {"units": hush.Units(owners=torch.arange(RECORDS) // 4, per_unit=3), "records": None},
    "add/remove": {"neighbours": hush.Neighbours.ADD_REMOVE, "records": 25},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("workers", [0, 1])
def test_sources_go_with_everything_that_a_step_can_do(setting: str, workers: int) -> None:
    options = SETTINGS[setting]
    assert torch.equal(
        trained(hush.Source(Pairs(), workers=workers), **options), trained((X, Y), **options)
    )


def test_only_rows_that_are_asked_for_leave_the_disk(tmp_path: Path) -> None:
    """Of a file that is larger than what may be taken of it: the rest of it is a hole."""
    rows = 2**22
    x = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(rows, 1024))
    x[rows - 1] = 1.0
    inputs, targets = take((x, np.zeros(rows)), torch.tensor([rows - 1, 0]))
    assert inputs.sum(1).tolist() == [1024.0, 0.0]
    assert len(targets) == 2
    assert count((x, np.zeros(rows))) == rows


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (["age", "city"], "label", "column 'city' does not hold a number"),
        (["age", "town"], "label", "no column 'town'; the columns are age, hours"),
        (["age"], None, "nothing says which of them is to be predicted"),
        (None, "label", "column 'city' does not hold a number"),
        (None, "labels", "no column 'labels'; the columns are age, hours"),
    ],
)
@pytest.mark.parametrize("kind", ["table", "stand-in"])
def test_columns_that_are_no_numbers_are_refused(
    inputs: Any, targets: Any, message: str, kind: str
) -> None:
    table = frame() if kind == "table" else Table(columns())
    with pytest.raises(DataError, match=message) as raised:
        hush.Source(table, inputs=inputs, targets=targets)[0]
    assert "Oslo" not in str(raised.value)


def test_missing_values_of_a_table_are_named_by_column() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(
        {"age": pandas.array([1, None, 3], dtype="Int64"), "pay": [1.0, np.nan, 2.0], "label": [0, 1, 0]}
    )
    with pytest.raises(DataError, match="column 'age' does not hold a number, or numbers, in every"):
        hush.Source(table, inputs=["age"], targets="label").take([0, 1, 2])
    inputs, _ = hush.Source(table, inputs=["pay"], targets="label").take([0, 1, 2])
    assert inputs.isnan().tolist() == [[False], [True], [False]], "left out of the step, as everywhere"


def test_a_collator_that_returns_a_tokenizer_s_dictionary_is_read_by_name() -> None:
    """As collators of the transformers library do: a mapping that is no dict, labels among the rest."""

    class Texts(Pairs):
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": [7] * (index + 1), "label": index % 2}

    def collator(rows: list[Any]) -> UserDict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True)
        labels = torch.tensor([row["label"] for row in rows])
        return UserDict(input_ids=ids, attention_mask=(ids > 0).long(), labels=labels)

    source = hush.Source(Texts(), collate_fn=collator, targets="labels", pad_to=4)
    inputs, targets = source.take([1, 8])
    assert inputs["input_ids"].tolist() == [[7, 7, 0, 0], [7, 7, 7, 7]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert sorted(inputs) == ["attention_mask", "input_ids"]
    assert targets.tolist() == [1, 0]


def test_several_targets_are_one_vector_or_several_by_name() -> None:
    source = hush.Source(
        Table(columns()), inputs="age", targets={"labels": ["label", "hours"], "one": "label"}
    )
    inputs, targets = source.take([3, 4])
    assert inputs.tolist() == X[3:5, 0].tolist()
    assert targets["labels"].tolist() == [[1.0, float(X[3, 1])], [0.0, float(X[4, 1])]]
    assert targets["one"].dtype == torch.int64


@pytest.fixture(autouse=True)
def _no_leftover_workers() -> Iterator[None]:
    """Workers end with their source."""
    yield
    gc.collect()
    assert torch.multiprocessing.active_children() == []
