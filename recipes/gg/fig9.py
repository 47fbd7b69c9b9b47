"""Figure 9 of the generalized Gaussian paper: a noisy vote of 25 classes.

As Figure 8, with 1000 votes of which the right class has 100; the runner-up has a gap fewer and the
others are drawn at random below it, as in the paper's Appendix D.3.
"""

from typing import Any

import numpy as np

from hush.accounting.pld.privacy_loss import Array
from hush.report.figure import Figure
from recipes.gg.fig8 import BETAS, DELTA, VOTES, scale, utility

CLASSES, TOTAL, HISTOGRAMS = 25, 1000, 40
EPSILONS = (1.0, 2.0)
SEED = 0


def gg_fig9() -> Figure:
    """The mean utility over random histograms with gaps up to 20%."""
    rng = np.random.default_rng(SEED)
    behind = np.array([histogram(gap, rng) for gap in np.linspace(0.001, 0.2, HISTOGRAMS)])
    means = {
        (epsilon, counts): [
            float(utility(beta, scale(beta, epsilon, counts), behind).mean()) for beta in BETAS
        ]
        for epsilon in EPSILONS
        for counts in (1, 2)
    }

    def draw(axes: Any) -> None:
        for epsilon in EPSILONS:
            (line,) = axes.plot(BETAS, means[epsilon, 1], "--", label=f"published, epsilon {epsilon:g}")
            label = f"two counts, epsilon {epsilon:g}"
            axes.plot(BETAS, means[epsilon, 2], color=line.get_color(), label=label)
        axes.axvline(2.0, color="0.6", linewidth=1)
        axes.set(xlabel="beta", ylabel="mean utility")
        axes.legend(frameon=False, fontsize="small", ncols=2)

    best = {key: BETAS[int(np.argmax(values))] for key, values in means.items()}
    names = {1: "published", 2: "two counts"}
    return Figure(
        name="gg-fig9",
        title=f"noisy argmax of {CLASSES} classes, gaps up to 20% of {VOTES} votes, delta {DELTA:g}",
        header=["beta", *(f"{names[counts]}, epsilon {epsilon:g}" for epsilon, counts in means)],
        rows=[
            *([beta, *(values[k] for values in means.values())] for k, beta in enumerate(BETAS)),
            ["best beta", *best.values()],
        ],
        draw=draw,
        notes=[
            "published: one noisy count (Theorem 2); two counts: a replaced vote, as hush charges it"
        ],
    )


def histogram(gap: float, rng: np.random.Generator) -> Array:
    """Votes by which the other classes are behind the right one."""
    runner_up = VOTES * (1 - gap)
    counts = np.zeros(CLASSES - 2)
    while counts.sum() != TOTAL - VOTES - round(runner_up):
        # drawn until the votes add up; the last class takes what is left if it may
        counts = rng.integers(1, int(runner_up) + 1, CLASSES - 2).astype(float)
        remaining = TOTAL - VOTES - round(runner_up) - counts[:-1].sum()
        if 1 <= remaining <= runner_up:
            counts[-1] = remaining
    return VOTES - np.append(runner_up, counts)
