"""Figures 8, 9 and 10 of the generalized Gaussian paper: how often a noisy vote is right.

Figures 8 and 9: the right class has 100 votes. Of two classes, the other has a gap fewer; of 25 with
1000 votes in all, the runner-up has, and the others are drawn at random below it (Appendix D.3). Noise
of each beta is calibrated to the same (epsilon, delta): as published, where a vote is charged as one
noisy count, and for a voter who changes his mind, which moves two. Figure 10: two classes, Laplace and
Gaussian noise at one (order, epsilon) of Rényi divergence for a count.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr

from hush.accounting.calibrate import calibrate
from hush.accounting.numerics import Array
from hush.accounting.rdp.profile import CoordinateRDP
from hush.clipping import Lp
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.noise import GeneralizedGaussian
from hush.sampling import FullBatch
from hush_recipes.figure import Figure

BETAS = tuple(float(beta) for beta in np.linspace(1, 4, 13))
DELTA, VOTES = 1e-5, 100
COUNTS = {1: "published", 2: "two counts"}
"""Noisy counts that a vote is charged for."""
GAPS = np.linspace(0, 0.1, 41)
CLASSES, TOTAL, HISTOGRAMS, SEED = 25, 1000, 40, 0
RENYI_SETTINGS = ((2.0, 0.1), (2.0, 1.0), (10.0, 1.0), (10.0, 5.0), (50.0, 1.0))
RENYI_GAPS = tuple(range(0, 21, 2))


def gg_fig8() -> Figure:
    """The area under the curve of utility against the gap, from 0 to 10%."""
    return _by_beta(
        "gg-fig8",
        f"noisy argmax of 2 classes, gaps up to 10% of {VOTES} votes, delta {DELTA:g}",
        "area under the utility curve",
        (0.5, 1.0, 2.0),
        lambda beta, scale: utility(beta, scale, VOTES * GAPS[:, None]),
        ["the paper sees the best utility near beta 2; for a single vote we find it at beta 1"],
    )


def gg_fig9() -> Figure:
    """The mean utility over random histograms with gaps up to 20%."""
    rng = np.random.default_rng(SEED)
    behind = np.array([histogram(gap, rng) for gap in np.linspace(0.001, 0.2, HISTOGRAMS)])
    return _by_beta(
        "gg-fig9",
        f"noisy argmax of {CLASSES} classes, gaps up to 20% of {VOTES} votes, delta {DELTA:g}",
        "mean utility",
        (1.0, 2.0),
        lambda beta, scale: utility(beta, scale, behind),
        [],
    )


def _by_beta(
    name: str,
    title: str,
    measure: str,
    epsilons: Sequence[float],
    utilities: Callable[[float, float], Array],
    notes: list[str],
) -> Figure:
    """A figure of the mean of `utilities(beta, scale)` by beta, at each epsilon by both charges."""
    means = {
        (epsilon, counts): [
            float(np.mean(utilities(beta, noise_scale(beta, epsilon, counts)))) for beta in BETAS
        ]
        for epsilon in epsilons
        for counts in COUNTS
    }

    def draw(axes: Any) -> None:
        for epsilon in epsilons:
            (line,) = axes.plot(BETAS, means[epsilon, 2], label=f"epsilon {epsilon:g}")
            axes.plot(BETAS, means[epsilon, 1], "--", color=line.get_color())
        axes.axvline(2.0, color="0.6", linewidth=1)
        axes.set(xlabel="beta", ylabel=f"{measure} (published dashed)")
        axes.legend()

    best = {key: BETAS[int(np.argmax(values))] for key, values in means.items()}
    return Figure(
        name=name,
        title=title,
        header=["beta", *(f"{COUNTS[counts]}, epsilon {epsilon:g}" for epsilon, counts in means)],
        rows=[
            *([beta, *(values[k] for values in means.values())] for k, beta in enumerate(BETAS)),
            ["best beta", *best.values()],
        ],
        draw=draw,
        notes=[
            "published: one noisy count (Theorem 2); two counts: a replaced vote, as hush charges it",
            *notes,
        ],
    )


def noise_scale(beta: float, epsilon: float, counts: int) -> float:
    """The least scale for which `counts` noisy counts of sensitivity 1 keep the budget."""
    plan = Plan(
        sampling=FullBatch(),
        clipping=Lp(p=beta, norm=1.0),
        noise=GeneralizedGaussian(beta=beta, multiplier=1.0),
    )
    calibrated = calibrate(plan, Budget(epsilon=epsilon, delta=DELTA), steps=counts, dimension=1)
    return float(calibrated.noise.to_plain()["multiplier"])


def utility(beta: float, scale: float, behind: Array) -> Array:
    """The chance that the right class wins over others so many votes behind, one row a histogram."""
    law = stats.gennorm(beta, scale=scale)
    middle = law.ppf((np.arange(1000) + 0.5) / 1000)  # of cells of equal chance
    won = np.prod(law.cdf(middle[:, None, None] + behind), axis=2)
    return np.asarray(won.mean(axis=0))


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


def gg_fig10() -> Figure:
    """Probability that the right class wins, by gap."""
    curves: dict[str, list[float]] = {}
    for order, epsilon in RENYI_SETTINGS:
        name = f"order {order:g}, epsilon {epsilon:g}"
        deviation = math.sqrt(order / (2 * epsilon))
        curves[f"Gaussian, {name}"] = [
            float(ndtr(gap / (deviation * math.sqrt(2)))) for gap in RENYI_GAPS
        ]
        scale = laplace_scale(order, epsilon)
        # the difference of two Laplace draws: Kotz et al. 2001, 2.3.23
        curves[f"Laplace, {name}"] = [
            1 - math.exp(-gap / scale) * (gap / scale + 2) / 4 for gap in RENYI_GAPS
        ]

    def draw(axes: Any) -> None:
        for k, (order, epsilon) in enumerate(RENYI_SETTINGS):
            name = f"order {order:g}, epsilon {epsilon:g}"
            axes.plot(RENYI_GAPS, curves[f"Gaussian, {name}"], color=f"C{k}", label=name)
            axes.plot(RENYI_GAPS, curves[f"Laplace, {name}"], "--", color=f"C{k}")
        axes.set(xlabel="gap in votes", ylabel="utility (Gaussian solid, Laplace dashed)")
        axes.legend()

    return Figure(
        name="gg-fig10",
        title="Laplace and Gaussian at equal Rényi divergence of a count",
        header=["noise", *(f"gap {gap}" for gap in RENYI_GAPS)],
        rows=[[name, *values] for name, values in curves.items()],
        draw=draw,
        notes=["as in the paper, which law is better depends on the order and epsilon, and on the gap"],
    )


def laplace_scale(order: float, epsilon: float) -> float:
    """The scale at which Laplace noise has this divergence for a change of 1."""

    def excess(log_scale: float) -> float:
        law = CoordinateRDP(beta=1.0, scale=float(np.exp(log_scale)))
        return float(law(order, 1.0)) - epsilon

    return math.exp(brentq(excess, -5.0, 8.0))
