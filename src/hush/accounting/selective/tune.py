"""Which test lets a selective run get by with the least training noise.

What a test can see is modelled, not measured: a helpful proposal lowers the loss of a record by
`signal` standard deviations of that change on average, a harmful one raises it by as much, and half
of the proposals are helpful. Nothing here looks at data, so nothing here is charged.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scipy.special import ndtr

from hush.accounting import epsilon as charge
from hush.accounting.calibrate import calibrate
from hush.accounting.numerics import bisect
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget, Guarantee
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.ranges import Range, check_count
from hush.core.release import Selective, Test

_ACCEPTANCE = Range(above=0, below=1, why="it is the share of trials that are accepted", example=0.5)
_SIGNAL = Range(above=0, at_most=10, why="a test without a signal accepts by chance", example=0.1)
_CONTRAST = Range(
    above=1,
    at_most=1e6,
    why="helpful proposals must be accepted more often than harmful ones, or the test is for nothing",
    example=2.0,
)
# At this order tests are compared before the best are priced in full.
_ORDER = 8.0
# Among tests that need training noise so close to the least, the one with the smallest batch is taken.
_CLOSE = 1.005


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The plan found, and what it is expected to do."""

    plan: Plan
    trials: int
    guarantee: Guarantee
    helpful: float
    """How often a helpful proposal is accepted."""
    harmful: float
    """How often a harmful one is."""


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
) -> Tuned:
    """The test, and the least training noise, for `updates` accepted updates within `budget`.

    `plan` gives the sampling and clipping of the training. The test accepts `acceptance` of all
    trials, and helpful proposals at least `contrast` times as often as harmful ones.

    **Guarantee.** The plan's trials, `updates / acceptance` of them, stay within the budget whatever
    the model of the test is worth; if it is poor, fewer updates are accepted.
    """
    records = check_count("records", records, "the divisor is a public number of records", 1)
    updates = check_count("updates", updates, "updates are counted", 1)
    acceptance = _ACCEPTANCE.check("acceptance", acceptance)
    signal = _SIGNAL.check("signal", signal)
    contrast = _CONTRAST.check("contrast", contrast)
    trials = math.ceil(updates / acceptance)
    start = calibrate(replace(plan, release=Always()), budget, steps=trials)
    priced: list[tuple[float, float, _Power]] = []
    for power in _powers(test, records, signal, acceptance):
        if power.helpful >= contrast * power.harmful:
            tested = replace(start, release=power.release)
            cost = float(charge.rdp(tested, [_ORDER])[0])
            priced.append((cost, power.release.rate, power))
    if not priced:
        raise InvalidValue(
            f"no {test} test of {records} records accepts {acceptance:g} of all trials and helpful "
            f"proposals {contrast:g} times as often as harmful ones at a signal of {signal:g}: ask for "
            "less contrast or acceptance, or assume more signal.",
            key="contrast",
        )
    least = min(cost for cost, _, _ in priced)
    close = [(rate, cost, power) for cost, rate, power in priced if cost <= _CLOSE * least]
    _, _, best = min(close, key=lambda found: found[:2])
    try:
        final = calibrate(replace(start, release=best.release), budget, steps=trials)
    except BudgetExceeded as error:
        raise BudgetExceeded(f"the test alone costs too much: {error}") from None
    return Tuned(
        plan=final,
        trials=trials,
        guarantee=charge.epsilon(final, steps=trials, delta=budget.delta),
        helpful=best.helpful,
        harmful=best.harmful,
    )


@dataclass(frozen=True)
class _Power:
    """A test, and how often it accepts helpful and harmful proposals."""

    release: Selective
    helpful: float
    harmful: float


def _powers(test: Test, records: int, signal: float, acceptance: float) -> Iterator[_Power]:
    """Tests of all sizes and noises, each with the threshold that accepts as often as asked."""
    size = 16
    while size <= min(records, 4096):
        for step in range(24):
            noise = 0.5 * 2 ** (step / 2)
            chances = _summed if test == "summed" else _mean
            _, root = bisect(
                lambda t, size=size, noise=noise, chances=chances: (  # type: ignore[misc]
                    sum(chances(size, noise, signal, t)) / 2 - acceptance < 0
                ),
                -1e4,
                1e4,
                rounds=60,
            )
            threshold = round(root, 6)
            helpful, harmful = chances(size, noise, signal, threshold)
            release = Selective(
                rate=size / records,
                clip=0.01 if test == "summed" else 0.001,
                multiplier=noise,
                threshold=threshold,
                test=test,
            )
            yield _Power(release, helpful, harmful)
        size *= 2


def _summed(size: float, noise: float, signal: float, threshold: float) -> tuple[float, float]:
    """A record's clipped difference is of the clip's size: the sum spreads by sqrt(size), plus noise."""
    spread = math.hypot(math.sqrt(size), noise)
    helpful, harmful = ((threshold + side * size * signal) / spread for side in (1, -1))
    return float(ndtr(helpful)), float(ndtr(harmful))


def _mean(size: float, noise: float, signal: float, threshold: float) -> tuple[float, float]:
    """The clip is so small that only the mean's sign is left, and that is right with some chance."""
    right = float(ndtr(signal * math.sqrt(size)))
    most, least = (float(ndtr((threshold + side) / 2 / noise)) for side in (1, -1))
    return right * most + (1 - right) * least, right * least + (1 - right) * most
