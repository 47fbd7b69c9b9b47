"""The protocol of a record: settings by a validation split, then fresh seeds on all training records.

A search scores each candidate on records held out from the training set, with runs at the full epsilon
on the others. The final runs, with other seeds, see the test records once. The choice is not charged.
Runs of one seed draw the same noise, at whatever epsilon: each epsilon is of one run that is released
alone, and two of one seed together would show their sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, Generic, TypeVar

from hush.core.errors import BudgetExceeded, InvalidValue
from hush.data import Dataset, public_order
from hush_recipes.figure import Figure, cell
from hush_recipes.workers import workers

DELTA = 1e-5
FIRST_FINAL_SEED = 100
"""Seeds of the search come before it."""

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Accuracy of one run, and what it cost."""

    accuracy: float
    """Share of the data set's test part that is classified correctly."""
    epsilon: float
    """Certified upper end for everything on the run's ledger, at `DELTA`."""
    multiplier: float
    """Noise multiplier of its steps."""


@dataclass(frozen=True, kw_only=True)
class Job(Generic[Settings]):
    """One run: settings at an epsilon, with a seed, on a data set whose test part is scored."""

    data: str
    held_out: int
    """Training records that take the place of the test part; 0: the test part itself."""
    settings: Settings
    epsilon: float
    seed: int
    device: str


Run = Callable[[Job[Settings]], Outcome]
"""A training run at module level, so that processes can call it."""


def with_held_out(dataset: Dataset, held_out: int) -> Dataset:
    """The data set with training records as test part, chosen by their number alone.

    Args:
        dataset: its test part is left out.
        held_out: how many; 0: the data set as it is.
    """
    if not held_out:
        return dataset
    order = public_order(len(dataset.y_train))
    kept, scored = order[held_out:], order[:held_out]
    return replace(
        dataset,
        x_train=dataset.x_train[kept],
        y_train=dataset.y_train[kept],
        x_test=dataset.x_train[scored],
        y_test=dataset.y_train[scored],
    )


def with_settings(epsilons: Iterable[float] | None, settings: Mapping[float, object]) -> list[float]:
    """The epsilons that are asked for, or all that have settings; one without raises."""
    chosen = list(settings if epsilons is None else epsilons)
    if unknown := set(chosen) - set(settings):
        raise InvalidValue(
            f"there are no settings for epsilon {min(unknown):g}: choose from "
            f"{', '.join(f'{level:g}' for level in settings)}."
        )
    return chosen


def search(
    name: str,
    run: Run[Settings],
    data: str,
    candidates: Mapping[float, Mapping[str, Settings]],
    *,
    held_out: int,
    seeds: int,
    device: str,
    processes: int | None,
    notes: Sequence[str] = (),
) -> Figure:
    """Validation accuracy of candidates by epsilon, the best of each epsilon first.

    Args:
        name: of the recipe.
        run: trains and scores.
        data: name of the data set.
        candidates: settings by name, by epsilon.
        held_out: training records that score them.
        seeds: runs of each.
        device: where they run.
        processes: how many at once.
        notes: what else epsilon does not cover.
    """
    if seeds > FIRST_FINAL_SEED:
        raise InvalidValue(
            f"seeds={seeds} must be at most {FIRST_FINAL_SEED}: others are of final runs."
        )
    keys = [(level, label) for level, named in candidates.items() for label in named]
    jobs = [
        Job(
            data=data,
            held_out=held_out,
            settings=candidates[level][label],
            epsilon=level,
            seed=seed,
            device=device,
        )
        for level, label in keys
        for seed in range(seeds)
    ]
    rows = list(_rows(keys, run, jobs, seeds, device, processes))
    rows.sort(key=lambda row: (row[0], -row[2]))
    return _figure(
        name,
        f"{data}: candidates on {held_out:,} held-out training records",
        rows,
        [
            f"{seeds} run(s) each on the other training records, delta {DELTA:g}; the choice is not "
            "charged",
            *notes,
        ],
    )


def final(
    name: str,
    run: Run[Settings],
    data: str,
    chosen: Mapping[float, tuple[str, Settings]],
    *,
    seeds: int,
    device: str,
    processes: int | None,
    notes: Sequence[str] = (),
) -> Figure:
    """Test accuracy of the chosen settings at each epsilon, with seeds that no search has used.

    Args:
        name: of the recipe.
        run: trains and scores.
        data: name of the data set.
        chosen: name and settings by epsilon.
        seeds: runs of each.
        device: where they run.
        processes: how many at once.
        notes: what else epsilon does not cover.
    """
    keys = [(level, label) for level, (label, _) in chosen.items()]
    jobs = [
        Job(
            data=data,
            held_out=0,
            settings=chosen[level][1],
            epsilon=level,
            seed=FIRST_FINAL_SEED + seed,
            device=device,
        )
        for level, _ in keys
        for seed in range(seeds)
    ]
    return _figure(
        name,
        f"{data}: test accuracy at a sound epsilon",
        list(_rows(keys, run, jobs, seeds, device, processes)),
        [
            f"{seeds} fresh seed(s) on all training records, delta {DELTA:g}; settings by a validation "
            "split, which is not charged",
            "epsilon is of one run that is released alone: runs of one seed share their noise",
            *notes,
        ],
    )


HEADER = ("epsilon", "method", "accuracy %", "spread", "each seed", "certified epsilon", "multiplier")


def _rows(
    keys: list[tuple[float, str]],
    run: Run[Settings],
    jobs: list[Job[Settings]],
    seeds: int,
    device: str,
    processes: int | None,
) -> Iterator[list[Any]]:
    """A line for each key, from as many runs as there are seeds; printed as soon as it is known."""
    with workers(processes, device) as over:
        results = over(run, jobs)
        for level, label in keys:
            outcomes = [next(results) for _ in range(seeds)]
            spent = max(outcome.epsilon for outcome in outcomes)
            if spent > level:
                raise BudgetExceeded(f"{label}: a run at epsilon {level:g} cost {spent:.4g}: no record.")
            scores = [100 * outcome.accuracy for outcome in outcomes]
            row = [
                *(level, label, mean(scores), stdev(scores) if len(scores) > 1 else None),
                ", ".join(f"{score:.2f}" for score in scores),
                spent,
                outcomes[0].multiplier,
            ]
            print("  " + "; ".join(map(cell, row)), flush=True)
            yield row


def _figure(name: str, title: str, rows: list[list[Any]], notes: Sequence[str]) -> Figure:
    """The rows as a table, and as points: a line a method, a colour an epsilon."""

    def draw(axes: Any) -> None:
        for level in dict.fromkeys(row[0] for row in rows):
            lines = [row for row in rows if row[0] == level]
            spreads = [row[3] or 0.0 for row in lines]
            axes.errorbar(
                [row[2] for row in lines],
                [row[1] for row in lines],
                xerr=spreads,
                fmt="o",
                label=f"epsilon {level:g}",
            )
        axes.margins(y=0.15)
        axes.invert_yaxis()  # the table's first line is on top
        axes.set(xlabel=f"accuracy, %, at delta {DELTA:g}")
        axes.legend(fontsize=8)

    return Figure(name=name, title=title, header=HEADER, rows=rows, draw=draw, notes=notes)
