"""Figure 5 of the twice-sampling paper: epsilon of 10,000 steps by noise, and the numbers it quotes."""

from typing import Any

import numpy as np
from scipy.optimize import brentq

from hush.accounting import epsilon as charge
from hush.clipping import L2
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.report.text import Table
from hush.sampling import Poisson
from hush_recipes.figure import Figure
from hush_recipes.twice.fig4 import COORDINATE_RATES, RATE, SPREADS, sampling_costs
from hush_recipes.twice.settings import DELTA, published_epsilon

STEPS = 10_000
DEVIATIONS = np.geomspace(0.35, 3.0, 45)
# Figure 5(b), d0 = 64: input sampling with the noise at which twice sampling has epsilon 8
QUOTED = {"twice, q2 = 1/2": 30.4, "twice, q2 = 1/3": 88.5}


def twice_fig5() -> Figure:
    """Epsilon at delta 1e-5 by the paper's accounting, and by tight accounting where it is quoted."""
    panels = {
        d0: {
            name: [published_epsilon(cost, float(s), STEPS) for s in DEVIATIONS]
            for name, cost in sampling_costs(d0).items()
        }
        for d0 in SPREADS
    }

    def draw(axes: Any) -> None:
        for panel, (d0, curves) in zip(axes, panels.items(), strict=True):
            for name, values in curves.items():
                panel.plot(DEVIATIONS, np.log(values), label=name)
            panel.axhline(np.log(8), color="grey", lw=0.8, ls=":")
            panel.set(title=f"d0 = {d0}", xlabel="deviation", ylabel="log epsilon")
        axes[0].legend()

    rows = [
        [d0, float(s), *(values[k] for values in curves.values())]
        for d0, curves in panels.items()
        for k, s in enumerate(DEVIATIONS)
    ]
    return Figure(
        name="twice-fig5",
        title="Epsilon of 10,000 steps at rate .005: coordinates, records, or both",
        header=["d0", "deviation", *panels[SPREADS[0]]],
        rows=rows,
        draw=draw,
        panels=len(panels),
        summary=at_eight(),
        notes=[
            *(where_printed(name, printed) for name, printed in QUOTED.items()),
            "tight: privacy loss distributions of plain DP-SGD with the same noise; larger batch: the "
            "same, with all entries of the gradients that twice sampling computes and as much noise "
            "on the mean",
        ],
    )


def at_eight() -> Table:
    """Where twice sampling has epsilon 8: what input sampling has there."""
    rows = []
    for d0 in SPREADS:
        costs = sampling_costs(d0)
        for coordinate_rate in COORDINATE_RATES:
            name = f"twice, q2 = 1/{round(1 / coordinate_rate)}"

            def excess(deviation: float, name: str = name, costs: Any = costs) -> float:
                return published_epsilon(costs[name], deviation, STEPS) - 8.0

            deviation = brentq(excess, 0.05, 10.0, xtol=1e-6)
            printed = QUOTED.get(name) if d0 == 64 else None
            rows.append(
                [
                    str(d0),
                    name,
                    f"{deviation:.4f}",
                    f"{published_epsilon(costs['input'], deviation, STEPS):.1f}",
                    "-" if printed is None else f"{printed:g}",
                    f"{tight(RATE, deviation):.2f}",
                    f"{tight(RATE / coordinate_rate, deviation / coordinate_rate):.2f}",
                ]
            )
    header = ["d0", "way", "deviation at 8", "input", "printed", "input, tight", "larger batch, tight"]
    return Table(header=header, rows=rows)


def where_printed(name: str, printed: float) -> str:
    """What twice sampling has where input sampling has the printed epsilon."""
    costs = sampling_costs(64)

    def excess(deviation: float) -> float:
        return published_epsilon(costs["input"], deviation, STEPS) - printed

    deviation = brentq(excess, 0.2, 2.0, xtol=1e-6)
    twice = published_epsilon(costs[name], deviation, STEPS)
    return (
        f"input has the printed {printed:g} at deviation {deviation:.3f}: {name} has {twice:.2f} there"
    )


def tight(rate: float, multiplier: float) -> float:
    """Epsilon of plain DP-SGD."""
    noise = Gaussian(multiplier=multiplier)
    plan = Plan(sampling=Poisson(rate=rate), clipping=L2(norm=1.0), noise=noise)
    return charge.epsilon(plan, STEPS, DELTA).epsilon.upper
