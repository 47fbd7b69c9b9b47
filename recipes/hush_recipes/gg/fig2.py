"""Figure 2 of the generalized Gaussian paper: epsilon against the scale, one step, delta 1e-5."""

from typing import Any

import numpy as np

from hush.accounting.calibrate import calibrate
from hush.accounting.epsilon import epsilon
from hush.clipping import Lp
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.noise import GeneralizedGaussian
from hush.sampling import FullBatch
from hush_recipes.figure import Figure

BETAS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
DRAWN = (1.0, 2.0, 3.0, 4.0)
SCALES = tuple(float(scale) for scale in np.geomspace(0.5, 10, 14).round(3))
DELTA, LINE = 1e-5, 4.0


def gg_fig2() -> Figure:
    """Epsilon of one noisy number by scale, and the scale of each beta at epsilon 4."""
    plans = {
        beta: Plan(
            sampling=FullBatch(),
            clipping=Lp(p=beta, norm=1.0),
            noise=GeneralizedGaussian(beta=beta, multiplier=1.0),
        )
        for beta in BETAS
    }
    curves = {}
    for beta, plan in plans.items():
        noisy = [
            Plan(**{**vars(plan), "noise": GeneralizedGaussian(beta=beta, multiplier=scale)})
            for scale in SCALES
        ]
        curves[beta] = [epsilon(noisy_plan, 1, DELTA, dimension=1).epsilon.upper for noisy_plan in noisy]
    budget = Budget(epsilon=LINE, delta=DELTA)
    crossing = {
        beta: calibrate(plan, budget, steps=1, dimension=1).noise.to_plain()["multiplier"]
        for beta, plan in plans.items()
    }

    def draw(axes: Any) -> None:
        for beta in DRAWN:
            axes.plot(SCALES, curves[beta], label=f"beta {beta:g}")
        axes.axhline(LINE, color="0.6", linewidth=1)
        axes.set(xlabel="scale", ylabel="epsilon", ylim=(0, 12))
        axes.legend()

    return Figure(
        name="gg-fig2",
        title=f"one number, one step, sensitivity 1, delta {DELTA:g}",
        header=["scale", *(f"beta {beta:g}" for beta in BETAS)],
        rows=[
            *([scale, *(curves[beta][k] for beta in BETAS)] for k, scale in enumerate(SCALES)),
            [f"scale at epsilon {LINE:g}", *(crossing[beta] for beta in BETAS)],
        ],
        draw=draw,
        notes=[
            "in one dimension published and proved agree: these are certified upper ends",
            "as in the paper, the larger beta the larger the scale at the same epsilon",
        ],
    )
