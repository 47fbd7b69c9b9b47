"""Adult from its CSV to predictions by four commands, beside a model without privacy and the majority.

Run: HUSH_DATA=... .venv/bin/python benchmarks/own_data.py [--epsilon 1] [--runs 3] [--folder runs/adult]

Writes Adult as `adult.csv` and `adult-test.csv` with a heading, prints the output of the commands of
docs/own-data.md, and a table of test accuracy (mean over the runs).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from sklearn.linear_model import LogisticRegression

from hush.schema import read_schema
from hush.training.tables import EncodedTable, open_table
from hush_recipes.data.adult import COLUMNS
from hush_recipes.data.published import read_published


def write_csv(content: bytes, path: Path) -> None:
    """Write a file of Adult as CSV: a heading, no comment, and labels without a full stop."""
    lines = [line for line in content.decode().splitlines() if line.strip() and not line.startswith("|")]
    heading = ",".join([column.name for column in COLUMNS] + ["income"])
    path.write_text("\n".join([heading, *(line.removesuffix(".") for line in lines)]) + "\n")


def hush(*words: str, folder: Path) -> str:
    """Print and run a command; its output."""
    print("   ", "hush", *words)
    command = [sys.executable, "-m", "hush", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epsilon", default="1")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/adult"))
    asked = parser.parse_args()
    folder = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    for content, name in zip(
        read_published("adult", Path(os.environ["HUSH_DATA"])),
        ("adult.csv", "adult-test.csv"),
        strict=True,
    ):
        write_csv(content, folder / name)
    drafted = hush("schema", "adult-test.csv", "--target", "income", folder=folder)
    (folder / "schema.toml").write_text(drafted)
    scores = []
    for number in range(asked.runs):
        run = f"epsilon-{asked.epsilon}-{number}"
        train = ["train", "--data", "adult.csv", "--target", "income", "--schema", "schema.toml"]
        train += [
            "--test-data",
            "adult-test.csv",
            "--epsilon",
            asked.epsilon,
            "--quiet",
            "--run-dir",
            run,
        ]
        print(hush(*train, folder=folder))
        print(hush("predict", run, "adult-test.csv", folder=folder))
        scores.append(json.loads(hush("predict", run, "adult-test.csv", "--json", folder=folder)))
        print(hush("report", run, "--quiet", folder=folder))
    schema = read_schema(folder / "schema.toml")
    parts = [
        EncodedTable(open_table(folder / name), schema, ["income"]).whole()
        for name in ("adult.csv", "adult-test.csv")
    ]
    (x, y), (x_test, y_test) = [[each.numpy() for each in part] for part in parts]
    plain = LogisticRegression(max_iter=3000).fit(x, y).score(x_test, y_test)
    private = statistics.mean(score["accuracy"] for score in scores)
    print("| not private | epsilon | majority |\n|---|---|---|")
    print(f"| {plain:.1%} | {private:.1%} | {scores[0]['accuracy_of_the_majority']:.1%} |")


if __name__ == "__main__":
    main()
