"""`hush`: the command line, assembled from one file a command."""

import sys
import warnings
from typing import Annotated

import typer

from hush import __version__
from hush.cli.account import account
from hush.cli.audit import audit
from hush.cli.calibrate import calibrate
from hush.cli.claims import claims
from hush.cli.compare import compare
from hush.cli.demo import demo
from hush.cli.output import print_error, print_warning
from hush.cli.pate import pate
from hush.cli.probe import probe
from hush.cli.reproduce import reproduce
from hush.cli.train import train
from hush.cli.tune_selective import tune_selective
from hush.core.errors import HushError

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


for command in (
    *(train, account, calibrate, compare, tune_selective),
    *(claims, audit, probe, pate, demo, reproduce),
):
    app.command()(command)


def main() -> None:
    """Run the command line; errors of hush and warnings are printed as a line, without a traceback."""
    warnings.showwarning = print_warning
    try:
        app()
    except (HushError, OSError) as error:
        print_error(error)
        sys.exit(2)
    except RecursionError:
        print_error("a file is nested too deeply to be read, as no file that hush wrote is: damaged.")
        sys.exit(2)
