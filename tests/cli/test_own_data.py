"""`hush schema`, `hush train --data FILE` and `hush predict`: files of all kinds, and their mistakes."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hush.schema import Categorical, Numeric, schema_text
from tests.cli.command import answer, call
from tests.training.sources.test_tables import images

FAST = ("--steps", "30", "--batch-size", "100", "--seed", "1", "--quiet", "--epsilon", "8")
MODEL = """
import torch
def build(classes, shape):
    return torch.nn.Sequential(torch.nn.Linear(*shape, 5), torch.nn.ReLU(), torch.nn.Linear(5, classes))
def number(classes, shape):
    return 3
"""


def people(path: Path, rows: int, start: int = 0) -> Path:
    """A table with a gap in one column, a rare word, and a target of each kind."""
    names = ["age", "job", "income", "hours", "rich", "tall"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for i in range(start, start + rows):
            age, job = 20 + i * 7 % 60, ("clerk", "nurse", "smith")[i % 3]
            income = ("low", "middle", "high")[(age > 40) + (age > 60)]
            labels = age > 50, job == "smith"
            writer.writerow([age if i % 10 else "", job, income, age / 2 + 5, *map(int, labels)])
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with training records, test records and a schema from the latter."""
    monkeypatch.chdir(tmp_path)
    people(tmp_path / "people.csv", 600)
    people(tmp_path / "test.csv", 90, start=7)
    targets = ("--target", "income", "--target", "rich", "--target", "tall")
    drafted = call("schema", "test.csv", *targets)
    assert "which is not private" in drafted.stdout
    (tmp_path / "schema.toml").write_text(drafted.stdout)
    return tmp_path


def schema_for(folder: Path, *dropped: str) -> str:
    """The drafted schema with other targets ignored."""
    text = (folder / "schema.toml").read_text()
    for name in dropped:
        text = re.sub(rf'\["{name}"\]\n(.+\n)+', f'["{name}"]\nkind = "Ignored"\n', text)
    (folder / "own.toml").write_text(text)
    return "own.toml"


def trained(schema: str, *targets: str, data: str = "people.csv", more: tuple[str, ...] = ()) -> Any:
    named = [word for target in targets for word in ("--target", target)]
    asked = ("train", "--data", data, "--schema", schema, *named, *FAST, "--run-dir", "run")
    return answer(*asked, *more)


def predictions(path: str = "predictions.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_classes_of_a_csv_to_predictions(folder: Path) -> None:
    schema = schema_for(folder, "hours", "rich", "tall")
    run = trained(schema, "income", more=("--test-data", "test.csv", "--lr", "4", "--model", "mlp"))
    assert run["guarantee"]["epsilon"]["upper"] <= 8
    assert run["final"]["accuracy"] > 0.7
    scored = answer("predict", "run", "test.csv")
    assert scored["accuracy"] == run["final"]["accuracy"]
    assert scored["accuracy_of_the_majority"] < 0.5
    rows = predictions()
    assert {row["income"] for row in rows} == {"low", "middle", "high"}
    assert all(1 / 3 < float(row["income probability"]) <= 1 for row in rows)
    (folder / "new.csv").write_text("id,job,age\nx,astronaut,25\ny,,\n")
    said = call("predict", "run", "new.csv", "--out", "new-predictions.csv").stdout
    assert said == "2 predictions in new-predictions.csv\n"
    assert predictions("new-predictions.csv")[0]["income"] == "low"
    settings = json.loads((folder / "run" / "settings.json").read_text())
    assert (settings["target"], settings["model"]) == (["income"], "mlp")
    assert settings["schema"]["job"]["values"] == ["clerk", "nurse", "smith", "other"]
    assert call("report", "run", "--quiet").returncode == 0
    assert answer("account", "run")["epsilon"] == run["guarantee"]["epsilon"]


def test_numbers_and_labels(folder: Path) -> None:
    for targets, others in ((("hours",), ("income", "rich", "tall")), (("rich", "tall"), ("income",))):
        kept = schema_for(folder, *others, *({"hours"} - {*targets}))
        run = trained(kept, *targets, more=("--test-data", "test.csv", "--run-dir", targets[0]))
        assert "accuracy" not in run["final"]
        scored = answer("predict", targets[0], "test.csv")
        rows = predictions()
        assert len(rows) == scored["records"] == 90
        if targets == ("hours",):
            assert scored["r2"] > 0.7
            assert 0 < scored["rmse"] < 4
            assert all(0 <= float(row["hours"]) <= 50 for row in rows)
        else:
            assert scored["accuracy"] > scored["accuracy_of_the_majority"] > 0.5
            assert {row["tall"] for row in rows} == {"0", "1"}
            assert all(float(row["rich probability"]) >= 0.5 for row in rows)


def test_a_table_that_does_not_fit_into_memory_trains_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = schema_for(folder, "hours", "rich", "tall")
    trained(schema, "income")
    monkeypatch.setattr("hush.cli.experiment._IN_MEMORY", 0)
    streamed = trained(schema, "income", more=("--run-dir", "streamed", "--test-data", "test.csv"))
    assert streamed["final"]["accuracy"] > 0.5
    first, second = (load_file(folder / run / "model.safetensors") for run in ("run", "streamed"))
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)
    refused = call(
        *("train", "--data", "people.csv", "--schema", schema, "--target", "income"),
        *("--public-records", "9", "--run-dir", "c"),
    )
    assert "--public-records needs classes as targets, test records" in refused.stderr


