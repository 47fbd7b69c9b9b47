"""`hush`: the command line, including commands of other installed packages."""

from typing import Annotated

import typer

from hush.cli.audit import audit
from hush.cli.doctor import doctor, versions
from hush.cli.output import run_app
from hush.cli.own_data import predict, schema
from hush.cli.questions import account, calibrate, compare, explain, plan, plans
from hush.cli.run_commands import pate, report
from hush.cli.train import train, tune
from hush.core.errors import Unsupported
from hush.core.extensions import INSTALL, extensions

app = typer.Typer(
    name="hush",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def hush(
    version: Annotated[bool, typer.Option("--version", help="Print the versions.")] = False,
) -> None:
    """Differential privacy for PyTorch, with written proofs."""
    if version:
        print(*versions(), sep="\n")
        raise typer.Exit


def reproduce() -> None:
    """(not installed: run `pip install ./recipes` in a clone of hush)"""
    raise Unsupported(INSTALL)


_TRAINING = (train, tune, predict, schema)
_QUESTIONS = (account, explain, calibrate, plan, compare, plans)
for command in (*_TRAINING, *_QUESTIONS, report, audit, pate, doctor):
    app.command()(command)
_COMMANDS = extensions("commands")
for name, point in _COMMANDS.items():
    app.command(name)(point.load())
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}
for name in sorted({"claims", "demo", "reproduce", "tune-selective"} - _COMMANDS.keys()):
    app.command(name, context_settings=_ANY)(reproduce)


def main() -> None:
    run_app(app)
