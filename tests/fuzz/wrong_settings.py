"""Settings outside their ranges, and parts that nobody has proved anything of together."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import hush
from hush.core.parts import Clipping, Noise, Part, Release, Sampling
from hush.core.value import Value
from tests.fuzz.mistake import NUMBERS, STRANGE, Attempt, Mistake
from tests.fuzz.wrong_arguments import a_run, a_step

STAGES: tuple[type[Part], ...] = (Sampling, Clipping, Noise, Release)


_EXAMPLES: tuple[Value, ...] = (
    *(hush.Poisson(rate=0.1), hush.FullBatch(), hush.Coordinate(rate=0.5)),
    hush.Twice(rate=0.1, coordinate_rate=0.5),
    *(hush.L2(norm=1.0), hush.Lp(p=1.5, norm=1.0), hush.Linf(norm=1.0), hush.L2Linf(l2=1.0, linf=0.5)),
    *(hush.Box(bounds=[(8, 1.0)]), hush.Subspaces(ranks=[3, 5], l2=[1.0, 1.0])),
    *(hush.Entries(changed=1), hush.Importance(norm=1.0)),
    *(hush.Gaussian(multiplier=1.0), hush.BlockGaussian(multipliers=[1.0])),
    *(hush.Laplace(multiplier=1.0), hush.GeneralizedGaussian(beta=1.5, multiplier=1.0)),
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
    **dict.fromkeys(("changed", "groups", "every", "iterations", "steps"), lambda v: v == 1),
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


def kinds_of(stage: type[Part]) -> set[str]:
    """The library's parts of a stage; tests define others."""
    return {name for name, kind in stage.originals.items() if kind.__module__.startswith("hush.")}


def without_example() -> set[str]:
    """Parts of the library that nothing here is tried on."""
    parts = {name for stage in STAGES for name in kinds_of(stage)}
    return parts - {type(value).__name__ for value in _EXAMPLES}


def setting(pick: Random, folder: Path) -> Mistake:
    """A part with one setting outside its range."""
    value, name = pick.choice(_SETTINGS)
    wrong = pick.choice([number for number in NUMBERS if not _TAKEN[name](number)] + STRANGE)
    if pick.random() < 0.2:
        return _listed(pick)
    return Mistake(
        f"{type(value).__name__}({name}={wrong!r})",
        lambda: replace(value, **{name: wrong}),
        f"{name}={wrong!r}",
    )


def _listed(pick: Random) -> Mistake:
    """A list with a wrong number in it."""
    wrong: Any = pick.choice([-1, math.nan, math.inf, 10**400, "1", None, 1j, object(), True])
    makers: list[tuple[str, Attempt]] = [
        ("bounds", lambda: hush.Box(bounds=[1.0, wrong])),
        ("bounds", lambda: hush.Box(bounds=[(wrong, 1.0)])),
        ("ranks", lambda: hush.Subspaces(ranks=[1, wrong], l2=[1.0, 1.0])),
        ("l2", lambda: hush.Subspaces(ranks=[1, 2], l2=[1.0, wrong])),
        ("linf", lambda: hush.Subspaces(ranks=[1, 2], l2=[1.0, 1.0], linf=[wrong, 1.0])),
        ("multipliers", lambda: hush.BlockGaussian(multipliers=[wrong])),
    ]
    name, attempt = pick.choice(makers)
    return Mistake(f"{name}=[.. {wrong!r} ..]", attempt, f"{name}={wrong!r}")


def _proved(sampling: str, clipping: str, noise: str, release: str) -> bool:
    """Which kinds go together, as docs/guarantees has them; written down here a second time."""
    whole = sampling in ("Poisson", "FullBatch")
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
    if clipping == "Importance":
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
