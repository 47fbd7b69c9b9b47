"""Rank of pages in the search: guides before measurements, and both before proofs."""

from typing import Any

BOOSTS = {"guarantees/": 0.1, "results/": 0.3, "reference/": 0.5, "CHANGELOG": 0.2, "CONTRIBUTING": 0.5}
"""Factor of a page's score by the beginning of its name; other pages have 2."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as it is, with its rank for the search plugin."""
    page.meta["search"] = {"boost": boost(page.file.src_uri)}
    return markdown


def boost(name: str) -> float:
    """Factor of a page's score."""
    return next((factor for begin, factor in BOOSTS.items() if name.startswith(begin)), 2.0)
