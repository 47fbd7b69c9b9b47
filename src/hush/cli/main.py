"""`hush`: the command line, and its two commands of a few lines, `claims` and `demo`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hush import __version__
from hush.cli.compare import compare, probe, tune_selective
from hush.cli.options import AsJson
from hush.cli.output import print_json, run_app
from hush.cli.questions import account, calibrate, explain
from hush.cli.run_commands import audit, pate, report
from hush.cli.train import train, tune
from hush.core.errors import Unsupported
from hush.core.extensions import INSTALL, extensions

app = typer.Typer(
    name="hush",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def hush(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Differential privacy for PyTorch, every epsilon proved."""
    if version:
        print(__version__)
        raise typer.Exit


def claims(as_json: AsJson = False) -> None:
    """Published privacy statements that do not hold, with the error and the charge of hush."""
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
    out: Annotated[Path, typer.Option(help="Folder for the runs and their reports.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train without privacy and with epsilon 1, 3 and 8; write a table, a plot and reports."""
    from hush.report.demo import demo as run_demo

    run_demo(out)


def reproduce() -> None:
    """Compute a paper's table or figure again; `pip install ./recipes` in a clone of hush adds them."""
    raise Unsupported(INSTALL)


for command in (
    *(train, tune, account, explain, calibrate, compare, tune_selective),
    *(report, claims, audit, probe, pate, demo),
):
    app.command()(command)
_COMMANDS = extensions("commands")
for name, point in _COMMANDS.items():
    app.command(name)(point.load())
if "reproduce" not in _COMMANDS:
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(reproduce)


def main() -> None:
    """Run the command line."""
    run_app(app)
