"""Cost of a largest batch beside dp-accounting's, and of random allocation beside Poisson sampling.

Run: .venv/bin/python -m benchmarks.batches
"""

import math
import time

import dp_accounting
from dp_accounting.pld import PLDAccountant

import hush
from hush.core.parts import Sampling
from hush.report.text import Table

RECORDS, RATE, MULTIPLIER, STEPS, DELTA = 25_600, 0.01, 1.0, 1000, 1e-5
EPOCHS = 10
SETTINGS = [(10, 1.0), (100, 0.5), (100, 1.0), (100, 2.0), (1000, 0.5), (1000, 1.0), (1000, 2.0)]


def plan_of(sampling: Sampling, multiplier: float) -> hush.Plan:
    return hush.Plan(sampling=sampling, clipping=hush.L2(1.0), noise=hush.Gaussian(multiplier))


def allocation() -> Table:
    """Ten epochs of random allocation, and of Poisson sampling with the same expected batch."""
    rows = []
    for steps, multiplier in SETTINGS:
        plan = plan_of(hush.RandomAllocation(steps=steps), multiplier)
        began = time.perf_counter()
        ours = hush.epsilon(plan, EPOCHS * steps, DELTA).epsilon
        seconds = time.perf_counter() - began
        poisson_plan = plan_of(hush.Poisson(1 / steps), multiplier)
        poisson = hush.epsilon(poisson_plan, EPOCHS * steps, DELTA).epsilon
        budget = hush.Budget(epsilon=poisson.upper, delta=DELTA)
        calibrated = hush.calibrate(plan, budget, EPOCHS * steps).noise
        assert isinstance(calibrated, hush.Gaussian)
        saved = f"{100 * (1 - calibrated.multiplier / multiplier):.1f}%"
        # rounded outward
        costs = [
            f"{rounded(each * 1e4) / 1e4:.4f}"
            for bound in (ours, poisson)
            for each, rounded in ((bound.lower, math.floor), (bound.upper, math.ceil))
        ]
        rows.append([str(steps), f"{multiplier:g}", *costs, saved, f"{seconds:.1f} s"])
    header = ["steps per epoch", "noise", "lower", "upper", "Poisson lower", "Poisson upper"]
    return Table(header=[*header, "noise saved", "time"], rows=rows)


def main() -> None:
    rows = []
    for limit in (300, 320, 350, 400, None):
        sampling: Sampling = hush.Poisson(RATE)
        if limit is not None:
            sampling = hush.TruncatedPoisson(rate=RATE, max_batch=limit, records=RECORDS)
        plan = plan_of(sampling, MULTIPLIER)
        theirs = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
        event = dp_accounting.TruncatedSubsampledGaussianDpEvent(
            RECORDS, RATE, limit or RECORDS, MULTIPLIER
        )
        theirs.compose(event, STEPS)
        margin = ((limit or RECORDS) - RECORDS * RATE) / (RECORDS * RATE * (1 - RATE)) ** 0.5
        ours = hush.epsilon(plan, STEPS, DELTA).epsilon.upper
        place = [str(limit), f"{margin:.1f}"] if limit else ["none (Poisson)", "-"]
        rounded = math.ceil(ours * 1e4) / 1e4  # an upper bound is rounded up
        rows.append([*place, f"{rounded:.4f}", f"{theirs.get_epsilon(DELTA):.4f}"])
    header = ["max_batch", "deviations above the mean", "hush", "dp-accounting"]
    print(Table(header=header, rows=rows).markdown())
    print(f"\n{EPOCHS} epochs, delta {DELTA:g}:\n")
    print(allocation().markdown())


if __name__ == "__main__":
    main()
