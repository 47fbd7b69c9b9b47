"""Which clipping would pay for vectors of a given geometry, with the numbers behind it."""

from typing import Any

from hush.gradients.geometry import Geometry, best_split

WORTH = 1.1
"""How many times less variance is called a gain."""
FEW, MANY = 2, 100
"""Below FEW entries at the cap twice sampling gains nothing; above MANY they add nothing to its gain.

A judgement, not a bound: `hush compare` answers for a budget, against tight plain DP-SGD.
"""


def numbers(found: Geometry) -> dict[str, Any]:
    """What the advice rests on, as plain data."""
    best = best_split(found)
    return {
        "dimension": found.dimension,
        "records": len(found.largest),
        "linf_cap": found.cap,
        "entries_at_cap": found.entries,
        "split": {
            "ranks": list(best.ranks),
            "norms": list(best.norms),
            "variance_ratio": best.ratio,
            "kept_norm": best.kept,
            "gain": best.gain,
        },
    }


def advice(found: Geometry) -> list[str]:
    """Sentences that say what would pay and why, and how to find out how much."""
    best = best_split(found)
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
    if found.entries < FEW:
        lines.append(
            f"an l-infinity cap does not pay: a cap of {found.cap:.3g} is needed to leave 99% of the "
            f"records alone, and d0 = {found.entries:.3g} entries are too few for coordinate sampling"
        )
    else:
        share = "part" if found.entries < 10 else "most" if found.entries < MANY else "all"
        lines.append(
            f"an l-infinity cap of {found.cap:.3g} costs little: 99% of the records stay whole. With d0 "
            f"= {found.entries:.4g}, coordinate sampling gains {share} of what it can at a given budget"
        )
    lines.append(
        f"how much, for your budget: hush compare --records N --batch-size B --steps T --epsilon E "
        f"--dimension {found.dimension} --linf-ratio {min(1.0, found.cap):.3g} "
        f"--subspaces {first}:{c1:.3g},{rest}:{c2:.3g}"
    )
    return lines
