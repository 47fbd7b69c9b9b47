"""Cost of a largest batch beside dp-accounting's: epsilon at delta 1e-5 after 1,000 steps.

Run: .venv/bin/python -m benchmarks.batches
"""

import math

import dp_accounting
from dp_accounting.pld import PLDAccountant

import hush
from hush.report.text import Table

RECORDS, RATE, MULTIPLIER, STEPS, DELTA = 25_600, 0.01, 1.0, 1000, 1e-5


def main() -> None:
    rows = []
    for limit in (300, 320, 350, 400, None):
        sampling = hush.Poisson(RATE)
        if limit is not None:
            sampling = hush.TruncatedPoisson(rate=RATE, max_batch=limit, records=RECORDS)
        plan = hush.Plan(sampling=sampling, clipping=hush.L2(1.0), noise=hush.Gaussian(MULTIPLIER))
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


if __name__ == "__main__":
    main()
