"""Figure 8 of the generalized Gaussian paper: how often a noisy vote of two classes is right.

The right class has 100 votes and the other a gap fewer. Noise of each beta is calibrated to the same
(epsilon, delta): as published, where a vote is charged as one noisy count, and for a voter who
changes his mind, which moves two.
"""

from typing import Any

import numpy as np
from scipy import stats

from hush.accounting.calibrate import calibrate
from hush.accounting.pld.privacy_loss import Array
from hush.clipping import Lp
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.noise import GeneralizedGaussian
from hush.report.figure import Figure
from hush.sampling import FullBatch

BETAS = tuple(float(beta) for beta in np.linspace(1, 4, 13))
EPSILONS = (0.5, 1.0, 2.0)
DELTA, VOTES = 1e-5, 100
GAPS = np.linspace(0, 0.1, 41)


def gg_fig8() -> Figure:
    """The area under the curve of utility against the gap, from 0 to 10%."""
    areas = {
        (epsilon, counts): [area(beta, scale(beta, epsilon, counts)) for beta in BETAS]
        for epsilon in EPSILONS
        for counts in (1, 2)
    }

    def draw(axes: Any) -> None:
        for epsilon in EPSILONS:
            (line,) = axes.plot(BETAS, areas[epsilon, 1], "--", label=f"published, epsilon {epsilon:g}")
            label = f"two counts, epsilon {epsilon:g}"
            axes.plot(BETAS, areas[epsilon, 2], color=line.get_color(), label=label)
        axes.axvline(2.0, color="0.6", linewidth=1)
        axes.set(xlabel="beta", ylabel="area under the utility curve")
        axes.legend(frameon=False, fontsize="small", ncols=2)

    best = {key: BETAS[int(np.argmax(values))] for key, values in areas.items()}
    names = {1: "published", 2: "two counts"}
    return Figure(
        name="gg-fig8",
        title=f"noisy argmax of 2 classes, gaps up to 10% of {VOTES} votes, delta {DELTA:g}",
        header=["beta", *(f"{names[counts]}, epsilon {epsilon:g}" for epsilon, counts in areas)],
        rows=[
            *([beta, *(values[k] for values in areas.values())] for k, beta in enumerate(BETAS)),
            ["best beta", *best.values()],
        ],
        draw=draw,
        notes=[
            "published: one noisy count (Theorem 2); two counts: a replaced vote, as hush charges it",
            "the paper sees the best utility near beta 2; for a single vote we find it at beta 1",
        ],
    )


def scale(beta: float, epsilon: float, counts: int) -> float:
    """The least scale for which `counts` noisy counts of sensitivity 1 keep the budget."""
    plan = Plan(
        sampling=FullBatch(),
        clipping=Lp(p=beta, norm=1.0),
        noise=GeneralizedGaussian(beta=beta, multiplier=1.0),
    )
    calibrated = calibrate(plan, Budget(epsilon=epsilon, delta=DELTA), steps=counts, dimension=1)
    return float(calibrated.noise.to_plain()["multiplier"])


def area(beta: float, scale: float) -> float:
    """The mean over the gaps of the chance that the right class wins."""
    return float(np.mean(utility(beta, scale, VOTES * GAPS[:, None])))


def utility(beta: float, scale: float, behind: Array) -> Array:
    """The chance that the right class wins over others so many votes behind, one row a histogram."""
    law = stats.gennorm(beta, scale=scale)
    middle = law.ppf((np.arange(1000) + 0.5) / 1000)  # of cells of equal chance
    won = np.prod(law.cdf(middle[:, None, None] + behind), axis=2)
    return np.asarray(won.mean(axis=0))
