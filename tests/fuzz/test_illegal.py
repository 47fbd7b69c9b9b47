"""Random mistakes that honest users make are refused by name, before anything runs.

The number in a test's name reproduces it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import HushError
from hush.core.value import Value
from tests.fuzz.plans import STAGES, kinds_of
from tests.training.helpers import train

Attempt = Callable[[], object]
NUMBERS: list[Any] = [-1, -1e-300, 0, math.nan, math.inf, -math.inf, 1e300]
STRANGE: list[Any] = ["1", None, [1.0]]
WRONG = [*NUMBERS, *STRANGE]


@dataclass(frozen=True)
class Mistake:
    """Something that must be refused."""

    what: str
    attempt: Attempt
    named: str
    """What the message must hold."""


_PLAN = hush.Plan(sampling=hush.Poisson(0.5), clipping=hush.L2(1.0), noise=hush.Gaussian(2.0))
_SHOWN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.Linf(1.0), noise=hush.Rectified(scale=2.0, bound=3.0)
)
_BUDGET = hush.Budget(epsilon=50.0, delta=1e-5)


def _usual() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)


def a_step(folder: Path, **changed: Any) -> hush.PrivateStep:
    """A private step of the usual plan, with some arguments changed."""
    model, plan = nn.Linear(3, 2), changed.pop("plan", _PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"records": 6, "ledger": folder / "ledger.jsonl", **changed}
    return hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, **settings)


def one_step(folder: Path, steps: Any) -> None:
    step = a_step(folder)
    for batch in step.batches(_usual(), steps=steps):
        step(batch)


def a_run(folder: Path, **changed: Any) -> None:
    plan = changed.pop("plan", _PLAN)
    settings = {"budget": _BUDGET, "steps": 2, "directory": folder / "run", **changed}
    train(nn.Linear(3, 2), plan, _usual(), **settings)


def argument(pick: Random, folder: Path) -> Mistake:
    """A public function with an argument that means nothing."""
    whole = [value for value in WRONG if value is not None]
    counted = [value for value in whole if not isinstance(value, int) or value != 0] + [1.5, -3]
    chances = [*whole, 1, 1.5]
    shapes = [v for v in whole if not isinstance(v, list | torch.Tensor)]
    calls: list[tuple[str, list[Any], Callable[[Any], object]]] = [
        ("plan", whole, lambda v: hush.epsilon(v, 3, 1e-5)),
        ("plan", whole, lambda v: hush.rdp(v, [2.0])),
        ("plan", whole, lambda v: hush.calibrate(v, _BUDGET, 3)),
        ("plan", whole, lambda v: hush.fit_noise(v, _BUDGET, 3)),
        ("plan", whole, lambda v: hush.mean(torch.zeros(3, 2), v, delta=1e-5)),
        ("plan", whole, lambda v: hush.individual_rdp(v, [0.0], [2.0])),
        ("plan", whole, lambda v: hush.fisher(v, [0.0])),
        ("plan", whole, lambda v: a_step(folder, plan=v)),
        ("plan", whole, lambda v: a_run(folder, plan=v)),
        ("budget", whole, lambda v: hush.calibrate(_PLAN, v, 3)),
        ("budget", whole, lambda v: hush.fit_noise(_PLAN, v, 3)),
        ("budget", whole, lambda v: a_run(folder, budget=v)),
        ("steps", counted, lambda v: hush.epsilon(_PLAN, v, 1e-5)),
        ("steps", counted, lambda v: hush.calibrate(_PLAN, _BUDGET, v)),
        ("steps", counted, lambda v: hush.fit_noise(_PLAN, _BUDGET, v)),
        ("steps", counted, lambda v: one_step(folder, steps=v)),
        ("steps", [*counted, 0], lambda v: a_run(folder, steps=v)),
        ("every", [*counted, 0], lambda v: a_run(folder, every=v)),
        ("delta", chances, lambda v: hush.epsilon(_PLAN, 3, v)),
        ("delta", chances, lambda v: hush.mean(torch.zeros(3, 2), _SHOWN, delta=v)),
        ("delta", chances, lambda v: hush.Ledger().epsilon(v)),
        ("dimension", [*counted, 0], lambda v: hush.epsilon(_SHOWN, 3, 1e-5, dimension=v)),
        ("orders", whole, lambda v: hush.rdp(_PLAN, v)),
        ("orders", [1.0, -2.0, math.nan, math.inf, 1e9], lambda v: hush.rdp(_PLAN, [v])),
        ("location", shapes, lambda v: hush.fisher(_SHOWN, v)),
        ("location", shapes, lambda v: hush.individual_rdp(_SHOWN, v, [2.0])),
        ("noise", whole, lambda v: hush.noise.sample(v, (2,))),
        ("norm", [*whole, -0.0], lambda v: hush.noise.sample(_PLAN.noise, (2,), norm=v)),
        ("generator", whole, lambda v: hush.noise.sample(_PLAN.noise, (2,), generator=v)),
        ("records", [*counted, 0], lambda v: a_step(folder, records=v)),
        (
            "physical_batch",
            [*counted, 0],
            lambda v: a_step(folder, execution=hush.Execution(physical_batch=v)),
        ),
        ("generator", whole, lambda v: a_step(folder, randomness=hush.Randomness(generator=v))),
        ("step", [*counted, 0], lambda v: hush.Ledger().charge(_PLAN, run="r", step=v, release="x")),
    ]
    name, values, call = pick.choice(calls)
    wrong = pick.choice(values)
    return Mistake(f"{name}={wrong!r} ({calls.index((name, values, call))})", lambda: call(wrong), name)


_EXAMPLES: tuple[Value, ...] = (
    *(hush.Poisson(0.1), hush.FullBatch(), hush.Coordinate(rate=0.5)),
    hush.Twice(rate=0.1, coordinate_rate=0.5),
    hush.TruncatedPoisson(rate=0.1, max_batch=3, records=20),
    hush.FixedSize(size=3, records=20),
    hush.RandomAllocation(steps=4, times=2),
    hush.CyclicPoisson(rate=0.1, cycle=2),
    hush.Banded(multiplier=1.0, strategy=(1.0, 0.5)),
    *(hush.L2(1.0), hush.Lp(p=1.5, norm=1.0), hush.Linf(1.0), hush.L2Linf(l2=1.0, linf=0.5)),
    *(hush.Box(bounds=[(8, 1.0)]), hush.Subspaces(ranks=[3, 5], l2=[1.0, 1.0])),
    *(hush.Entries(changed=1), hush.Importance(1.0), hush.Normalized(), hush.Quantile()),
    *(hush.Gaussian(1.0), hush.BlockGaussian(multipliers=[1.0])),
    *(hush.Laplace(1.0), hush.GeneralizedGaussian(beta=1.5, multiplier=1.0)),
    *(hush.Rectified(scale=1.0, bound=1.0), hush.Truncated(scale=1.0, bound=1.0)),
    *(hush.StochasticSign(scale=1.0), hush.Quantized(scale=1.0, bound=1.0, levels=4)),
    *(hush.Always(), hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, test="mean")),
    hush.BestOf(steps=5, mean=3.0),
    *(hush.Principal(), hush.Budget(epsilon=1.0, delta=1e-5)),
)
"""A value of every kind that has settings."""

_TAKEN: dict[str, Callable[[float], bool]] = {
    "rate": lambda v: 1e-9 <= v <= 1,
    "coordinate_rate": lambda v: 1 / 512 <= v <= 1,
    **dict.fromkeys(("norm", "l2", "linf"), lambda v: 1e-12 <= v <= 1e12),
    **dict.fromkeys(("p", "beta"), lambda v: v >= 1),
    **dict.fromkeys(("multiplier", "clip"), lambda v: 0 < v <= 1e15),
    **dict.fromkeys(("scale", "bound"), lambda v: 1e-12 <= v <= 1e15),
    "mean": lambda v: 1.01 <= v <= 10_000,
    "shape": lambda v: 0 <= v <= 100,
    "threshold": lambda v: abs(v) <= 1e15,
    "quantile": lambda v: 0.01 <= v <= 0.99,
    "learning_rate": lambda v: 1e-3 <= v <= 2,
    "share": lambda v: 1e-3 <= v <= 0.25,
    "stability": lambda v: 1e-6 <= v <= 1e6,
    **dict.fromkeys(("max_batch", "records", "size", "cycle"), lambda v: v == 1),
    **dict.fromkeys(("changed", "groups", "every", "iterations", "steps", "times"), lambda v: v == 1),
    **dict.fromkeys(("levels", "accounting", "test", "law"), lambda v: False),
    "epsilon": lambda v: 0 < v < math.inf,
    "delta": lambda v: 0 < v < 1,
}
"""Which of the numbers tried a setting takes, by its name; written down here a second time."""

_SETTINGS = [
    (value, field.name)
    for value in _EXAMPLES
    for field in fields(value)
    if isinstance(getattr(value, field.name), int | float | str)
]
"""Every setting of every kind that is one number or one word."""


def without_example() -> set[str]:
    """Parts of the library that nothing here is tried on."""
    parts = {name for stage in STAGES for name in kinds_of(stage)}
    return parts - {type(value).__name__ for value in _EXAMPLES}


def setting(pick: Random, folder: Path) -> Mistake:
    """A part with one setting outside its range."""
    value, name = pick.choice(_SETTINGS)
    wrong = pick.choice([number for number in NUMBERS if not _TAKEN[name](number)] + STRANGE)
    return Mistake(
        f"{type(value).__name__}({name}={wrong!r})",
        lambda: replace(value, **{name: wrong}),
        f"{name}={wrong!r}",
    )


def _proved(sampling: str, clipping: str, noise: str, release: str) -> bool:
    """Which kinds go together, as docs/guarantees has them; written down here a second time."""
    whole = sampling in ("Poisson", "FullBatch")
    if sampling in ("TruncatedPoisson", "FixedSize", "RandomAllocation"):
        clippings = ("L2", "Normalized", "Quantile", "L2Linf", "Box", "Subspaces")
        return noise == "Gaussian" and release == "Always" and clipping in clippings
    if sampling == "CyclicPoisson":
        proved = clipping in ("L2", "Normalized", "L2Linf", "Box") and noise in ("Gaussian", "Banded")
        return proved and release == "Always"
    if noise == "Banded":
        return False
    if release == "BestOf":
        return whole and (clipping, noise) == ("L2", "Gaussian")
    if release == "Selective" and (
        not whole or noise in ("BlockGaussian", "Laplace", "GeneralizedGaussian")
    ):
        return False
    if release == "Selective":
        return clipping in ("L2", "Linf", "L2Linf")
    if clipping == "Entries":
        return sampling == "FullBatch" and noise in ("Gaussian", "Laplace", "GeneralizedGaussian")
    if clipping in ("Importance", "Normalized", "Quantile"):
        return whole and noise == "Gaussian"
    if clipping == "Lp":
        return whole and noise in ("Gaussian", "Laplace", "GeneralizedGaussian")
    if noise in ("Rectified", "Truncated", "StochasticSign", "Quantized"):
        return clipping in ("L2", "Linf", "L2Linf")
    if noise == "BlockGaussian":
        return clipping in ("L2", "Box", "Subspaces")
    if noise in ("Laplace", "GeneralizedGaussian"):
        return whole and clipping == "L2"
    return True


def combination(pick: Random, folder: Path) -> Mistake:
    """Parts that nobody has proved anything of together."""
    while True:
        parts: list[Any] = [
            pick.choice([value for value in _EXAMPLES if isinstance(value, stage)]) for stage in STAGES
        ]
        kinds = [type(part).__name__ for part in parts]
        if not _proved(*kinds):
            break
    sampling, clipping, noise, release = parts
    plan = hush.Plan(sampling=sampling, clipping=clipping, noise=noise, release=release)
    use = pick.choice(
        [
            lambda: hush.epsilon(plan, 3, 1e-5, dimension=8),
            lambda: hush.rdp(plan, [2.0], dimension=8),
            lambda: hush.calibrate(plan, hush.Budget(epsilon=1.0, delta=1e-5), 3, dimension=8),
            lambda: a_step(folder, plan=plan),
            lambda: a_run(folder, plan=plan),
        ]
    )
    return Mistake(" x ".join(kinds), use, " x ".join(kinds))


QUICK, ALL = range(50), range(1000)
KINDS = (setting, combination, argument)


@pytest.mark.parametrize("seed", QUICK)
def test_a_mistake_is_refused_by_name(seed: int, tmp_path: Path) -> None:
    is_refused(mistake(seed, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_any_mistake_is_refused_by_name(seed: int, tmp_path: Path) -> None:
    is_refused(mistake(seed, tmp_path), tmp_path)


def test_every_part_of_the_library_is_tried() -> None:
    assert without_example() == set()


def mistake(seed: int, folder: Path) -> Mistake:
    """The mistake of that number, the same one every time; whatever it writes goes to the folder."""
    pick = Random(seed)
    return pick.choice(KINDS)(pick, folder)


def is_refused(wrong: Mistake, folder: Path) -> None:
    before = charges(folder)
    with pytest.raises(HushError) as raised:
        wrong.attempt()
    # long values are shortened
    assert wrong.named[:100] in str(raised.value), wrong.what
    assert charges(folder) == before, wrong.what
    assert not list(folder.rglob("*.safetensors")), wrong.what


def charges(folder: Path) -> list[str]:
    """The charges in all ledgers below a folder."""
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if line.startswith(json.dumps({"charge": ""})[:10])]
