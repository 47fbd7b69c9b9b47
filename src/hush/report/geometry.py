"""Geometry of gradients as numbers and text, and which clipping fits it."""

from typing import Any

import numpy as np

from hush.gradients.geometry import Geometry, best_subspace_split
from hush.report.text import Table

_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
WORTH = 1.1
"""Least reduction of the variance, as a factor, for which a split is recommended."""
FEW, MANY = 2, 100
"""Entries at the cap below which twice sampling gains nothing, and above which it gains no more.

A rule of thumb: `hush compare` computes the gain for a budget.
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
    """Recommended clipping, the reason, and the command that computes the gain for a budget."""
    best = best_subspace_split(geometry)
    (first, rest), (c1, c2) = best.ranks, best.norms
    worth = best.gain >= WORTH
    subspaces = (
        f"subspaces {'pay' if worth else 'do not pay'}: {first} principal directions have norm "
        f"{c1:.3g}, the other {rest} have {c2:.3g}; shaped noise has {best.ratio:.3g} of the variance "
        f"of equal noise, and clipping at the means keeps {best.kept:.1%} of the norm: {best.gain:.3g} "
        "times less variance"
    )
    if worth:
        subspaces += (
            ". Shaped noise is larger along the principal directions, and in training runs it did worse "
            "than equal noise (docs/results/twice-sampling.md). Try both on public records"
        )
    if geometry.entries < FEW:
        cap = (
            f"an l-infinity cap does not pay: 99% of the records need a cap of {geometry.cap:.3g}, and "
            f"d0 = {geometry.entries:.3g} entries are too few for coordinate sampling"
        )
    else:
        share = "part" if geometry.entries < 10 else "most" if geometry.entries < MANY else "all"
        cap = (
            f"an l-infinity cap of {geometry.cap:.3g} leaves 99% of the records unchanged. With d0 = "
            f"{geometry.entries:.4g}, coordinate sampling has {share} of its possible gain"
        )
    command = (
        "the gain for a budget: hush compare --records N --batch-size B --steps T --epsilon E "
        f"--dimension {geometry.dimension} --linf-ratio {min(1.0, geometry.cap):.3g} "
        f"--subspaces {first}:{c1:.3g},{rest}:{c2:.3g}"
    )
    return [subspaces, cap, command]


def summary_table(geometry: Geometry) -> Table:
    """Residuals, principal norms and largest entries of the records at a few places."""
    ranks = [rank for rank in (1, 10, 30, 100, 300, 1000) if rank <= geometry.principal.shape[1]]
    finite = geometry.variation[np.isfinite(geometry.variation)]
    variation = np.quantile(finite, 0.5) if len(finite) else np.inf
    rows = [
        *(
            [f"norm within rank {rank}, outside", f"{inside.mean():.3f} ± {inside.std():.3f}, {out:.3f}"]
            for rank in ranks
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
        ["coefficient of variation, median", f"{variation:.2f}"],
    ]
    return Table(header=["records of length 1", "measured"], rows=rows)
