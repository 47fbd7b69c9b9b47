"""`hush`: the command line, and the commands `demo` and `reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from hush import __version__
from hush.cli.audit import audit
from hush.cli.options import about
from hush.cli.output import run_app
from hush.cli.questions import account, calibrate, compare, explain, plans
from hush.cli.run_commands import pate, report
from hush.cli.train import train, tune
from hush.core.atomic_files import check_folder
from hush.core.errors import Unsupported
from hush.core.extensions import INSTALL, extensions

app = typer.Typer(
    name="hush", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback(invoke_without_command=True)
def hush(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Differential privacy for PyTorch, every epsilon proved."""
    if version:
        print(__version__)
        raise typer.Exit


def demo(
    out: Annotated[Path, about("Folder for the runs and their reports.")] = Path("runs/demo"),
) -> None:
    """Run the methods of four papers on bundled data at epsilon 3: table, figure and report.

    Example: hush demo --out runs/demo
    """
    check_folder("--out", out)
    from hush.report.demo import demo as run_demo

    run_demo(out)


def reproduce() -> None:
    """A command about published methods; `pip install ./recipes` in a clone of hush adds it."""
    raise Unsupported(INSTALL)


for command in (train, tune, account, explain, calibrate, compare, plans, report, audit, pate, demo):
    app.command()(command)
_COMMANDS = extensions("commands")
for name, point in _COMMANDS.items():
    app.command(name)(point.load())
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}
for name in sorted({"claims", "reproduce", "tune-selective"} - _COMMANDS.keys()):
    app.command(name, context_settings=_ANY)(reproduce)


def main() -> None:
    run_app(app)
