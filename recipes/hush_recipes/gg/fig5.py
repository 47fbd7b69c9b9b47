"""Figure 5 of the generalized Gaussian paper: how likely outliers are at equal privacy.

One number of sensitivity 1, noise calibrated to (1, 1e-5), without sampling and with.
"""

from typing import Any

from scipy import stats

from hush.accounting.calibrate import calibrate
from hush.clipping import Lp
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.noise import GeneralizedGaussian
from hush.sampling import FullBatch, Poisson
from hush_recipes.figure import Figure
from hush_recipes.gg.noisy_votes import BETAS

RATES = (1.0, 0.1)
CUTS = (5.0, 10.0, 15.0)
BUDGET = Budget(epsilon=1.0, delta=1e-5)


def gg_fig5() -> Figure:
    """Probability of noise beyond a cut, by beta."""
    chances = {}
    for rate in RATES:
        laws = []
        for beta in BETAS:
            plan = Plan(
                sampling=FullBatch() if rate == 1 else Poisson(rate=rate),
                clipping=Lp(p=beta, norm=1.0),
                noise=GeneralizedGaussian(beta=beta, multiplier=1.0),
            )
            calibrated = calibrate(plan, BUDGET, steps=1, dimension=1)
            laws.append(stats.gennorm(beta, scale=calibrated.noise.to_plain()["multiplier"]))
        for cut in CUTS:
            chances[rate, cut] = [2 * float(law.sf(cut)) for law in laws]

    def draw(axes: Any) -> None:
        for (rate, cut), values in chances.items():
            style, label = ("-", f"beyond {cut:g}") if rate == 1 else ("--", None)
            axes.plot(BETAS, values, style, color=f"C{CUTS.index(cut)}", label=label)
        axes.set(xlabel="beta", ylabel="chance of an outlier (rate 0.1 dashed)")
        axes.set(yscale="log", ylim=(1e-12, 1))
        axes.legend()

    return Figure(
        name="gg-fig5",
        title=f"outliers of one number at epsilon {BUDGET.epsilon:g}, delta {BUDGET.delta:g}",
        header=["beta", *(f"beyond {cut:g}, rate {rate:g}" for rate, cut in chances)],
        rows=[[beta, *(values[k] for values in chances.values())] for k, beta in enumerate(BETAS)],
        draw=draw,
        notes=["in one dimension published and proved agree: the scales are certified"],
    )
