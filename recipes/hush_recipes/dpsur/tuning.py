"""Tuning of selective release: the test that needs the least training noise.

What a test can see is modelled, not measured: a helpful proposal lowers the loss of a record by
`signal` standard deviations of that change on average, a harmful one raises it by as much, and half
of the proposals are helpful. The model uses no data, so it costs no privacy.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scipy.special import ndtr

from hush.accounting import epsilon as charge
from hush.accounting.calibrate import calibrate
from hush.accounting.numerics import bisect
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget, Guarantee, check_delta
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.release import Selective, Test
from hush.core.value import Range, check_count, check_kind

_ACCEPTANCE = Range(above=0, below=1, why="it is the share of trials that are accepted", example=0.5)
_SIGNAL = Range(above=0, at_most=10, why="a test without a signal accepts by chance", example=0.1)
_CONTRAST = Range(
    above=1,
    at_most=1e6,
    why="helpful proposals must be accepted more often than harmful ones, or the test is for nothing",
    example=2.0,
)
# Tests are compared by their RDP at this order before the best are accounted in full.
_COMPARISON_ORDER = 8.0
# Among tests whose RDP is within this factor of the least, the one with the smallest batch is taken.
_NEAR_BEST = 1.005


@dataclass(frozen=True, kw_only=True)
class SelectiveTuning:
    """The tuned plan, its guarantee, and the modelled power of its test."""

    plan: Plan
    trials: int
    guarantee: Guarantee
    helpful: float
    """Modelled acceptance probability of a helpful proposal."""
    harmful: float
    """Modelled acceptance probability of a harmful proposal."""


def tune_selective(
    plan: Plan,
    *,
    records: int,
    budget: Budget,
    updates: int,
    test: Test,
    acceptance: float = 0.5,
    signal: float = 0.1,
    contrast: float = 2.0,
) -> SelectiveTuning:
    """The plan with the test and the least training noise for `updates` accepted updates in `budget`.

    Args:
        plan: gives the sampling and clipping of the training; its noise and release are replaced.
        records: the number of records, public.
        budget: the epsilon and delta that all trials together keep.
        updates: how many accepted updates are wanted.
        test: which number is tested, "mean" or "summed".
        acceptance: the modelled share of trials that are accepted.
        signal: how far a helpful proposal lowers a record's loss, in standard deviations of the change.
        contrast: how many times as often helpful proposals must be accepted as harmful ones.

    Returns:
        The tuned plan, the number of trials `updates / acceptance`, their guarantee, and the power of
        the test.

    **Guarantee.** The plan's trials, `updates / acceptance` of them, stay within the budget whatever
    the model of the test is worth; if it is poor, fewer updates are accepted.
    """
    records = check_count("records", records, "the divisor is a public number of records", 1)
    updates = check_count("updates", updates, "updates are counted", 1)
    acceptance = _ACCEPTANCE.check("acceptance", acceptance)
    signal = _SIGNAL.check("signal", signal)
    contrast = _CONTRAST.check("contrast", contrast)
    check_delta(check_kind("budget", budget, Budget).delta, records)
    trials = math.ceil(updates / acceptance)
    start = calibrate(replace(plan, release=Always()), budget, steps=trials)
    costs: list[tuple[float, _TestPower]] = []
    for candidate in _candidate_tests(test, records, signal, acceptance):
        if candidate.helpful >= contrast * candidate.harmful:
            tested = replace(start, release=candidate.release)
            costs.append((float(charge.rdp(tested, [_COMPARISON_ORDER])[0]), candidate))
    if not costs:
        raise InvalidValue(
            f"no {test} test of {records} records accepts {acceptance:g} of all trials and helpful "
            f"proposals {contrast:g} times as often as harmful ones at a signal of {signal:g}: ask for "
            "less contrast or acceptance, or assume more signal.",
            key="contrast",
        )
    limit = _NEAR_BEST * min(cost for cost, _ in costs)
    near_best = [(cost, candidate) for cost, candidate in costs if cost <= limit]
    _, best = min(near_best, key=lambda entry: (entry[1].release.rate, entry[0]))
    try:
        final = calibrate(replace(start, release=best.release), budget, steps=trials)
    except BudgetExceeded as error:
        raise BudgetExceeded(f"the test alone costs too much: {error}") from None
    return SelectiveTuning(
        plan=final,
        trials=trials,
        guarantee=charge.epsilon(final, steps=trials, delta=budget.delta),
        helpful=best.helpful,
        harmful=best.harmful,
    )


@dataclass(frozen=True)
class _TestPower:
    """A test, and its acceptance probabilities for helpful and harmful proposals."""

    release: Selective
    helpful: float
    harmful: float


def _candidate_tests(test: Test, records: int, signal: float, acceptance: float) -> Iterator[_TestPower]:
    """Tests of all batch sizes and noises, each with the threshold that gives `acceptance`."""
    size = 16
    while size <= min(records, 4096):
        for step in range(24):
            noise = 0.5 * 2 ** (step / 2)
            test_power = _summed_test_power if test == "summed" else _mean_test_power
            _, root = bisect(
                lambda t, size=size, noise=noise, test_power=test_power: (  # type: ignore[misc]
                    sum(test_power(size, noise, signal, t)) / 2 - acceptance < 0
                ),
                -1e4,
                1e4,
                rounds=60,
            )
            threshold = round(root, 6)
            helpful, harmful = test_power(size, noise, signal, threshold)
            release = Selective(
                rate=size / records,
                clip=0.01 if test == "summed" else 0.001,
                multiplier=noise,
                threshold=threshold,
                test=test,
            )
            yield _TestPower(release, helpful, harmful)
        size *= 2


def _summed_test_power(
    size: float, noise: float, signal: float, threshold: float
) -> tuple[float, float]:
    """Acceptance probabilities of a summed test; each record's difference is of the clip's size."""
    spread = math.hypot(math.sqrt(size), noise)
    helpful, harmful = ((threshold + side * size * signal) / spread for side in (1, -1))
    return float(ndtr(helpful)), float(ndtr(harmful))


def _mean_test_power(size: float, noise: float, signal: float, threshold: float) -> tuple[float, float]:
    """Acceptance probabilities of a mean test; its clip leaves no more than the sign of the mean."""
    right = float(ndtr(signal * math.sqrt(size)))
    upper, lower = (float(ndtr((threshold + side) / 2 / noise)) for side in (1, -1))
    return right * upper + (1 - right) * lower, right * lower + (1 - right) * upper
