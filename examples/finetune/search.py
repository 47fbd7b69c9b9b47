"""Settings chosen on held-out training reviews, one run after another, each from the best so far.

The choice looks at private reviews and is not charged, as in most published work: where that matters,
search with hush.tune (docs/tune.md).
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import hush
from examples.finetune.experiment import Experiment, Outcome
from examples.finetune.training import Settings
from hush.core.errors import InvalidValue

HELD_OUT = 5000
GAIN = 0.1
"""Points of accuracy by which a change has to be better to be taken."""


@dataclass(frozen=True)
class Log:
    """Finished runs, printed and added to a file of JSON lines at once: what is cut short is kept."""

    path: Path | None
    end: float
    """Time after which no further run begins."""

    def time_left(self) -> bool:
        """Whether another run may begin."""
        return time.perf_counter() < self.end

    def add(self, name: str, settings: Settings, outcome: Outcome, **extra: object) -> None:
        """Note a run."""
        row = {
            "run": name,
            "accuracy": round(outcome.accuracy, 2),
            "seconds": round(outcome.seconds, 1),
            **extra,
            "guarantee": str(outcome.guarantee) if outcome.guarantee else "none",
            "settings": asdict(settings),
        }
        print(
            f"{name:<34} {outcome.accuracy:6.2f} %  {outcome.seconds:5.1f} s  {json.dumps(extra)}",
            flush=True,
        )
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


Change = tuple[str, Callable[[Settings], Settings]]


def _with(name: str, **values: object) -> Change:
    return name, lambda settings: replace(settings, **values)


def _rate(factor: float) -> Change:
    return f"rate x {factor:g}", lambda best: replace(best, learning_rate=best.learning_rate * factor)


CHANGES: tuple[Change, ...] = (
    ("a quarter from the beginning", lambda best: replace(best, first=best.length // 4)),
    _with("dense too", targets=("query", "value", "dense")),
    (
        "larger share of the LoRA",
        lambda best: replace(
            best,
            alpha=2 * best.alpha,
            learning_rate=best.learning_rate / 2,
            head_rate=2 * best.head_rate,
        ),
    ),
    ("half as many steps again", lambda best: replace(best, steps=best.steps * 3 // 2)),
    (
        "double batch, half as many steps",
        lambda best: replace(
            best, batch=2 * best.batch, steps=best.steps // 2, learning_rate=best.learning_rate * 1.4
        ),
    ),
    ("double batch", lambda best: replace(best, batch=2 * best.batch)),
    _with("clip 1", clip=1.0),
    ("double rank", lambda best: replace(best, rank=2 * best.rank, alpha=2 * best.alpha)),
    _rate(1.5),
    _with("head of zeros", sentences=False),
    _with("B alone", train_a=False),
)


def search(
    experiment: Experiment, start: Settings, budget: hush.Budget, log: Log, seed: int = 0
) -> Settings:
    """Best settings found by trying changes in turn, while there is time."""
    scores: dict[Settings, float] = {}

    def score(name: str, settings: Settings) -> float:
        if settings not in scores:
            outcome = experiment.run(settings, budget, seed)
            scores[settings] = outcome.accuracy
            log.add(name, settings, outcome, epsilon=budget.epsilon)
        return scores[settings]

    def better(best: Settings, change: Change) -> Settings:
        name, apply = change
        if not log.time_left():
            return best
        try:
            candidate = apply(best)
            experiment.check(candidate)
        except InvalidValue as error:
            print(f"{name}: left out, as {error}", flush=True)
            return best
        return candidate if score(name, candidate) > score("start", best) + GAIN else best

    score("start", start)
    best = better(start, _rate(2.0))
    best = better(best, _rate(0.5 if best == start else 2.0))
    for change in CHANGES:
        best = better(best, change)
    return best