def test_a_network_of_ones_own(folder: Path) -> None:
    (folder / "mymodel_of_test.py").write_text(MODEL)
    schema = schema_for(folder, "hours", "rich", "tall")
    run = trained(schema, "income", more=("--model", "mymodel_of_test:build"))
    assert run["steps"] == 30
    assert load_file(folder / "run" / "model.safetensors")["0.weight"].shape == (5, 6)
    assert answer("predict", "run", "test.csv")["records"] == 90


def test_images_and_archives_with_a_convolution(folder: Path) -> None:
    images(folder / "pets")
    drafted = call("schema", "pets", "--target", "class").stdout
    (folder / "pets.toml").write_text(drafted)
    assert 'kind = "Image"' in drafted
    few = ("--batch-size", "2", "--delta", "1e-3", "--run-dir", "pets-run")
    trained("pets.toml", "class", data="pets", more=few)
    assert json.loads((folder / "pets-run" / "settings.json").read_text())["model"] == "cnn"
    assert answer("predict", "pets-run", "pets")["records"] == 3
    pixels = np.repeat(np.arange(200, dtype=np.uint8) % 2 * 255, 64).reshape(200, 8, 8)
    np.savez(folder / "digits.npz", x=pixels, y=np.arange(200) % 2)
    schema = {"x": Numeric(low=0, high=255), "y": Categorical(values=(0, 1))}
    (folder / "digits.toml").write_text(schema_text(schema))
    trained("digits.toml", "y", data="digits.npz", more=("--model", "cnn", "--run-dir", "digits-run"))
    assert answer("predict", "digits-run", "digits.npz")["accuracy"] == 1


def test_tune_and_audit_read_files(folder: Path) -> None:
    schema = schema_for(folder, "hours", "rich", "tall")
    asked = ("--data", "people.csv", "--schema", schema, "--target", "income", "--test-data", "test.csv")
    short = ("--steps", "3", "--trials", "2", "--seed", "1", "--quiet", "--run-dir", "tuned")
    assert answer("tune", *asked, *short)["guarantee"]["epsilon"]["upper"] <= 3
    assert answer("predict", "tuned", "test.csv")["records"] == 90
    trained(schema, "income")
    audited = answer(
        "audit", "run", "--test-data", "test.csv", "--canaries", 8, "--no-others", "--quiet"
    )
    assert audited["canaries"] == 8


