"""The page of errata, from the claims of the recipes; `python -m tests.recipes.errata` writes it."""

from itertools import groupby
from pathlib import Path

from hush_recipes.claims import CLAIMS

PAGE = Path(__file__).parents[2] / "docs" / "guarantees" / "errata.md"
_INTRODUCTION = """# Errata

This page lists published statements that do not hold as printed, each with a case in which it fails,
and an approximation that is not a bound. A test computes both numbers of each case again. The
[bibliography](bibliography.md) has the papers. A command of the recipes (`pip install ./recipes`) prints
the list:

    hush claims
"""
_AUTHORS = {
    "Bounded-support Gaussian": "Hu et al., 2024",
    "DPSUR": "Fu et al., 2024",
    "Generalized Gaussian": "arXiv 2506.12553, 2025",
}


def markdown() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for paper, claims in groupby(CLAIMS, key=lambda claim: claim.source.partition(",")[0]):
        parts.append(f"\n## {paper}\n")
        if paper in _AUTHORS:
            parts.append(f"\nPaper: {_AUTHORS[paper]}.\n")
        for claim in claims:
            place = claim.source.partition(", ")[2]
            statement = f"{place}: {claim.statement}" if place else claim.statement
            true = f"{'at least ' * claim.at_least}{claim.true:.4g}"
            parts.append(
                f"\n**{statement}.**\n\n"
                f"| | |\n|---|---|\n| case | {claim.case} |\n| as printed | {claim.printed:.4g} |\n"
                f"| true value | {true} |\n| hush charges | {claim.charged} |\n"
                f"| test | `{claim.test}` |\n"
            )
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(markdown())
