"""`hush demo`: the bundled digits with and without privacy."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/demo"),
) -> None:
    """Train without privacy and with epsilon 1, 3 and 8; write a table, a plot and a page."""
    from hush.report.demo import demo as run_demo

    run_demo(out)