def test_a_resumed_run_has_the_schema_it_began_with(folder: Path) -> None:
    schema = schema_for(folder, "hours", "rich", "tall")
    trained(schema, "income")
    assert trained(schema, "income", more=("--resume",))["steps"] == 30
    path = folder / schema
    path.write_text(path.read_text().replace("high = 80.0", "high = 90.0"))
    asked = ("train", "--data", "people.csv", "--schema", schema, "--target", "income", *FAST)
    refused = call(*asked, "--run-dir", "run", "--resume")
    assert "schema.age.high was 80.0 and is now 90.0" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--schema schema.toml", "--target is missing: name the column of people.csv to predict"),
        ("--target income", "--schema is missing: bounds and categories learned from the records"),
        ("--target wealth --schema schema.toml", "the schema has no target column 'wealth'"),
        ("--target income --target age --schema schema.toml", "must be one Categorical column"),
        ("--target income --schema none.toml", "the schema none.toml cannot be read"),
        ("--target income --schema one.toml", "column 'income': values=['low'] must be a list of at"),
        ("--target income --schema few.toml", "columns ['hours', 'rich', 'tall'] that the schema"),
        (
            "--target income --schema many.toml --data short.csv",
            "3 rows and the schema declares 4 classes",
        ),
        ("--target income --schema schema.toml --data short.csv", "lacks the columns ['hours', "),
        ("--target income --schema schema.toml --test-data people.csv", "is the training data"),
        ("--target income --schema schema.toml --test-data none.csv", "none.csv does not exist"),
        ("--target income --schema schema.toml --data none.csv", "none.csv does not exist"),
        ("--target income --schema schema.toml --data none", "--data none must be one of digits"),
        ("--target income --data digits", "--target is an option of --data FILE"),
        ("--target income --schema schema.toml --model none:build", "No module named 'none'"),
        ("--target income --schema schema.toml --model own_of_test:none", "has no attribute 'none'"),
        ("--target income --schema schema.toml --model own_of_test:number", "an int instead of a torch"),
        ("--target income --schema schema.toml --model cnn", "cnn needs inputs of any x any x any"),
        (
            "--target income --schema schema.toml --features scattering",
            "is an option of named data sets",
        ),
    ],
)
def test_a_mistake_is_named_before_any_work(folder: Path, arguments: str, said: str) -> None:
    (folder / "own_of_test.py").write_text(MODEL)
    (folder / "short.csv").write_text("age,job,income\n1,nurse,low\n2,nurse,low\n3,nurse,low\n")
    own = {
        "age": Numeric(low=0, high=9, missing=1),
        "job": Categorical(values=("nurse", "x"), unseen="x"),
    }
    classes = ("low", "middle", "high", "highest")
    few = schema_text({**own, "income": Categorical(values=classes)})
    (folder / "few.toml").write_text(few)
    (folder / "many.toml").write_text(few)
    (folder / "one.toml").write_text(few.replace(json.dumps(classes), '["low"]'))
    words = arguments.split()
    result = call("train", "--data", "people.csv", *words)
    assert result.returncode == 2
    assert said in result.stderr
    assert not (folder / "runs").exists()
    assert len(result.stderr.split(". ")) <= 4


def test_predictions_need_a_run_of_a_file(folder: Path) -> None:
    answer("train", "--steps", "2", "--run-dir", "digits")
    assert "digits is not a run on a file with a schema" in call("predict", "digits", "test.csv").stderr
    trained(schema_for(folder, "hours", "rich", "tall"), "income")
    (folder / "new.csv").write_text("job\nnurse\n")
    assert "lacks the columns ['age']" in call("predict", "run", "new.csv").stderr
    (folder / "run" / "model.safetensors").unlink()
    assert "finish the run with --resume" in call("predict", "run", "test.csv").stderr


def test_a_target_with_one_class_is_not_drafted(folder: Path) -> None:
    (folder / "one.csv").write_text("age,income\n1,low\n2,low\n")
    refused = call("schema", "one.csv", "--target", "income")
    assert refused.returncode == 2
    assert "Classes must be public and come from the schema" in refused.stderr
