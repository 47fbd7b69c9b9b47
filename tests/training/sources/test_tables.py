"""Files as tables: rows read by offset are the rows of the file, encoded by the schema."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hush
from hush.core.errors import DataError, InvalidValue, Unsupported
from hush.schema import Categorical, Ignored, Image, Numeric, schema_text
from hush.training.tables import EncodedTable, draft_schema, open_table

SCHEMA = {
    "age": Numeric(low=0, high=100, missing=50),
    "note": Categorical(values=("a, b", "two\nlines", "plain", "other"), unseen="other"),
    "id": Ignored(),
    "income": Categorical(values=("low", "high")),
}
ROWS = [
    {"age": 25, "note": "a, b", "id": "x", "income": "low"},
    {"age": None, "note": "two\nlines", "id": "y", "income": "high"},
    {"age": 100, "note": 'a "quote"', "id": "é", "income": "high"},
    {"age": 300, "note": "plain", "id": "", "income": "low"},
]
FEATURES = [[-0.5, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0]]
CSV = 'age,note,id,income\n25,"a, b",x,low\n,"two\nlines",y,high\n100,"a ""quote""",é,high\n'
CSV += "300,plain,,low\n"


def written(folder: Path, kind: str) -> Path:
    path = folder / f"people.{'csv' if kind in ('bom', 'crlf', 'semicolon', 'blank') else kind}"
    text = CSV if path.suffix == ".csv" else "".join(json.dumps(row) + "\n" for row in ROWS)
    changes: dict[str, Any] = {
        "bom": lambda: "\ufeff" + text,
        "crlf": lambda: text.replace("\n", "\r\n").replace("two\r\n", "two\n"),
        "semicolon": lambda: text.replace("a, b", "A").replace(",", "; ").replace("A", "a, b"),
        "blank": lambda: text.replace(",low\n", ",low\n\n") + "\n",
    }
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(ROWS), path)
    else:
        path.write_bytes(changes.get(kind, lambda: text)().encode())
    return path


