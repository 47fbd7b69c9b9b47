"""Epsilon of private selection beside dp-accounting's: `python benchmarks/selection.py`."""

from dataclasses import replace

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

import hush
from hush.core.release import TrialLaw
from hush.report.text import Table

RATE, MULTIPLIER, STEPS, DELTA = 0.01, 1.0, 1000, 1e-5
LAWS: tuple[tuple[TrialLaw, float, float], ...] = (
    ("negative-binomial", 0.0, 10.0),
    ("negative-binomial", 1.0, 5.0),
    ("negative-binomial", 1.0, 10.0),
    ("negative-binomial", 1.0, 50.0),
    ("poisson", 1.0, 5.0),
    ("poisson", 1.0, 10.0),
)


def row(law: TrialLaw, shape: float, mean: float) -> list[str]:
    """Epsilon of the search by both, and the noise for which it costs what one run costs."""
    plan = hush.Plan(
        sampling=hush.Poisson(rate=RATE),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=MULTIPLIER),
    )
    search = replace(plan, release=hush.BestOf(steps=STEPS, mean=mean, law=law, shape=shape))
    run = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(MULTIPLIER))
    theirs = RdpAccountant()
    theirs.compose(
        RepeatAndSelectDpEvent(
            dp_accounting.SelfComposedDpEvent(run, STEPS), mean, np.inf if law == "poisson" else shape
        )
    )
    single = float(hush.epsilon(plan, STEPS, DELTA))
    calibrated = hush.calibrate(search, hush.Budget(epsilon=single, delta=DELTA), steps=1)
    return [
        law if law == "poisson" else f"{law}, shape {shape:g}",
        f"{mean:g}",
        f"{float(hush.epsilon(search, 1, DELTA)):.3f}",
        f"{theirs.get_epsilon(DELTA):.3f}",
        f"{calibrated.noise.to_plain()['multiplier']:.3f}",
    ]


if __name__ == "__main__":
    header = ["law", "mean", "hush", "dp-accounting", f"noise for one run's epsilon ({MULTIPLIER:g})"]
    print(Table(header=header, rows=[row(*each) for each in LAWS]).markdown())
