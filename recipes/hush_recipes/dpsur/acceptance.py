"""Figures 5 and 6 of the DPSUR paper: how often a test accepts, and what an accepted update then costs.

The paper sets the threshold to -1 because there, it says, helpful and harmful proposals (a clipped
difference of -1 or 1) are told apart best. By its own formula the difference of the two chances is
largest at 0; what a lower threshold buys is their ratio, and what it costs is trials.
"""

from typing import Any

import numpy as np

from hush.accounting.epsilon import rdp
from hush.clipping import L2
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush_recipes.figure import Figure

_RECORDS = 60_000
_ORDER = 8.0
NOISES = (0.8, 1.0, 1.3)
# Figure 5: thresholds in units of the clip, and what the text says of helpful and harmful proposals.
PRINTED: dict[float, tuple[float | None, float | None]] = {
    0.0: (69.1, 30.8),
    -1.0: (50.0, 15.9),
    -2.0: (None, None),
}


def dpsur_fig5() -> Figure:
    """Distributions of the noisy test at both ends of the clip; shares below three thresholds."""
    rows: list[list[Any]] = []
    for threshold, printed in PRINTED.items():
        harmful, helpful = _test(1.0, threshold).acceptance(256)
        rows.append([threshold, 100 * helpful, printed[0], 100 * harmful, printed[1]])

    def draw(panels: Any) -> None:
        differences = np.linspace(-7, 7, 400)
        for axes, threshold in zip(panels, PRINTED, strict=True):
            for centre, name in ((-1, "helpful"), (1, "harmful")):
                density = np.exp(-((differences - centre) ** 2) / 8) / np.sqrt(8 * np.pi)
                axes.plot(differences, density, label=name)
                axes.fill_between(differences, density, where=differences < threshold, alpha=0.3)
            axes.axvline(threshold, color="0.4", lw=1)
            axes.set(xlabel="noisy difference over the clip", title=f"threshold {threshold:g} clips")
        panels[0].legend(fontsize=8)

    return Figure(
        name="dpsur-fig5",
        title="What a test of noise 1 accepts",
        header=["threshold", "helpful %", "printed %", "harmful %", "printed %"],
        rows=rows,
        draw=draw,
        panels=3,
    )


def dpsur_fig6() -> Figure:
    """Probabilities of acceptance by threshold, their difference, and the cost of an accepted update."""
    thresholds = np.round(np.arange(-3.5, 0.51, 0.25), 2)
    rows: list[list[Any]] = []
    for noise in NOISES:
        for threshold in thresholds:
            release = _test(noise, float(threshold))
            harmful, helpful = release.acceptance(256)
            cost = float(rdp(_plan(release), [_ORDER])[0])
            rows.append(
                [
                    *(noise, float(threshold), 100 * helpful, 100 * harmful),
                    *(100 * (helpful - harmful), helpful / harmful),
                    1e4 * cost * 2 / (helpful + harmful),
                ]
            )

    def draw(panels: Any) -> None:
        for axes, noise in zip(panels, NOISES, strict=True):
            at_noise = [row for row in rows if row[0] == noise]
            for column, name in ((2, "helpful"), (3, "harmful"), (4, "difference")):
                axes.plot([row[1] for row in at_noise], [row[column] for row in at_noise], label=name)
            axes.axvline(-1, color="0.4", ls="--", lw=1)
            axes.set(
                xlabel="threshold over the clip", ylabel="accepted, %", title=f"test noise {noise:g}"
            )
        panels[0].legend(fontsize=8)

    best = {
        noise: max((row for row in rows if row[0] == noise), key=lambda row: float(row[4]))[1]
        for noise in NOISES
    }
    return Figure(
        name="dpsur-fig6",
        title="Acceptance by threshold",
        header=[
            *("test noise", "threshold", "helpful %", "harmful %", "difference", "ratio"),
            "cost of an update (1e-4, order 8)",
        ],
        rows=rows,
        draw=draw,
        panels=3,
        notes=[
            f"the difference is largest at {', '.join(f'{best[noise]:g}' for noise in NOISES)} for the "
            "three noises; the paper says -1",
            "cost: sound Rényi divergence of a trial (B 2048, noise 4, test batch 256) over the share "
            "of trials accepted if half of them are helpful",
        ],
    )


def _test(noise: float, threshold: float) -> Selective:
    return Selective(rate=256 / _RECORDS, clip=0.001, multiplier=noise, threshold=threshold, test="mean")


def _plan(release: Selective) -> Plan:
    return Plan(
        sampling=Poisson(rate=2048 / _RECORDS),
        clipping=L2(norm=0.1),
        noise=Gaussian(multiplier=4.0),
        release=release,
    )
