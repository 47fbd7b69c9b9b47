"""Geometry of gradients as a figure, and which clipping rule would pay for it.

The five panels are those of Figures 2 and 3 of the twice-sampling paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hush.gradients.geometry import Geometry, best_subspace_split
from hush.report.figure import Figure, Table

_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_POINTS = 200
WORTH = 1.1
"""Reduction of the variance, as a factor, from which on a split is called a gain."""
FEW, MANY = 2, 100
"""Below FEW entries at the cap twice sampling gains nothing; above MANY they add nothing to its gain.

A judgement, not a bound: `hush compare` answers for a budget, against tight plain DP-SGD.
"""


def numbers(geometry: Geometry) -> dict[str, Any]:
    """The numbers behind the advice, as plain data."""
    best = best_subspace_split(geometry)
    return {
        "dimension": geometry.dimension,
        "records": len(geometry.largest),
        "linf_cap": geometry.cap,
        "entries_at_cap": geometry.entries,
        "split": {
            "ranks": list(best.ranks),
            "norms": list(best.norms),
            "variance_ratio": best.ratio,
            "kept_norm": best.kept,
            "gain": best.gain,
        },
    }


def advice(geometry: Geometry) -> list[str]:
    """Sentences: which clipping would pay, why, and the command that says how much for a budget."""
    best = best_subspace_split(geometry)
    (first, rest), (c1, c2) = best.ranks, best.norms
    verdict = "pay" if best.gain >= WORTH else "do not pay"
    lines = [
        f"subspaces {verdict}: {first} principal directions hold norm {c1:.3g}, the other {rest} hold "
        f"{c2:.3g}; noise shaped to them has {best.ratio:.3g} of the variance of equal noise, and "
        f"clipping each at its mean keeps {best.kept:.1%} of the norm: {best.gain:.3g} times less "
        "variance at equal length"
    ]
    if best.gain >= WORTH:
        lines[0] += (
            ". Less in all is not less where it matters: shaped noise has more along the principal "
            "directions, and in our training runs it did worse than equal noise "
            "(docs/results/twice-sampling.md). Try both on public records"
        )
    if geometry.entries < FEW:
        lines.append(
            f"an l-infinity cap does not pay: a cap of {geometry.cap:.3g} is needed to leave 99% of the "
            f"records alone, and d0 = {geometry.entries:.3g} entries are too few for coordinate sampling"
        )
    else:
        share = "part" if geometry.entries < 10 else "most" if geometry.entries < MANY else "all"
        lines.append(
            f"an l-infinity cap of {geometry.cap:.3g} costs little: 99% of the records stay whole. With "
            f"d0 = {geometry.entries:.4g}, coordinate sampling gains {share} of what it can at a given "
            "budget"
        )
    lines.append(
        f"how much, for your budget: hush compare --records N --batch-size B --steps T --epsilon E "
        f"--dimension {geometry.dimension} --linf-ratio {min(1.0, geometry.cap):.3g} "
        f"--subspaces {first}:{c1:.3g},{rest}:{c2:.3g}"
    )
    return lines


def geometry_figure(name: str, title: str, geometry: Geometry, notes: Sequence[str]) -> Figure:
    """Variation, sparsification, rank, principal norms and largest entries: a panel each."""
    ranks = np.unique(np.geomspace(1, geometry.principal.shape[1], _POINTS).round().astype(int))
    means, spread = geometry.principal.mean(0)[ranks - 1], geometry.principal.std(0)[ranks - 1]
    residual = geometry.residual.mean(0)[ranks - 1]
    levels = np.linspace(0, 1, _POINTS + 1)
    finite = geometry.variation[np.isfinite(geometry.variation)]
    variation = np.quantile(finite, levels) if len(finite) else np.full(len(levels), np.inf)
    largest = np.quantile(geometry.largest, levels)

    def draw(panels: Any) -> None:
        variation_axes, sparse_axes, residual_axes, norm_axes, entry_axes = panels
        variation_axes.semilogy(levels, variation)
        variation_axes.set(title="(a) coefficient of variation", xlabel="quantile over the coordinates")
        sparse_axes.plot(100 * geometry.shares, geometry.dropped)
        sparse_axes.set(
            title="(b) residual after sparsification", xlabel="% of coordinates kept", ylim=(0, 1.05)
        )
        residual_axes.plot(ranks, residual)
        residual_axes.set(title="(c) residual after projection", xlabel="rank", ylim=(0, 1.05))
        (line,) = norm_axes.plot(ranks, means)
        norm_axes.fill_between(ranks, means - spread, means + spread, alpha=0.3, color=line.get_color())
        norm_axes.set(title="(d) principal norm, mean ± deviation", xlabel="rank", ylim=(0, 1.05))
        entry_axes.plot(levels, largest)
        entry_axes.axhline(geometry.cap, color="0.6", linewidth=1, label=f"99% below {geometry.cap:.3g}")
        entry_axes.legend(frameon=False)
        entry_axes.set(title="(e) largest entry", xlabel="quantile over the records", ylim=(0, None))

    rows: list[list[object]] = [
        *(["variation", *pair, None] for pair in zip(levels, variation, strict=True)),
        *(
            ["sparse residual", *pair, None]
            for pair in zip(geometry.shares, geometry.dropped, strict=True)
        ),
        *(["residual", *pair, None] for pair in zip(ranks, residual, strict=True)),
        *(["principal", *point] for point in zip(ranks, means, spread, strict=True)),
        *(["largest entry", *pair, None] for pair in zip(levels, largest, strict=True)),
    ]
    ranks_listed = [rank for rank in (1, 10, 30, 100, 300, 1000) if rank <= ranks[-1]]
    summary = [
        *(
            [f"norm within rank {rank}, outside", f"{inside.mean():.3f} ± {inside.std():.3f}, {out:.3f}"]
            for rank in ranks_listed
            for inside, out in [(geometry.principal[:, rank - 1], geometry.residual[:, rank - 1].mean())]
        ),
        *(
            [f"residual with {share:.0%} of the coordinates kept", f"{value:.3f}"]
            for share, value in zip(geometry.shares[4::8], geometry.dropped[4::8], strict=True)
        ),
        *(
            [
                f"largest entry, {level:.0%} of the records below",
                f"{np.quantile(geometry.largest, level):.4f}",
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
        notes=[*notes, *advice(geometry)],
    )
