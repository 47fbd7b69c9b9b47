"""Least squares by sufficient statistics beside DP-SGD, at equal budgets and the estimators' defaults.

Run: HUSH_DATA=... .venv/bin/python benchmarks/estimators.py [--seeds 3] [--epsilon 1]

Tables of test accuracy (classes) and R^2 (numbers), means over seeds, with scikit-learn's estimator
without privacy beside them. A seed draws the records and the noise. Adult needs HUSH_DATA.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge

from hush.integrations.sklearn import Categorical, Numeric, PrivateClassifier, PrivateRegressor
from hush.schema import Schema, encode
from hush_recipes.data.adult import COLUMNS, LABELS, UNKNOWN, Categories, Dropped, Measure
from hush_recipes.data.published import read_published

Table = tuple[Any, Any]
SETTINGS: dict[str, dict[str, Any]] = {
    "least squares": {"solver": "least_squares"},
    "DP-SGD": {"solver": "sgd"},
    "network of 16": {"solver": "sgd", "hidden_layer_sizes": (16,)},
}
ALL = Numeric(low=-1, high=1)


def adult_schema() -> Schema:
    """Columns of Adult as its documentation lists them."""
    columns: dict[str, Numeric | Categorical] = {}
    for column in COLUMNS:
        if isinstance(column, Measure):
            columns[column.name] = Numeric(low=0, high=column.limit, log=column.logarithm)
        elif isinstance(column, Categories):
            columns[column.name] = Categorical(values=(*column.values, UNKNOWN))
    return columns


def adult_table(content: bytes) -> Table:
    """Columns and labels of one of Adult's files."""
    lines = [line for line in content.decode().splitlines() if line.strip() and not line.startswith("|")]
    cells = np.array([[cell.strip() for cell in line.split(",")] for line in lines], dtype=object)
    kept = [place for place, column in enumerate(COLUMNS) if not isinstance(column, Dropped)]
    return cells[:, kept], np.array([label.removesuffix(".") for label in cells[:, -1]])


def synthetic(kind: str, columns: int, records: int, seed: int) -> tuple[Table, Table]:
    """Numbers with a linear target, the same for training and test records.

    "wide" columns fill their bounds, "narrow" ones a tenth of them, off their middle; "correlated" ones
    share nine tenths of their variance.
    """
    shared = np.random.default_rng([seed, columns])
    slopes, centre = shared.normal(size=columns) / columns**0.5, shared.uniform(-0.5, 0.5, columns)
    draw = np.random.default_rng([seed, columns, records])

    def table(rows: int) -> Table:
        normal = draw.normal(size=(rows, columns))
        if kind == "correlated":
            normal = 0.1**0.5 * normal + 0.9**0.5 * draw.normal(size=(rows, 1))
        values = centre + 0.1 * normal if kind == "narrow" else normal / 3
        return values, 0.3 * normal @ slopes + 0.1 + 0.1 * draw.normal(size=rows)

    return table(records), table(5000)


def scores(
    make: Callable[..., Any],
    plain: Any,
    schema: Schema,
    draw: Callable[[int], tuple[Table, Table]],
    epsilon: float,
    seeds: int,
) -> list[str]:
    """Mean score of the estimator without privacy and of each setting, and its seconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        (x, y), (x_test, y_test) = draw(seed)
        encoded = [encode(part, schema) for part in (x, x_test)]
        rows = [np.hstack([part.numeric, part.categorical]) for part in encoded]
        found.setdefault("not private", []).append((plain.fit(rows[0], y).score(rows[1], y_test), 0.0))
        for name, settings in SETTINGS.items():
            start = time.perf_counter()
            fitted = make(epsilon=epsilon, random_state=seed, **settings).fit(x, y)
            seconds = time.perf_counter() - start
            found.setdefault(name, []).append((fitted.score(x_test, y_test), seconds))
    cells = []
    for name, results in found.items():
        score = statistics.mean(score for score, _ in results)
        seconds = statistics.median(second for _, second in results)
        cells.append(f"{score:.3f}" + (f" ({seconds:.1f} s)" if name != "not private" else ""))
    return cells


def adult_rows(epsilon: float, seeds: int) -> None:
    train, test = map(adult_table, read_published("adult", Path(os.environ["HUSH_DATA"])))
    schema = adult_schema()
    for records in (1000, 5000, len(train[0])):

        def draw(seed: int, records: int = records) -> tuple[Table, Table]:
            chosen = np.random.default_rng(seed).permutation(len(train[0]))[:records]
            return (train[0][chosen], train[1][chosen]), test

        def make(**settings: Any) -> PrivateClassifier:
            return PrivateClassifier(schema, LABELS, **settings)

        row = scores(make, LogisticRegression(max_iter=2000), schema, draw, epsilon, seeds)
        print_row("Adult (accuracy)", 112, records, row)


def synthetic_rows(epsilon: float, seeds: int) -> None:
    for kind, columns in (("wide", 5), ("wide", 20), ("narrow", 5), ("correlated", 5)):
        for records in (300, 1000, 5000, 20_000):

            def draw(
                seed: int, kind: str = kind, columns: int = columns, records: int = records
            ) -> tuple[Table, Table]:
                return synthetic(kind, columns, records, seed)

            def make(**settings: Any) -> PrivateRegressor:
                return PrivateRegressor(ALL, ALL, **settings)

            row = scores(make, Ridge(alpha=1e-3), ALL, draw, epsilon, seeds)
            print_row(f"{kind} (R^2)", columns, records, row)


def print_row(name: str, columns: int, records: int, cells: list[str]) -> None:
    print(f"| {' | '.join([name, str(columns), str(records), *cells])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=1.0)
    options = parser.parse_args()
    header = ["data", "columns", "records", "not private", *SETTINGS]
    print(f"epsilon {options.epsilon:g}, delta a tenth of 1/records, {options.seeds} seeds\n")
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    synthetic_rows(options.epsilon, options.seeds)
    if "HUSH_DATA" in os.environ:
        adult_rows(options.epsilon, options.seeds)


if __name__ == "__main__":
    main()
