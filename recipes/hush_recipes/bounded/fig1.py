"""Figure 1 of the bounded-support paper: what one number costs, by where it is.

Support [-1, 1], deviation 1, a change of 1: Fisher information loss, and Rényi divergence of order 2.
"""

from typing import Any

import numpy as np

import hush
from hush.accounting.per_instance import fisher, individual_rdp, unit_law
from hush.core.parts import Noise
from hush_recipes.figure import Figure

SCALE, BOUND, SHIFT, ORDER = 1.0, 1.0, 1.0, 2.0
LOCATIONS = np.linspace(-4, 4, 81)
NOISES: dict[str, Noise] = {
    "Gaussian": hush.Gaussian(multiplier=SCALE / SHIFT),
    "rectified": hush.Rectified(scale=SCALE, bound=BOUND),
    "truncated": hush.Truncated(scale=SCALE, bound=BOUND),
    "sign": hush.StochasticSign(scale=SCALE),
}


def bounded_fig1() -> Figure:
    """Fisher information, the RDP that the paper charges, and the one that holds, by location."""
    eta: dict[str, list[float]] = {}
    one_way: dict[str, list[float]] = {}
    charged: dict[str, list[float]] = {}
    for name, noise in NOISES.items():
        plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(norm=SHIFT), noise=noise)
        eta[name] = np.sqrt(fisher(plan, LOCATIONS)).tolist()
        charged[name] = [float(individual_rdp(plan, [at], [ORDER])[0]) for at in LOCATIONS]
        support, scale = unit_law(noise, SHIFT)
        shift = np.full(len(LOCATIONS), SHIFT / scale)
        one_way[name] = support.divergence(LOCATIONS / scale, shift, ORDER).tolist()

    def draw(panels: Any) -> None:
        for k, name in enumerate(NOISES):
            panels[0].plot(LOCATIONS, eta[name], color=f"C{k}", label=name)
            panels[1].plot(LOCATIONS, charged[name], color=f"C{k}", label=name)
            panels[1].plot(LOCATIONS, one_way[name], "--", color=f"C{k}", linewidth=1)
        panels[0].set(xlabel="location", ylabel="Fisher information loss eta")
        panels[1].set(xlabel="location", ylabel=f"divergence of order {ORDER:g} (dashed: one way)")
        panels[0].legend()

    return Figure(
        name="bounded-fig1",
        title="One number on [-1, 1], deviation 1, a change of 1",
        header=[
            "location",
            *(f"{kind}, {name}" for name in NOISES for kind in ("eta", "paper", "charged")),
        ],
        rows=[
            [float(at), *(kind[name][k] for name in NOISES for kind in (eta, one_way, charged))]
            for k, at in enumerate(LOCATIONS)
            if k % 10 == 0
        ],
        draw=draw,
        panels=2,
        notes=[
            "paper: D(location || location + 1), its Algorithm 1; charged: both directions and signs",
            "the locations are made up: these numbers are about nobody",
        ],
    )
