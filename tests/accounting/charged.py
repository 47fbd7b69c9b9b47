"""Plans, and ledgers charged with them."""

from pathlib import Path

import hush

PLAN = hush.Plan(sampling=hush.Poisson(0.02), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
OTHER = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(20.0))
STEEP = hush.Plan(
    sampling=hush.FullBatch(),
    clipping=hush.Lp(p=4.0, norm=1.0),
    noise=hush.GeneralizedGaussian(beta=4.0, multiplier=20.0),
)


def charge(path: Path, plan: hush.Plan, steps: range, run: str = "r") -> None:
    with hush.Ledger(path) as ledger:
        for step in steps:
            ledger.charge(plan, run=run, step=step, release=f"{step:x}")


def counts(path: Path) -> dict[hush.Plan, int]:
    with hush.Ledger(path) as ledger:
        return dict(ledger.counts)
