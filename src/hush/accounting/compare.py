"""Comparison of published methods at one budget: calibrated noise and computational cost.

Each method is a named plan (`hush.plans`), calibrated to the same budget, number of updates and batch
size. Gradients have Euclidean norm 1 and are not clipped, so less noise is better.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import gammaln

from hush import plans
from hush.accounting.calibrate import calibrate, fit_noise
from hush.accounting.per_instance import individual_rdp
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.clipping import Entries, Linf
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget, check_delta
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.value import Range, check_count
from hush.noise import Gaussian, Laplace, Rectified, Truncated
from hush.noise.bounded import largest_variance
from hush.sampling import FullBatch, Twice

BANDS = (4, 16, 64)
BETAS = (1.0, 1.5, 2.33, 3.0)
LARGE_EPSILON, LARGE_MODEL = 8.0, 100_000
"""Smallest epsilon and model size for which subspaces are recommended. They increase the accuracy by 3.2
points with 291,898 parameters, and decrease it by 4.3 points with 26,010 parameters
(docs/results/twice-sampling.md)."""
_CAP = Range(above=0, at_most=1, why="no entry exceeds the norm", example=0.1)
_ACCEPTANCE = Range(
    above=0, at_most=1, why="each accepted update needs 1 / acceptance trials", example=0.5
)
_TEST_BATCH = 256
_SUPPORT = 0.5
"""Bound of noise with bounded support, in standard deviations, as in docs/results/bounded.md."""
_ORDERS = np.concatenate([[1.25, 1.5, 1.75], np.arange(2, 33), np.geomspace(34, 1024, 24)])
_PATTERN = 4096
"""Length of the synthetic sum, which is repeated for larger models."""


def check_cap(name: str, cap: float, dimension: int) -> float:
    """Validate a ratio of the linf norm to the l2 norm of a gradient."""
    checked, smallest = _CAP.check(name, cap), dimension**-0.5
    # tolerate the rounding of exactly 1/sqrt(dimension), the ratio of a constant vector
    if checked < smallest * (1 - 1e-9):
        raise InvalidValue(
            f"{name}={checked:g} must be at least 1/sqrt({dimension}) = {smallest:.4g}: a constant "
            f"vector has this ratio, the smallest possible. Pass e.g. "
            f"{name}={min(1.0, 10 * smallest):.4g}.",
            key=name,
        )
    return checked


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data, sampling, budget and gradient geometry that the compared methods share."""

    records: int
    rate: float
    """Sampling rate of plain DP-SGD."""
    steps: int
    """Number of updates."""
    dimension: int
    budget: Budget
    cap: float | None = None
    """Ratio of the linf norm to the l2 norm of a gradient."""
    subspaces: tuple[tuple[int, float], ...] = ()
    """Ranks and norms of orthogonal subspaces; by default those of the plan."""
    acceptance: float = 0.5
    """Acceptance rate of selective release."""
    queries: int = 200
    """Number of noisy votes."""
    public_records: int = 0
    """Number of public records from the same distribution."""

    def __post_init__(self) -> None:
        for name in ("records", "steps", "dimension", "queries"):
            check_count(name, getattr(self, name), "the noise depends on this number", at_least=1)
        check_count("public_records", self.public_records, "it is a number of records", at_least=0)
        check_delta(self.budget.delta, self.records)
        _ACCEPTANCE.check("acceptance", self.acceptance)
        if self.cap is not None:
            check_cap("cap", self.cap, self.dimension)
        if self.subspaces and sum(rank for rank, _ in self.subspaces) != self.dimension:
            raise InvalidValue(
                f"subspaces={self.subspaces!r} must have ranks with sum dimension="
                f"{self.dimension}: coordinates outside the subspaces would have no noise. Add the "
                "complement with its rank and norm."
            )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method, calibrated to the budget.

    `deviation` is the standard deviation of the noise on a coordinate of the mean gradient (for PATE, on
    a count; for correlated noise, of independent noise with the same error in the sums of updates). It
    is infinite if the budget is too small for any noise. `variance` and `gradients` are the noise
    variance and the gradients per update, relative to plain DP-SGD; NaN for PATE.
    """

    method: str
    name: str
    """Name in `hush plans`; "pate" for `hush pate`."""
    plan: Plan | None
    """Calibrated plan; None if the method is not applicable."""
    steps: int
    """Number of charged steps."""
    deviation: float
    variance: float = math.nan
    gradients: float = math.nan
    per_instance: float | None = None
    """Epsilon for one synthetic sum; not a guarantee."""
    needs: str
    measured: str
    """Measured result, and its page in docs/results."""


def compare(setting: Setting, done: Callable[[], None] = lambda: None) -> list[Row]:
    """Compare the methods: one row per method, starting with plain DP-SGD.

    Args:
        setting: Common data, sampling and budget.
        done: Callback after each row.
    """
    rows = list[Row]()
    for row in _rows(setting):
        plain = rows[0].deviation if rows else row.deviation
        rows.append(row if row.name == "pate" else replace(row, variance=(row.deviation / plain) ** 2))
        done()
    return rows


def recommendation(setting: Setting) -> str:
    """Recommended method for this setting, with the reason, from measured accuracies."""
    large = setting.budget.epsilon >= LARGE_EPSILON and setting.dimension >= LARGE_MODEL
    if setting.public_records and large:
        return (
            "Recommended: subspaces. With public records of the same distribution, a large network and "
            "epsilon 8, they were more accurate than plain DP-SGD of equal cost (twice-sampling.md)."
        )
    return (
        "Recommended: plain DP-SGD with the largest batch that time allows. It was the most accurate "
        "method at equal cost in most runs. Consider subspaces if epsilon is "
        f"{LARGE_EPSILON:g} or more, the network has {LARGE_MODEL:,} parameters or more, and public "
        "records of the same distribution exist (--public-records)."
    )


def _rows(setting: Setting) -> Iterator[Row]:
    rate, dimension, row = setting.rate, setting.dimension, functools.partial(_row, setting)
    plain = plans.dpsgd(rate=rate, clip_norm=1.0)
    yield row(
        "plain DP-SGD", "dpsgd", plain, measured="best in most runs: dpsur.md, generalized-gaussian.md"
    )
    measured = "gains at large epsilon in few epochs: ../mechanisms/correlated-noise.md"
    correlated = [row("correlated noise", "banded", None, needs="a smaller rate", measured=measured)]
    for bands in BANDS:
        if bands * rate <= 1 and bands <= setting.steps:
            plan = plans.banded(rate=rate, bands=bands, steps=setting.steps)
            method, needs = f"correlated noise, {bands} bands", f"memory of {bands} gradients"
            correlated.append(row(method, "banded", plan, needs=needs, measured=measured))
    yield min(correlated, key=lambda each: each.deviation)
    cap = max(0.1, dimension**-0.5) if setting.cap is None else setting.cap
    twice = plans.twice(clip_norm=1.0, cap=cap)
    assert isinstance(twice.sampling, Twice)
    larger = rate / twice.sampling.coordinate_rate
    fits = larger <= 1
    yield row(
        "DP-SGD, larger batch",
        "dpsgd",
        plans.dpsgd(rate=min(1.0, larger), clip_norm=1.0),
        needs="time" if fits else "full batches",
        measured="gains on ResNet22: twice-sampling.md",
    )
    yield row(
        "twice sampling",
        "twice",
        replace(twice, sampling=replace(twice.sampling, rate=larger)) if fits else None,
        needs=f"entries up to {cap:.3g}" if fits else f"a rate up to {rate / larger:.3g}",
        measured="no gain over the larger batch: twice-sampling.md",
    )
    ranks, shares = zip(*setting.subspaces, strict=True) if setting.subspaces else ((), None)
    subspaces = None
    if len(setting.subspaces) != 1 and dimension > 1:
        split = functools.partial(plans.subspaces, parameters=dimension, rate=rate, cap=None)
        subspaces = split(ranks=ranks[:-1] or None, shares=shares, coordinate_rate=1.0, clip_norm=1.0)
    yield row(
        "subspaces, optimal noise",
        "subspaces",
        subspaces,
        needs="public records" + ("" if setting.subspaces else ", equal norms"),
        measured="gains on ResNet22, loses on a small CNN: twice-sampling.md",
    )
    test_rate = min(_TEST_BATCH, setting.records) / setting.records
    selective = functools.partial(plans.dpsur, rate=rate, clip_norm=1.0, test_rate=test_rate)
    summed = selective(test="summed", test_clip=0.01, test_multiplier=8.0)
    for plan in (summed, selective(test="mean", test_multiplier=1.3)):
        test = plan.release
        assert isinstance(test, Selective)
        # the acceptance rate of the mean test cannot exceed this bound
        share = min(setting.acceptance, test.acceptance(test_rate * setting.records)[1])
        needs, measured = f"{share:.3g} of trials accepted", "loses in most runs: dpsur.md"
        yield row(f"DPSUR, {test.test} test", "dpsur", plan, share, needs=needs, measured=measured)
    for beta in BETAS:
        norm = typical_norm(min(beta, 2.0), dimension) if beta < 2 else 1.0
        method = f"beta-DP-SGD, beta {beta:g}" + " (Laplace)" * (beta == 1)
        plan = plans.beta(beta=beta, rate=rate, clip_norm=norm)
        yield row(method, "beta", plan, measured="loses, but not on Adult: generalized-gaussian.md")
    # clamping each entry to its root mean square gives the same l2 sensitivity as in the other rows
    clipping, measured = Linf(dimension**-0.5), "a lower per-instance epsilon: bounded.md"
    needs = f"full batches, bound {_SUPPORT:g} deviations"
    for name, bounded in (("rectified", plans.rectified), ("truncated", plans.truncated)):
        plan = replace(bounded(bound=_SUPPORT), clipping=clipping)
        yield row(f"bounded support, {name}", name, plan, needs=needs, measured=measured)
    for noise, kind in ((Laplace(1.0), "Laplace"), (Gaussian(1.0), "Gaussian")):
        vote = Plan(sampling=FullBatch(), clipping=Entries(changed=2), noise=noise)
        private, deviation = _calibrated(vote, setting.budget, setting.queries, None)
        yield Row(
            method=f"PATE, {kind} votes",
            name="pate",
            plan=private,
            steps=setting.queries,
            deviation=deviation,
            needs=f"{setting.queries} public queries",
            measured="Laplace best for one vote: pate.md",
        )


def _row(
    setting: Setting,
    method: str,
    name: str,
    plan: Plan | None,
    acceptance: float = 1.0,
    *,
    needs: str = "-",
    measured: str,
) -> Row:
    """Row of a training method; `plan` is None if the method is not applicable."""
    row = Row(
        method=method,
        name=name,
        plan=None,
        steps=math.ceil(setting.steps / acceptance),
        deviation=math.inf,
        needs=needs,
        measured=measured,
    )
    if plan is None:
        return row
    rate, per_instance = plan.sampling.average_participation, None
    found, total = _calibrated(plan, setting.budget, row.steps, setting.dimension)
    if found is not None:
        total *= found.noise.relative_error(row.steps)
    if found is not None and isinstance(found.noise, Rectified | Truncated):
        # truncation scales the signal by the slope of the mean, which equals the relative variance
        if isinstance(found.noise, Truncated):
            total /= math.sqrt(largest_variance(_SUPPORT))
        # the input is a sum of synthetic gradients with normal entries, and divergences add up over
        # coordinates
        size = min(setting.dimension, _PATTERN)
        entries = np.random.default_rng(0).standard_normal(size)
        location = math.sqrt(setting.records) * found.clipping.reference_norm * entries
        divergences = individual_rdp(found, location, _ORDERS) * (setting.dimension / size)
        local = rdp_to_epsilon(setting.steps * divergences, _ORDERS, setting.budget.delta)
        per_instance = min(local, setting.budget.epsilon)
    return replace(
        row,
        plan=found,
        deviation=total / (setting.records * rate * plan.sampling.coordinate_participation),
        gradients=rate / setting.rate / acceptance,
        per_instance=per_instance,
    )


def _calibrated(
    plan: Plan, budget: Budget, steps: int, dimension: int | None
) -> tuple[Plan | None, float]:
    """Calibrated plan, and the root mean square of the noise on a coordinate of its sum."""
    try:
        shaped = len(plan.clipping.sensitivity(dimension)) > 1
        found = (fit_noise if shaped else calibrate)(plan, budget, steps, dimension)
    except BudgetExceeded:
        return None, math.inf
    blocks = found.clipping.sensitivity(dimension)
    squares, sizes = [], [block.dimension or 1 for block in blocks]
    for noise, norm in found.noise.per_block(blocks, found.clipping.reference_norm):
        law = (noise.dominating_noise(norm) or noise).exponential_power(norm)
        assert law is not None
        squares.append(math.exp(2 * math.log(law[1]) + gammaln(3 / law[0]) - gammaln(1 / law[0])))
    return found, math.sqrt(float(np.average(squares, weights=sizes)))


def typical_norm(p: float, dimension: int) -> float:
    """Expected l_p norm of a random vector on the Euclidean unit sphere."""
    moment = p / 2 * math.log(2) + gammaln((p + 1) / 2) - math.log(math.pi) / 2
    return math.exp((math.log(dimension) + float(moment)) / p - math.log(dimension) / 2)
