"""What twice sampling is charged in the settings of Table 1, by Rényi divergences and otherwise.

The noise is what Rényi divergences ask for at each epsilon; beside it the epsilon that is charged for
that noise, and one that no accounting can go below (docs/guarantees/twice-sampling.md, step 4).
"""

from typing import Any

from hush.accounting import epsilon as charge
from hush.clipping import L2Linf
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.sampling import Twice
from hush_recipes.figure import Figure
from hush_recipes.twice.settings import DELTA, PARAMETERS, unit_block
from hush_recipes.twice.shape import least_variance_noise
from hush_recipes.twice.table1 import D0, PRINTED, STEPS


def twice_charge() -> Figure:
    """Epsilon of the noise that keeps epsilon by Rényi divergences, as it is charged and from below."""
    rows: list[list[object]] = []
    for rate, parts in PRINTED:
        for epsilon, steps in STEPS.items():
            sampling = Twice(rate=rate, coordinate_rate=1 / parts)
            noise = least_variance_noise(
                unit_block(D0),
                rate=rate,
                coordinate_rate=sampling.coordinate_rate,
                budget=Budget(epsilon=epsilon, delta=DELTA),
                steps=steps,
            )
            plan = Plan(
                sampling=sampling,
                clipping=L2Linf(l2=1.0, linf=D0**-0.5),
                noise=Gaussian(multiplier=noise.deviations[0]),
            )
            charged = charge.epsilon(plan, steps, DELTA, PARAMETERS).epsilon
            rows.append(
                [
                    f"{rate:g}, 1/{parts}",
                    steps,
                    round(noise.deviations[0], 4),
                    epsilon,
                    round(charged.upper, 4),
                    round(charged.lower, 4),
                ]
            )

    def draw(axes: Any) -> None:
        for k, name in ((4, "charged"), (5, "from below")):
            shares = [float(str(row[k])) / float(str(row[3])) for row in rows]
            axes.plot(range(len(rows)), shares, "o-", label=name, ms=3)
        labels = [f"{row[0]}, {row[3]:g}" for row in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=7, rotation=90)
        axes.set(xlabel="q1, q2 and epsilon", ylabel="epsilon over that by Rényi divergences")
        axes.legend(fontsize=7)

    return Figure(
        name="twice-charge",
        title="Epsilon of twice sampling: Rényi divergences, and a dominating pair",
        header=["q1, q2", "steps", "deviation", "by Rényi", "charged", "from below"],
        rows=rows,
        draw=draw,
        notes=[f"{PARAMETERS:,} parameters, d0 = {D0}, delta {DELTA:g}, coordinate rates k/256"],
    )
