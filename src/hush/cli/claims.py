"""`hush claims`: published statements that do not hold, and what is charged instead."""

from dataclasses import asdict

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
