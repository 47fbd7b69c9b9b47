"""The example of the twice-sampling paper's section 6: noise for two subspaces of a gradient."""

import math
from typing import Any

import numpy as np

from hush.accounting.shaping.fit import least_variance_noise
from hush.core.guarantee import Budget
from hush.core.sensitivity import SensitivitySet
from hush.report.figure import Figure
from recipes.twice.settings import PARAMETERS

RANK, PRINCIPAL, RESIDUAL = 1000, 2.5, 1.0
BUDGET, STEPS, RATE = Budget(epsilon=8.0, delta=1e-5), 5000, 0.02


def twice_section6() -> Figure:
    """Deviations in both subspaces and the variance over isotropic noise; the paper says 5.5 times."""
    blocks = [
        SensitivitySet(p=2.0, norm=PRINCIPAL, dimension=RANK),
        SensitivitySet(p=2.0, norm=RESIDUAL, dimension=PARAMETERS - RANK),
    ]
    shaped = least_variance_noise(blocks, rate=RATE, budget=BUDGET, steps=STEPS)
    isotropic = math.sqrt(shaped.isotropic / PARAMETERS)
    rows: list[list[object]] = [
        ["principal", RANK, PRINCIPAL, shaped.deviations[0], isotropic],
        ["residual", PARAMETERS - RANK, RESIDUAL, shaped.deviations[1], isotropic],
        [
            "total variance",
            PARAMETERS,
            math.hypot(PRINCIPAL, RESIDUAL),
            shaped.variance,
            shaped.isotropic,
        ],
    ]
    residuals = np.geomspace(0.05, 20, 80)
    ranks = np.sqrt([RANK, PARAMETERS - RANK])

    def gain(residual: float) -> float:
        norms = np.array([PRINCIPAL, residual])
        return float(PARAMETERS * (norms @ norms) / (norms @ ranks) ** 2)

    def draw(axes: Any) -> None:
        axes.loglog(residuals, [gain(float(norm)) for norm in residuals])
        axes.plot([RESIDUAL], [shaped.gain], "o", label=f"section 6: {shaped.gain:.2f} (printed: 5.5)")
        axes.set(
            xlabel="norm in the residual (2.5 in the principal subspace)", ylabel="gain in variance"
        )
        axes.legend(frameon=False)

    return Figure(
        name="twice-section6",
        title="Shaped over isotropic noise for ranks 1000 and 290,898",
        header=["part", "rank", "norm", "shaped", "isotropic"],
        rows=rows,
        draw=draw,
        notes=[
            f"isotropic noise has {shaped.gain:.2f} times the variance; printed: 5.5",
            "where noise dominates, the cosine with the true mean gains the root of that, "
            f"{shaped.gain**0.5:.2f}, times the ratio of the clipped means; printed: 2.9, with its own "
            "gradients",
        ],
    )
