"""Settings outside their ranges, and parts that nobody has proved anything of together."""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import hush
from hush.core.parts import Part
from tests.fuzz.mistake import NUMBERS, STRANGE, Attempt, Mistake
from tests.fuzz.wrong_arguments import a_run, a_step


def _settings() -> list[tuple[type[Any], dict[str, Any], str, Callable[[float], bool]]]:
    """Every setting of every part: the class, the others, its name, and which numbers it takes."""
    rate = "rate", lambda v: 1e-9 <= v <= 1
    thinned = 1 / 512
    norm = lambda v: 1e-12 <= v <= 1e12  # noqa: E731
    noisy = lambda v: 0 < v <= 1e15  # noqa: E731
    scale = lambda v: 1e-12 <= v <= 1e15  # noqa: E731
    whole = lambda v: v == 1  # noqa: E731
    bounded = {"scale": 1.0, "bound": 1.0}
    tested = {"rate": 0.1, "clip": 1.0, "multiplier": 1.0}
    return [
        (hush.Poisson, {"rate": 0.1}, *rate),
        (hush.Coordinate, {"rate": 0.5}, "rate", lambda v: thinned <= v <= 1),
        (hush.Twice, {"rate": 0.1, "coordinate_rate": 0.5}, *rate),
        (
            hush.Twice,
            {"rate": 0.1, "coordinate_rate": 0.5},
            "coordinate_rate",
            lambda v: thinned <= v <= 1,
        ),
        (hush.L2, {}, "norm", norm),
        (hush.Lp, {"p": 1.5}, "norm", norm),
        (hush.Lp, {"norm": 1.0}, "p", lambda v: v >= 1),
        (hush.Linf, {}, "norm", norm),
        (hush.L2Linf, {"linf": 0.1}, "l2", norm),
        (hush.L2Linf, {"l2": 1.0}, "linf", norm),
        (hush.Importance, {}, "norm", norm),
        (hush.Entries, {"changed": 1}, "norm", norm),
        (hush.Entries, {}, "changed", whole),
        (hush.Principal, {}, "groups", whole),
        (hush.Principal, {}, "every", whole),
        (hush.Principal, {}, "iterations", whole),
        (hush.Gaussian, {}, "multiplier", noisy),
        (hush.Laplace, {}, "multiplier", noisy),
        (hush.GeneralizedGaussian, {"beta": 1.5}, "multiplier", noisy),
        (hush.GeneralizedGaussian, {"multiplier": 1.0}, "beta", lambda v: v >= 1),
        (hush.Rectified, bounded, "scale", scale),
        (hush.Truncated, bounded, "bound", scale),
        (hush.StochasticSign, {}, "scale", scale),
        (hush.Quantized, {**bounded, "levels": 4}, "bound", scale),
        (hush.Quantized, bounded, "levels", lambda v: False),
        (hush.Selective, tested, *rate),
        (hush.Selective, tested, "clip", noisy),
        (hush.Selective, tested, "multiplier", noisy),
        (hush.Selective, tested, "threshold", lambda v: abs(v) <= 1e15),
        (hush.Selective, tested, "accounting", lambda v: False),
        (hush.Selective, tested, "test", lambda v: False),
        (hush.Budget, {"delta": 1e-5}, "epsilon", lambda v: 0 < v < math.inf),
        (hush.Budget, {"epsilon": 1.0}, "delta", lambda v: 0 < v < 1),
    ]


def setting(pick: Random, folder: Path) -> Mistake:
    """A part with one setting outside its range."""
    kind, others, name, takes = pick.choice(_settings())
    wrong = pick.choice([value for value in NUMBERS if not takes(value)] + STRANGE)
    if pick.random() < 0.2:
        return _listed(pick)
    return Mistake(
        f"{kind.__name__}({name}={wrong!r})",
        lambda: kind(**{**others, name: wrong}),
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


_SAMPLINGS = [
    hush.Poisson(rate=0.1),
    hush.FullBatch(),
    hush.Coordinate(rate=0.5),
    hush.Twice(rate=0.1, coordinate_rate=0.5),
]
_CLIPPINGS = [
    *(hush.L2(norm=1.0), hush.Lp(p=1.5, norm=1.0), hush.Linf(norm=1.0), hush.L2Linf(l2=1.0, linf=0.5)),
    *(hush.Box(bounds=[(8, 1.0)]), hush.Subspaces(ranks=[3, 5], l2=[1.0, 1.0])),
    *(hush.Entries(changed=1), hush.Importance(norm=1.0)),
]
_NOISES = [
    *(
        hush.Gaussian(multiplier=1.0),
        hush.BlockGaussian(multipliers=[1.0]),
        hush.Laplace(multiplier=1.0),
    ),
    *(hush.GeneralizedGaussian(beta=1.5, multiplier=1.0), hush.Rectified(scale=1.0, bound=1.0)),
    *(hush.Truncated(scale=1.0, bound=1.0), hush.StochasticSign(scale=1.0)),
    hush.Quantized(scale=1.0, bound=1.0, levels=4),
]
_RELEASES = [hush.Always(), hush.Selective(rate=0.1, clip=1.0, multiplier=1.0, test="mean")]


def _proved(sampling: str, clipping: str, noise: str, release: str) -> bool:
    """Which kinds go together, as docs/guarantees has them; written down here a second time."""
    whole = sampling in ("Poisson", "FullBatch")
    if release == "Selective":
        return whole and (clipping, noise) == ("L2", "Gaussian")
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
        parts: list[Part] = [
            pick.choice(group) for group in (_SAMPLINGS, _CLIPPINGS, _NOISES, _RELEASES)
        ]
        kinds = [type(part).__name__ for part in parts]
        if not _proved(*kinds):
            break
    sampling, clipping, noise, release = parts
    plan = hush.Plan(sampling=sampling, clipping=clipping, noise=noise, release=release)  # type: ignore[arg-type]
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
