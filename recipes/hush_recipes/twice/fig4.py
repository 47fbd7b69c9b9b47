"""Figure 4 of the twice-sampling paper: what one step costs by its noise, for five ways to sample."""

import math
from typing import Any

import numpy as np

from hush.report.text import Table
from hush_recipes.figure import Figure
from hush_recipes.twice.search import BlockCost
from hush_recipes.twice.settings import plain, sampled, unit_block

RATE = 0.005
COORDINATE_RATES = (1 / 2, 1 / 3, 1 / 4)
SPREADS, ORDERS = (16, 64, 256), (4, 8)
DEVIATIONS = np.geomspace(0.05, 3.0, 83)
Panel = tuple[int, int, dict[str, list[float]]]


def twice_fig4() -> Figure:
    """Rényi divergences of one step, l2 bound 1, l-infinity bound 1 / sqrt(d0)."""
    panels: list[Panel] = []
    for order in ORDERS:
        for d0 in SPREADS:
            curves = {
                name: [cost.at(order, np.array([2 * math.log(s)]))[0] for s in DEVIATIONS]
                for name, cost in sampling_costs(d0).items()
            }
            panels.append((order, d0, curves))

    def draw(axes: Any) -> None:
        for panel, (order, d0, curves) in zip(axes, panels, strict=True):
            for name, values in curves.items():
                panel.plot(DEVIATIONS, np.log(values), label=name)
            panel.set(title=f"order {order}, d0 = {d0}", xlabel="deviation", ylabel="log divergence")
        axes[0].legend()

    rows = [
        [order, d0, float(s), *(values[k] for values in curves.values())]
        for order, d0, curves in panels
        for k, s in enumerate(DEVIATIONS)
    ]
    return Figure(
        name="twice-fig4",
        title="One step at rate .005: coordinates, records, or both",
        header=["order", "d0", "deviation", *panels[0][2]],
        rows=rows,
        draw=draw,
        panels=len(panels),
        across=len(SPREADS),
        summary=critical_points(panels),
        notes=["table: the deviation from which a step costs less than half of an unsampled one"],
    )


def sampling_costs(d0: int) -> dict[str, BlockCost]:
    """The five ways to sample entries at the same rate."""
    costs = {"input": plain(RATE), "coordinate": sampled(unit_block(d0), 1.0, RATE)}
    for coordinate_rate in COORDINATE_RATES:
        name = f"twice, q2 = 1/{round(1 / coordinate_rate)}"
        costs[name] = sampled(unit_block(d0), RATE / coordinate_rate, coordinate_rate)
    return costs


def critical_points(panels: list[Panel]) -> Table:
    """Where sampling starts to help: half of what no sampling costs, order / (2 deviation^2)."""
    rows = []
    for order, d0, curves in panels:
        half = order / DEVIATIONS**2 / 4
        crossed = [float(DEVIATIONS[np.argmax(np.array(curve) < half)]) for curve in curves.values()]
        rows.append([str(order), str(d0), *(f"{deviation:.2f}" for deviation in crossed)])
    return Table(header=["order", "d0", *panels[0][2]], rows=rows)
