"""Noise that each mechanism needs for the same (epsilon, delta) guarantee, side by side.

All are calibrated to one budget at one number of steps and one expected batch size, and clip so that
a typical gradient of Euclidean norm 1 passes unclipped: then less noise is simply better.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from scipy.special import gammaln

from hush.accounting.calibrate import calibrate
from hush.accounting.shaping import charged_variance, closed_form_deviations, least_variance_deviations
from hush.clipping import L2, Lp
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget, check_delta
from hush.core.parts import Clipping, Noise, SensitivitySet
from hush.core.plan import Plan
from hush.core.value import Range, check_count
from hush.noise import Gaussian, GeneralizedGaussian, Laplace
from hush.sampling import FullBatch, Poisson

SMALL_BETAS, LARGE_BETAS = (1.25, 1.5, 1.75), (2.33, 3.0, 4.0)
# Coordinate rates that one random byte runs exactly.
COORDINATE_RATES = (128 / 256, 85 / 256)
_RENYI = "RDP, allocation"
_CAP = Range(above=0, at_most=1, why="no entry is larger than the whole vector", example=0.1)


def check_cap(name: str, cap: float, dimension: int) -> float:
    """The cap, checked to be a ratio of norms that a gradient can have."""
    checked, smallest = _CAP.check(name, cap), dimension**-0.5
    # a cap of exactly 1/sqrt(dimension), rounded, is all entries alike
    if checked < smallest * (1 - 1e-9):
        raise InvalidValue(
            f"{name}={checked:g} must be at least 1/sqrt({dimension}) = {smallest:.4g}: a vector whose "
            f"entries are all alike has that ratio, and none has a smaller one, so that the noise would "
            f"be for gradients that do not exist. Pass e.g. {name}={min(1.0, 10 * smallest):.4g}.",
            key=name,
        )
    return checked


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data, sampling, budget and gradient geometry that all mechanisms share."""

    records: int
    rate: float
    steps: int
    dimension: int
    budget: Budget
    cap: float | None = None
    """The largest entry of a gradient over its Euclidean norm, where that is known."""
    subspaces: tuple[tuple[int, float], ...] = ()
    """Ranks and clipping norms of orthogonal subspaces that carry the gradient, where known."""

    def __post_init__(self) -> None:
        for name in ("records", "steps", "dimension"):
            check_count(name, getattr(self, name), "it is counted", at_least=1)
        check_delta(self.budget.delta, self.records)
        if self.cap is not None:
            check_cap("cap", self.cap, self.dimension)
        if self.subspaces and sum(rank for rank, _ in self.subspaces) != self.dimension:
            raise InvalidValue(
                f"subspaces={self.subspaces!r} must have ranks that add up to dimension="
                f"{self.dimension}: what is in no subspace would get no noise. Add the "
                "residual with its rank and norm."
            )

    def plan(self, clipping: Clipping, noise: Noise, rate: float | None = None) -> Plan:
        """A plan with the setting's sampling rate, or another one."""
        chosen = self.rate if rate is None else rate
        sampling = FullBatch() if chosen == 1 else Poisson(rate=chosen)
        return Plan(sampling=sampling, clipping=clipping, noise=noise)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The noise one mechanism adds to the sum of the clipped gradients."""

    mechanism: str
    accountant: str
    deviation: float
    """Root mean square noise per coordinate under proved accounting; infinite if none is enough."""
    variance: float
    """Summed over the coordinates."""
    signal_to_noise: float
    """Norm of the sum if all gradients of an expected batch agree, over the norm of the noise."""
    plan: Plan | None = None
    """The calibrated plan, for gradients of norm 1, where it needs no public basis or threshold."""
    cost: float = math.nan
    """Variance relative to plain DP-SGD under the tightest accounting."""


def compare(setting: Setting, done: Callable[[], None] = lambda: None) -> list[Row]:
    """One row for each mechanism, in order of increasing noise variance.

    **Guarantee.** Each `deviation` keeps the budget: docs/guarantees/poisson-gaussian.md for the
    Gaussian in any ellipsoid, coordinate-wise.md for the others.
    """
    rows = list[Row]()
    for row in chain(_gaussian(setting, setting.rate), _generalized(setting), _twice(setting)):
        rows.append(row)
        done()
    plain = rows[0].variance
    priced = [replace(row, cost=row.variance / plain) for row in rows]
    return sorted(priced, key=lambda row: row.variance)


def _row(
    setting: Setting,
    mechanism: str,
    accountant: str,
    deviation: float,
    plan: Plan | None = None,
) -> Row:
    variance = setting.dimension * deviation**2
    return Row(
        mechanism=mechanism,
        accountant=accountant,
        deviation=deviation,
        variance=variance,
        signal_to_noise=setting.rate * setting.records / math.sqrt(variance),
        plan=plan,
    )


def _gaussian(setting: Setting, rate: float, batch: str = "") -> Iterator[Row]:
    """Plain DP-SGD, and noise shaped to subspaces: both have the same effective multiplier.

    At another rate than the setting's the noise is rescaled to the setting's batch size.
    """
    share = setting.rate / rate
    (multiplier,) = least_variance_deviations(
        _unit_ball(setting), rate=rate, budget=setting.budget, steps=setting.steps
    ).tolist()
    plain = setting.plan(L2(norm=1.0), Gaussian(multiplier=multiplier), rate)
    yield _row(setting, f"Gaussian, l2 (plain DP-SGD){batch}", "PLD", share * multiplier, plain)
    if setting.subspaces:
        # Theorem 4.6 of the hybrid clipping paper, as private as the plain noise for a norm of 1
        blocks = _subspace_balls(setting)
        ranks = np.array([block.size for block in blocks], dtype=float)
        root = share * math.sqrt(ranks @ closed_form_deviations(blocks) ** 2 / setting.dimension)
        yield _row(setting, f"Gaussian, shaped to the subspaces{batch}", "PLD", root * multiplier)


def _generalized(setting: Setting) -> Iterator[Row]:
    """Laplace in l1, generalized Gaussians in l_beta up to 2 and in l2 beyond."""
    for beta in (1.0, *SMALL_BETAS, *LARGE_BETAS):
        norm = typical_norm(beta, setting.dimension)
        spread = math.exp((gammaln(3 / beta) - gammaln(1 / beta)) / 2)
        noise = Laplace(multiplier=1.0) if beta == 1 else GeneralizedGaussian(beta=beta, multiplier=1.0)
        plan = setting.plan(Lp(p=beta, norm=norm) if beta <= 2 else L2(norm=1.0), noise)
        name = "Laplace, l1" if beta == 1 else f"generalized Gaussian {beta:g}, l{min(beta, 2):g}"
        private: Plan | None = None
        deviation = math.inf
        with contextlib.suppress(BudgetExceeded):
            private = calibrate(plan, setting.budget, setting.steps, setting.dimension)
            multiplier = float(private.noise.to_plain()["multiplier"])
            deviation = multiplier * (plan.clipping.reference_norm * spread)
        yield _row(setting, name, "PLD" if beta == 1 else _RENYI, deviation, private)


def _twice(setting: Setting) -> Iterator[Row]:
    """Twice sampling with an l-infinity cap, at the same expected number of sampled entries.

    Beside it plain DP-SGD that uses every entry of the gradients which twice sampling computes.
    """
    if setting.cap is None:
        return
    for coordinate_rate in COORDINATE_RATES:
        record_rate = setting.rate / coordinate_rate
        if record_rate > 1:
            continue
        yield from _gaussian(setting, record_rate, f", all entries at rate {record_rate:.3g}")
        balls = {"Gaussian, l2 and l-infinity": _unit_ball(setting)}
        if setting.subspaces:
            balls["Gaussian, shaped to the subspaces"] = _subspace_balls(setting)
        for kind, blocks in balls.items():
            try:
                variance = charged_variance(
                    blocks,
                    rate=record_rate,
                    coordinate_rate=coordinate_rate,
                    budget=setting.budget,
                    steps=setting.steps,
                )
            except BudgetExceeded:
                variance = math.inf
            name = f"{kind}, twice sampling at {coordinate_rate:.3f}"
            yield _row(setting, name, "PLD, allocation", math.sqrt(variance / setting.dimension))


def _unit_ball(setting: Setting) -> list[SensitivitySet]:
    """Sensitivity of gradients of norm 1, all coordinates as one block."""
    return [SensitivitySet(p=2.0, norm=1.0, cap=setting.cap, dimension=setting.dimension)]


def _subspace_balls(setting: Setting) -> list[SensitivitySet]:
    """Sensitivity of gradients of norm 1 in each subspace, entries capped relative to its norm.

    A cap so low that it bounds the norm would clip more than extreme entries: it is raised to that.
    """
    total = math.hypot(*(norm for _, norm in setting.subspaces))
    caps = [
        None if setting.cap is None else max(setting.cap, rank**-0.5) for rank, _ in setting.subspaces
    ]
    return [
        SensitivitySet(
            p=2.0, norm=norm / total, cap=None if cap is None else cap * norm / total, dimension=rank
        )
        for (rank, norm), cap in zip(setting.subspaces, caps, strict=True)
    ]


def typical_norm(p: float, dimension: int) -> float:
    """Expected l_p norm of a vector of Euclidean norm 1 with normally distributed entries."""
    moment = p / 2 * math.log(2) + gammaln((p + 1) / 2) - math.log(math.pi) / 2
    return math.exp((math.log(dimension) + float(moment)) / p - math.log(dimension) / 2)
