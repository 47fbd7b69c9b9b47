"""`hush claims`: published statements that do not hold, and what is charged instead."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hush.cli.options import AsJson
from hush.cli.output import print_json


def claims(as_json: AsJson = False) -> None:
    """Published privacy statements that fail: where, by how much, and what hush charges instead."""
    from hush.accounting.claims import CLAIMS

    if as_json:
        print_json({"claims": [asdict(claim) for claim in CLAIMS]})
        return
    for claim in CLAIMS:
        print(
            f"{claim.source}: {claim.statement}\n"
            f"  case     {claim.case}\n"
            f"  printed  {claim.printed:g}\n"
            f"  true     {claim.true:g}\n"
            f"  charged  {claim.charged}\n"
            f"  test     tests/accounting/{claim.test}\n"
        )


def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("runs/demo"),
) -> None:
    """Train without privacy and with epsilon 1, 3 and 8; write a table, a plot and a page."""
    from hush.report.demo import demo as run_demo

    run_demo(out)
