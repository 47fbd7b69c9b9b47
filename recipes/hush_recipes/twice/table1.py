"""Table 1 of the twice-sampling paper: how much less noise twice sampling needs than plain DP-SGD.

Accuracies are another matter (they need training). Three comparisons: the paper's own accounting of
both sides; sound accounting of twice sampling over tight accounting of plain DP-SGD at the same rate
of entries; and over plain DP-SGD that uses all entries of the gradients twice sampling computes.
"""

from typing import Any

from hush.core.guarantee import Budget
from hush_recipes.figure import Figure
from hush_recipes.twice.settings import DELTA, PARAMETERS, plain, published_variance, sampled, unit_block
from hush_recipes.twice.shape import charged_variance, least_variance_noise

STEPS = {2.0: 1500, 2.5: 2000, 4.0: 2500, 8.0: 5000}
PRINTED = {
    (0.06, 3): (86.2, 85.4, 82.2, 70.8),
    (0.04, 2): (89.4, 88.2, 77.4, 75.1),
    (0.03, 3): (67.4, 65.9, 53.2, 43.3),
    (0.02, 2): (72.8, 71.6, 61.0, 53.5),
}
D0 = 100


def twice_table1() -> Figure:
    """Noise variance in percent of that of plain DP-SGD, d0 = 100."""
    rows: list[list[object]] = []
    for (rate, parts), printed in PRINTED.items():
        for (epsilon, steps), printed_ratio in zip(STEPS.items(), printed, strict=True):
            budget = Budget(epsilon=epsilon, delta=DELTA)
            ours = published_variance(sampled(unit_block(D0), rate, 1 / parts), [1], budget, steps)
            base = published_variance(plain(rate / parts), [1], budget, steps)
            sound = charged_variance(
                unit_block(D0), rate=rate, coordinate_rate=1 / parts, budget=budget, steps=steps
            )
            same_batch, larger_batch = (
                least_variance_noise(
                    unit_block(D0), rate=sampling_rate, budget=budget, steps=steps
                ).variance
                for sampling_rate in (rate / parts, rate)
            )
            # the noise on the mean: a batch that is `parts` times larger divides it by as much
            ratios = (ours / base, sound / same_batch, sound / (larger_batch / parts**2))
            rows.append(
                [
                    f"{rate:g}, 1/{parts}",
                    epsilon,
                    printed_ratio,
                    *(round(100 * ratio, 1) for ratio in ratios),
                ]
            )

    def draw(axes: Any) -> None:
        labels = [f"{row[0]}, {row[1]:g}" for row in rows]
        names = ("printed", "recomputed", "sound, over tight", "over the larger batch, tight")
        for k, name in enumerate(names):
            axes.plot(range(len(rows)), [float(str(row[2 + k])) for row in rows], "o-", label=name, ms=3)
        axes.axhline(100, color="grey", lw=0.8)
        axes.set_xticks(range(len(rows)), labels, fontsize=7, rotation=90)
        axes.set(xlabel="q1, q2 and epsilon", ylabel="noise variance, % of plain DP-SGD")
        axes.legend(fontsize=7)

    return Figure(
        name="twice-table1",
        title="Noise of twice sampling over that of plain DP-SGD",
        header=[
            "q1, q2",
            "epsilon",
            "printed",
            "recomputed",
            "sound, over tight",
            "over the larger batch, tight",
        ],
        rows=rows,
        draw=draw,
        notes=[
            f"{PARAMETERS:,} parameters, d0 = {D0}, delta {DELTA:g}; printed and recomputed: Rényi "
            "divergences at the orders 2 to 39 and Lemma 2.3 on both sides",
            "larger batch: plain DP-SGD at rate q1, noise on the mean; it computes as many gradients",
        ],
    )
