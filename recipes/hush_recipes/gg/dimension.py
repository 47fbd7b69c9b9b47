"""The dimension that the generalized Gaussian paper leaves out (its Appendix B.2).

Clipped in l_beta, beta > 2, and charged as if there were one dimension: by how much is that too
little? Scale 3, l_beta norm 1, order 2.
"""

from typing import Any

from hush.accounting.rdp.coordinatewise import worst_allocation
from hush.accounting.rdp.profile import CoordinateRDP
from hush.core.parts import SensitivitySet
from hush_recipes.figure import Figure

BETAS = (2.33, 3.0, 4.0)
DIMENSIONS = (1, 2, 4, 16, 64, 256, 1000, 10_000, 100_000, 500_000, 1_000_000)
SCALE, ORDER = 3.0, 2.0


def gg_dimension() -> Figure:
    """Cost of the worst change by dimension, relative to a change in one coordinate."""
    charged: dict[float, list[float]] = {}
    for beta in BETAS:
        profile = CoordinateRDP(beta=beta, scale=SCALE)
        single_coordinate = float(profile(ORDER, 1.0))
        balls = [SensitivitySet(p=beta, norm=1.0, dimension=d) for d in DIMENSIONS]
        charged[beta] = [
            float(worst_allocation(profile, ball, [ORDER])[0]) / single_coordinate for ball in balls
        ]

    def draw(axes: Any) -> None:
        for beta, values in charged.items():
            axes.plot(DIMENSIONS, values, marker="o", markersize=3, label=f"beta {beta:g}")
        axes.axhline(1.0, color="0.4", linestyle="--", linewidth=1, label="as published, any beta")
        axes.set(
            xscale="log", yscale="log", xlabel="dimension", ylabel="cost over that of one dimension"
        )
        axes.legend()

    return Figure(
        name="gg-dimension",
        title=f"l_beta clipping: Rényi divergence of order {ORDER:g}, scale {SCALE:g}",
        header=[
            "dimension",
            "published",
            *(f"charged, beta {beta:g}" for beta in BETAS),
        ],
        rows=[[d, 1.0, *(charged[beta][k] for beta in BETAS)] for k, d in enumerate(DIMENSIONS)],
        draw=draw,
        notes=[
            "published: Appendix B.2 of the paper says that the cost does not depend on the dimension",
            "charged: the allocation lemma's bound",
        ],
    )
