"""ROC curves on logarithmic axes, under the ceilings that guarantees draw."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hush.audit.roc import Roc, ceiling


def draw_roc(
    axes: Any, curves: Mapping[str, Roc], ceilings: Mapping[str, tuple[float, float]], *, title: str
) -> None:
    """Draw each curve, and for each (epsilon, delta) the most that any attack could reach."""
    # rates below one in so many others were not measured
    least = min(1 / len(roc.others) for roc in curves.values())
    grid = np.geomspace(least, 1, 400)
    for name, roc in curves.items():
        false, true = roc.rates
        # a step function: between two thresholds nothing more is found
        axes.plot(false, true, drawstyle="steps-post", linewidth=1.2, label=name)
    for name, (epsilon, delta) in ceilings.items():
        axes.plot(grid, ceiling(grid, epsilon, delta), "--", color="0.3", linewidth=1, label=name)
    axes.plot(grid, grid, ":", color="0.6", linewidth=1, label="guessing")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(least, 1),
        ylim=(least, 1),
        xlabel="false positive rate",
        ylabel="true positive rate",
        title=title,
    )
    axes.legend(frameon=False, fontsize=7, loc="lower right")
