"""The five panels of Figures 2 and 3 of the twice-sampling paper, from a geometry."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hush.gradients.geometry import Geometry
from hush.report.advice import advice
from hush.report.table import Table
from recipes.figure import Figure

_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_POINTS = 200


def geometry_figure(name: str, title: str, found: Geometry, notes: Sequence[str]) -> Figure:
    """Variation, sparsification, rank, principal norms and largest entries: a panel each."""
    ranks = np.unique(np.geomspace(1, found.principal.shape[1], _POINTS).round().astype(int))
    means, spread = found.principal.mean(0)[ranks - 1], found.principal.std(0)[ranks - 1]
    left = found.residual.mean(0)[ranks - 1]
    levels = np.linspace(0, 1, _POINTS + 1)
    finite = found.variation[np.isfinite(found.variation)]
    variation = np.quantile(finite, levels) if len(finite) else np.full(len(levels), np.inf)
    largest = np.quantile(found.largest, levels)

    def draw(panels: Any) -> None:
        one, two, three, four, five = panels
        one.semilogy(levels, variation)
        one.set(title="(a) coefficient of variation", xlabel="quantile over the coordinates")
        two.plot(100 * found.shares, found.dropped)
        two.set(
            title="(b) residual after sparsification", xlabel="% of coordinates kept", ylim=(0, 1.05)
        )
        three.plot(ranks, left)
        three.set(title="(c) residual after projection", xlabel="rank", ylim=(0, 1.05))
        (line,) = four.plot(ranks, means)
        four.fill_between(ranks, means - spread, means + spread, alpha=0.3, color=line.get_color())
        four.set(title="(d) principal norm, mean ± deviation", xlabel="rank", ylim=(0, 1.05))
        five.plot(levels, largest)
        five.axhline(found.cap, color="0.6", linewidth=1, label=f"99% below {found.cap:.3g}")
        five.legend(frameon=False)
        five.set(title="(e) largest entry", xlabel="quantile over the records", ylim=(0, None))

    rows: list[list[object]] = [
        *(["variation", *pair, None] for pair in zip(levels, variation, strict=True)),
        *(["sparse residual", *pair, None] for pair in zip(found.shares, found.dropped, strict=True)),
        *(["residual", *pair, None] for pair in zip(ranks, left, strict=True)),
        *(["principal", *three] for three in zip(ranks, means, spread, strict=True)),
        *(["largest entry", *pair, None] for pair in zip(levels, largest, strict=True)),
    ]
    shown = [rank for rank in (1, 10, 30, 100, 300, 1000) if rank <= ranks[-1]]
    summary = [
        *(
            [f"norm within rank {rank}, outside", f"{inside.mean():.3f} ± {inside.std():.3f}, {out:.3f}"]
            for rank in shown
            for inside, out in [(found.principal[:, rank - 1], found.residual[:, rank - 1].mean())]
        ),
        *(
            [f"residual with {share:.0%} of the coordinates kept", f"{value:.3f}"]
            for share, value in zip(found.shares[4::8], found.dropped[4::8], strict=True)
        ),
        *(
            [
                f"largest entry, {level:.0%} of the records below",
                f"{np.quantile(found.largest, level):.4f}",
            ]
            for level in _LEVELS
        ),
        ["coefficient of variation, median", f"{np.quantile(variation, 0.5):.2f}"],
    ]
    return Figure(
        name=name,
        title=title,
        header=["panel", "x", "value", "deviation"],
        rows=rows,
        draw=draw,
        panels=5,
        summary=Table(header=["records of length 1", "measured"], rows=summary),
        notes=[*notes, *advice(found)],
    )
