"""Tables 3 and 4 of the DPSUR paper: membership attacks on models with and without privacy.

All records of a data set are split 2:1:2:1, as in the paper: the attacked model is trained on the first
part, and the attacker's shadow models, in the same way, on records of the last two. On a CPU a part of
the records, two epsilons and short runs; on a GPU all of them. Every epsilon is one that holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.core.errors import InvalidValue
from hush.training.evaluate import evaluate
from hush_recipes.dpsur.attacked import PRIVATE, Case, Size, picked, pooled, trained
from hush_recipes.dpsur.membership import (
    Candidates,
    Split,
    Verdict,
    black_box_shadow,
    lira,
    loss_threshold,
    split,
    white_box_partial,
)
from hush_recipes.dpsur.roc import Roc, ceiling
from hush_recipes.dpsur.runs import DELTA, EPSILONS
from hush_recipes.figure import Figure

# The paper's accuracies: black box, white box; then by epsilon 1 to 4.
_PRINTED = {
    ("fashion-mnist", "black-box/shadow"): {
        "non-private": (0.582,),
        "DP-SGD": (0.498, 0.503, 0.493, 0.494),
        "DPSUR": (0.498, 0.500, 0.503, 0.506),
    },
    ("fashion-mnist", "white-box/partial"): {
        "non-private": (0.584,),
        "DP-SGD": (0.501, 0.502, 0.502, 0.505),
        "DPSUR": (0.499, 0.504, 0.501, 0.502),
    },
    ("cifar10", "black-box/shadow"): {
        "non-private": (0.732,),
        "DP-SGD": (0.504, 0.505, 0.504, 0.505),
        "DPSUR": (0.495, 0.498, 0.503, 0.504),
    },
    ("cifar10", "white-box/partial"): {
        "non-private": (0.743,),
        "DP-SGD": (0.500, 0.501, 0.501, 0.503),
        "DPSUR": (0.499, 0.501, 0.502, 0.503),
    },
}
HEADER = (
    *("method", "epsilon", "train %", "test %", "attack", "accuracy", "from", "to"),
    *("AUC", "TPR at FPR .1%", "TPR at FPR 1%", "at least", "ceiling at 1%", "printed"),
)


CPU = Size(
    records=12_000,
    epsilons=(1.0, 3.0),
    epochs=8,
    plain_epochs=60,
    plain_batch=128,
    shadows=2,
    plain_shadows=2,
)
GPU = Size(
    records=None,
    epsilons=EPSILONS,
    epochs=40,
    plain_epochs=60,
    plain_batch=256,
    shadows=2,
    plain_shadows=4,
)


def dpsur_table3(
    *,
    device: str = "cpu",
    epsilons: Sequence[float] | None = None,
    seeds: int = 1,
    epochs: int | None = None,
) -> Figure:
    """Membership attacks on models of Fashion-MNIST. CPU: 12,000 records, epsilon 1 and 3."""
    return attacked("dpsur-table3", "fashion-mnist", device, epsilons, seeds, epochs)


def dpsur_table4(
    *,
    device: str = "cpu",
    epsilons: Sequence[float] | None = None,
    seeds: int = 1,
    epochs: int | None = None,
) -> Figure:
    """Membership attacks on models of CIFAR-10, with and without privacy. GPU only."""
    if device == "cpu":
        raise InvalidValue("a CPU trains nothing on cifar10 in good time: pass --device cuda.")
    return attacked("dpsur-table4", "cifar10", device, epsilons, seeds, epochs)


def attacked(
    name: str,
    data: str,
    device: str,
    epsilons: Sequence[float] | None,
    seeds: int,
    epochs: int | None,
    size: Size | None = None,
) -> Figure:
    """Every attack on every method."""
    size = size or (CPU if device == "cpu" else GPU)
    size = replace(size, epsilons=tuple(epsilons or size.epsilons))
    if epochs is not None:
        size = replace(size, epochs=epochs, plain_epochs=epochs, short=True)
    unknown = [level for level in size.epsilons if level not in EPSILONS]
    if unknown:
        raise InvalidValue(f"epsilon {unknown[0]:g} is not in the table: choose from 1, 2, 3, 4.")
    rows: list[list[Any]] = []
    drawn: dict[str, list[Verdict]] = {}
    spent: dict[str, float] = {}
    for method, level in [
        ("non-private", None),
        *((method, level) for level in size.epsilons for method in PRIVATE),
    ]:
        for seed in range(seeds):
            case = Case(data=data, method=method, level=level, seed=seed, device=device, size=size)
            result = attack(case)
            rows += [row(case, result, verdict) for verdict in result.verdicts]
            label = method if level is None else f"{method}, epsilon {level:g}"
            drawn[label], spent[label] = result.verdicts, result.epsilon or 0.0
            summary = ", ".join(f"{v.name} {v.accuracy().value:.3f}" for v in result.verdicts)
            print(f"  {label}: {summary}", flush=True)
    panel_labels = ["non-private", *(f"{method}, epsilon {size.epsilons[0]:g}" for method in PRIVATE)]

    def draw(panels: Any) -> None:
        for axes, label in zip(panels, panel_labels, strict=True):
            limits = {f"ceiling, epsilon {spent[label]:.3g}": (spent[label], DELTA)}
            curves = {verdict.name: verdict.roc for verdict in drawn[label]}
            draw_roc(axes, curves, limits if spent[label] else {}, title=label)

    lasts = "too" if size.short else "as long as its budget lasts"
    share = "all" if size.records is None else f"{size.records}"
    return Figure(
        name=name,
        title=f"{data}: membership attacks",
        header=HEADER,
        rows=rows,
        draw=draw,
        panels=len(panel_labels),
        notes=[
            f"{share} records split 2:1:2:1, {size.shadows} shadow models trained as the attacked one "
            f"({size.plain_shadows} without privacy), {seeds} seed(s), {size.epochs} epochs "
            f"({size.plain_epochs} without privacy; DPSUR {lasts})",
            "accuracy at even odds on as many members as others; intervals at 95%, over the records, "
            "for one model each; printed: the paper's Table 3 or 4",
            "epsilon is what the run spent; the ceiling is the most that any attack could find at it",
        ],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackResult:
    """A trained model's accuracy and epsilon, and the attacks' verdicts."""

    train: float
    test: float
    epsilon: float | None
    verdicts: list[Verdict]


def row(case: Case, result: AttackResult, verdict: Verdict) -> list[Any]:
    """The line of an attack on a model."""
    accuracy = verdict.accuracy()
    printed = _PRINTED.get((case.data, verdict.name), {}).get(case.method)
    column = 0 if case.level is None else EPSILONS.index(case.level)
    bound = None
    if result.epsilon is not None:
        bound = float(ceiling(0.01, result.epsilon, DELTA))
    return [
        *(case.method, result.epsilon, 100 * result.train, 100 * result.test),
        *(verdict.name, accuracy.value, accuracy.low, accuracy.high, verdict.roc.auc),
        *(verdict.roc.at(0.001).value, verdict.roc.at(0.01).value, verdict.roc.at(0.01).low, bound),
        None if printed is None else printed[column],
    ]


def attack(case: Case) -> AttackResult:
    """Train the model and its shadows, and ask every attack."""
    x, y, classes = pooled(case.data, case.device, case.size.records)
    parts = split(len(y), torch.Generator().manual_seed(case.seed))
    train = partial(trained, case, classes)
    model, epsilon = train(picked(x, y, parts.target_train), 0)
    shadow, _ = train(picked(x, y, parts.shadow_train), 1)
    shadows = [shadow]
    order = torch.Generator().manual_seed(case.seed)
    for number in range(1, case.size.plain_shadows if case.level is None else case.size.shadows):
        shadow_records = parts.shadow[torch.randperm(len(parts.shadow), generator=order)]
        shadows.append(train(picked(x, y, shadow_records[: len(parts.shadow_train)]), 1 + number)[0])
    loss = nn.CrossEntropyLoss()
    candidates, auxiliary, own_records = _candidates(x, y, parts)
    return AttackResult(
        train=evaluate(model, loss, picked(x, y, parts.target_train))["accuracy"],
        test=evaluate(model, loss, picked(x, y, parts.target_test))["accuracy"],
        epsilon=epsilon,
        verdicts=[
            loss_threshold(model, candidates, shadow, own_records),
            black_box_shadow(model, candidates, shadow, own_records),
            white_box_partial(model, candidates, auxiliary),
            lira(model, candidates, shadows),
        ],
    )


def _candidates(x: Tensor, y: Tensor, parts: Split) -> tuple[Candidates, Candidates, Candidates]:
    """Candidates to judge, those that the white-box attacker knows, and the shadow model's."""
    half = len(parts.target_test) // 2
    of = partial(Candidates.of, x, y)
    return (
        of(parts.target_train[half : 2 * half], parts.target_test[half : 2 * half]),
        of(parts.target_train[:half], parts.target_test[:half]),
        of(parts.shadow_train, parts.shadow_test),
    )


def draw_roc(
    axes: Any, curves: Mapping[str, Roc], ceilings: Mapping[str, tuple[float, float]], *, title: str
) -> None:
    """Draw each curve, and for each (epsilon, delta) the most that any attack could reach."""
    # rates below one over the number of non-members were not measured
    smallest = min(1 / len(roc.others) for roc in curves.values())
    grid = np.geomspace(smallest, 1, 400)
    for name, roc in curves.items():
        false, true = roc.rates
        # a step function: between two thresholds nothing changes
        axes.plot(false, true, drawstyle="steps-post", linewidth=1.2, label=name)
    for name, (epsilon, delta) in ceilings.items():
        axes.plot(grid, ceiling(grid, epsilon, delta), "--", color="0.3", linewidth=1, label=name)
    axes.plot(grid, grid, ":", color="0.6", linewidth=1, label="guessing")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(smallest, 1),
        ylim=(smallest, 1),
        xlabel="false positive rate",
        ylabel="true positive rate",
        title=title,
    )
    axes.legend(fontsize=7, loc="lower right")
