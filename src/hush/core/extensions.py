"""Data sets, features, networks and commands that other packages register as entry points.

| group | entry point |
|---|---|
| `hush.datasets` | function from a data directory (or None) to a `hush.data.Dataset` |
| `hush.features` | function `(dataset, *, device, cache, directory)` to a `hush.data.Dataset` |
| `hush.models` | `hush.models.Network` |
| `hush.commands` | typer command of `hush` |
"""

from importlib.metadata import EntryPoint, entry_points

INSTALL = (
    "The papers' data sets, networks and results are in a separate package: run "
    "`pip install ./recipes` in a clone of hush."
)


def extensions(kind: str) -> dict[str, EntryPoint]:
    """Entry points of a kind by name. Loading an entry point imports its module."""
    return {point.name: point for point in sorted(entry_points(group=f"hush.{kind}"))}


def choices(kind: str, *own: str) -> str:
    """List of hush's own names and of a group of entry points, with an install hint if it is empty."""
    others = extensions(kind)
    names = ", ".join((*own, *others)) or "none installed"
    return f"{names}." if others else f"{names}. {INSTALL}"