@pytest.mark.parametrize(
    "kind", ["csv", "bom", "crlf", "semicolon", "blank", "jsonl", "ndjson", "parquet", "frame"]
)
def test_rows_of_every_kind_of_file_are_equal(tmp_path: Path, kind: str) -> None:
    data: Any = pytest.importorskip("pandas").DataFrame(ROWS)
    source = hush.Source(
        data if kind == "frame" else written(tmp_path, kind), schema=SCHEMA, targets="income"
    )
    order = [2, 0, 3, 1]
    inputs, targets = source.take(order)
    assert torch.equal(inputs, torch.tensor(FEATURES, dtype=torch.float32)[order])
    assert targets.tolist() == [1, 0, 0, 1]
    assert len(source) == 4
    assert source[1][1] == 1


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert EncodedTable(open_table(path), SCHEMA, ["income"]).whole()[1].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("age,note,id\n1,plain,x\n", "no target column 'income': its columns are age, note, id"),
        (
            "age,note,id,income,zip\n1,plain,x,low,9\n",
            r"^the data has the columns \['zip'\] that the schema does not know",
        ),
        ("age,id,income\n1,x,low\n", r"lacks the columns \['note'\] of the schema"),
        ("age,note,id,income\n1,plain,x,low\n", "1 rows and the schema declares 2 classes"),
        ("age,note,id,income\n1,plain,x\n", r"line 2: has other columns than"),
        ('age,note,id,income\n1,"plain,x,low\n', "line 2: unexpected end of data"),
        ("age,note,id,income\n", "has no records"),
        ("", "has no records"),
        ("age,age,id,income\n1,2,x,low\n", "two columns with the same name"),
        ("age,note,id,income\n1,\xe9,x,low\n", "is not in UTF-8"),
    ],
)
def test_a_file_that_does_not_fit_is_named_before_a_row_is_used(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "people.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=said):
        hush.Source(tmp_path / "people.csv", schema=SCHEMA, targets="income")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"age": 1}\n[1]\n', "line 2: is not an object"),
        ('{"age": 1}\n{"age": 1, "size": 2}\n', "line 2: has other columns"),
        ("{age: 1}\n", "line 1: Expecting property name"),
    ],
)
def test_lines_that_are_no_records_are_named(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "people.jsonl").write_text(lines)
    with pytest.raises(DataError, match=said):
        open_table(tmp_path / "people.jsonl")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, said in (
        ("none.csv", "does not exist"),
        ("a.xlsx", "must be a folder"),
        ("", "no images"),
    ):
        if name == "a.xlsx":
            (tmp_path / name).touch()
        with pytest.raises(DataError, match=said):
            open_table(tmp_path / name)
    for name in ("a.npz", "a.parquet"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises((DataError, Unsupported), match=r"a.npz is not|a.parquet"):
            open_table(tmp_path / name)


def test_a_private_value_is_in_no_error_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("age,income\nsecret,low\n3,high\n")
    schema = {name: SCHEMA[name] for name in ("age", "income")}
    with pytest.raises(
        DataError, match="column 'age' contains infinity or a value that is not"
    ) as refused:
        hush.Source(tmp_path / "people.csv", schema=schema, targets="income").take([1, 0])
    assert "secret" not in str(refused.value)


def test_targets_are_classes_labels_or_numbers(tmp_path: Path) -> None:
    rows = [{"x": i, "a": "yn"[i % 2], "b": i % 2, "c": i, "d": "uvw"[i % 3]} for i in range(6)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = Numeric(low=0, high=10)
    schema = {
        "x": numbers,
        "a": Categorical(values=("y", "n")),
        "b": Categorical(values=(0, 1)),
        "c": numbers,
        "d": Categorical(values=("u", "v", "w")),
    }

    def read(*targets: str) -> torch.Tensor:
        return EncodedTable(open_table(tmp_path / "t.jsonl"), schema, targets).whole()[1]

    assert read("d").tolist() == [0, 1, 2, 0, 1, 2]
    assert read("a", "b").tolist() == [[i % 2, i % 2] for i in range(6)]
    assert read("c", "x")[:, 0].tolist() == pytest.approx([i / 5 - 1 for i in range(6)])
    for wrong in (("a", "c"), ("a", "d")):
        with pytest.raises(DataError, match="must be one Categorical column"):
            read(*wrong)
    with pytest.raises(InvalidValue, match="schema= needs targets="):
        hush.Source(tmp_path / "t.jsonl", schema=schema)


def images(folder: Path) -> Path:
    made = pytest.importorskip("PIL.Image")
    for name, colour in (("cat/1.png", 0), ("cat/2.png", 51), ("dog/1.jpg", 255)):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        made.new("RGB", (12, 10), (colour,) * 3).save(folder / name)
    (folder / "dog" / "read me.txt").touch()
    return folder


def test_a_folder_of_images_by_class(tmp_path: Path) -> None:
    table = open_table(images(tmp_path / "pets"))
    assert draft_schema(table, ["class"]) == {
        "image": Image(height=10, width=12),
        "class": Categorical(values=["cat", "dog"]),
    }
    schema = {"image": Image(height=5, width=6, channels=1), "class": Categorical(values=("cat", "dog"))}
    inputs, targets = EncodedTable(table, schema, ["class"]).whole()
    assert (inputs.shape, targets.tolist()) == ((3, 1, 5, 6), [0, 0, 1])
    assert inputs[:, 0, 2, 3].tolist() == pytest.approx([-1, -0.6, 1], abs=0.01)
    (tmp_path / "pets" / "cat" / "2.png").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"2.png is not a readable image"):
        EncodedTable(table, schema, ["class"]).whole()


def test_an_archive_of_arrays_keeps_the_shape_of_images(tmp_path: Path) -> None:
    pixels = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    np.savez(tmp_path / "a.npz", x=pixels, y=np.array([3, 7]))
    schema = {"x": Numeric(low=0, high=255), "y": Categorical(values=(3, 7))}
    inputs, targets = EncodedTable(open_table(tmp_path / "a.npz"), schema, ["y"]).whole()
    assert torch.equal(inputs[:, 0], torch.from_numpy(pixels).double().mul(2 / 255).sub(1).float())
    assert targets.tolist() == [0, 1]
    np.savez(tmp_path / "b.npz", x=pixels, y=np.array([3]))
    with pytest.raises(DataError, match=r"columns with \[1, 2\] rows"):
        open_table(tmp_path / "b.npz")


def test_a_draft_has_round_bounds_and_can_encode_other_records(tmp_path: Path) -> None:
    lines = ["age,gain,job,name,flag,gap,income"]
    for i in range(60):
        lines.append(f"{17 + i},{i * 1234},{'ab'[i % 2]},n{i},{i % 2},{i if i % 3 else ''},{i % 2}")
    (tmp_path / "p.csv").write_text("\n".join(lines))
    drafted = draft_schema(open_table(tmp_path / "p.csv"), ["income"])
    assert drafted == {
        "age": Numeric(low=0, high=80),
        "gain": Numeric(low=0, high=80_000, log=True),
        "job": Categorical(values=["a", "b", "other"], unseen="other"),
        "name": Ignored(),
        "flag": Numeric(low=0, high=1),
        "gap": Numeric(low=0, high=60, missing=30),
        "income": Categorical(values=["0", "1"]),
    }
    (tmp_path / "q.csv").write_text(lines[0] + "\n999,,c,,1,,1\n0,0,,,0,?,0\n")
    schema = {**drafted, "gain": Numeric(low=0, high=80_000, missing=0)}
    inputs, _ = EncodedTable(open_table(tmp_path / "q.csv"), schema, ["income"]).whole()
    assert inputs.abs().max() == 1
    (tmp_path / "q.csv").write_text("age,income\n1,0\n2,0\n")
    with pytest.raises(DataError, match=r"has only one value. Classes must be public"):
        draft_schema(open_table(tmp_path / "q.csv"), ["income"])


STREAMED = """
import hush, resource, sys, torch
from pathlib import Path
from hush.schema import read_schema
schema = read_schema("schema.toml")
def step_on(path):
    source = hush.Source(path, schema=schema, targets="y")
    model = torch.nn.Linear(4, 2)
    plan = hush.plans.dpsgd(rate=0.0005, clip_norm=1.0, multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = hush.PrivateStep(model, torch.nn.CrossEntropyLoss(), optimizer, plan, records=len(source))
    for batch in step.batches(source, steps=3):
        step(batch)
    return len(source), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
_, before = step_on("small.csv")
print(*step_on("large.csv"), before)
"""


def test_a_large_csv_is_not_loaded(tmp_path: Path) -> None:
    """Steps on 100 MB of text add less than 20 MB to the memory of steps on 10 kB."""
    line = f'0.25,0.5,"{"x" * 80}\n{"y" * 80}",{"1" * 40},{{}}\n'
    rows = ["a,b,text,c,y\n", *(line.format(i % 2) for i in range(50))]
    (tmp_path / "small.csv").write_text("".join(rows))
    with (tmp_path / "large.csv").open("w") as file:
        file.write(rows[0])
        for _ in range(9000):
            file.writelines(rows[1:])
    schema = {"a": Numeric(low=0, high=1, missing=0), "b": Numeric(low=0, high=1), "text": Ignored()}
    more = {"c": Numeric(low=0, high=1), "y": Categorical(values=(0, 1))}
    (tmp_path / "schema.toml").write_text(schema_text({**schema, **more}))
    assert (tmp_path / "large.csv").stat().st_size > 95e6
    code = [sys.executable, "-W", "ignore", "-c", STREAMED]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records, after, before = map(float, done.stdout.split())
    assert records == 450_000
    assert after - before < 20
