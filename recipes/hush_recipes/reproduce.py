"""`hush reproduce`: figures and tables of papers, beside the printed numbers."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from inspect import getdoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hush.cli.options import Quiet, device_named, device_of
from hush.cli.output import print_error
from hush.core.atomic_files import check_folder
from hush.core.errors import InvalidValue
from hush.core.value import Range, check_count

if TYPE_CHECKING:
    from hush_recipes.figure import Figure

_BETAS = Range(
    at_least=1, why="below 1 the density is not log-concave, and no bound is proved of it", example=1.5
)
_EPSILONS = Range(above=0, why="a budget of zero buys no information about the data", example=3.0)
_LEARNING_RATES = Range(above=0, why="nothing is learned without a step downhill", example=0.3)


def _at_least_one(parameter: typer.CallbackParam, value: int | None) -> int | None:
    """Callback of an option that counts. A range of typer's would be printed in the help."""
    if value is None:
        return None
    return check_count(parameter.opts[0], value, "without one nothing is computed", 1, example=1)


_count = partial(typer.Option, callback=_at_least_one)


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Recipes to run; without a name, list all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for CSV and PNG files.")] = Path("runs/reproduce"),
    model: Annotated[str | None, typer.Option(help="Network, instead of the recipe's own.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set, instead of the recipe's own.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:N; by default the recipe's own.", callback=device_named),
    ] = None,
    betas: Annotated[str | None, typer.Option(help="Exponents of the noise, e.g. 1,2,3.")] = None,
    epsilons: Annotated[str | None, typer.Option(help="Values of epsilon, e.g. 1,3.")] = None,
    seeds: Annotated[int | None, _count(help="Number of runs of each kind.")] = None,
    epochs: Annotated[int | None, _count(help="Number of passes over the data.")] = None,
    steps: Annotated[int | None, _count(help="Number of training steps.")] = None,
    learning_rates: Annotated[
        str | None, typer.Option(help="Candidate learning rates, e.g. 0.3,1.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Methods to run: names or parts of names, separated by ;."),
    ] = None,
    processes: Annotated[int | None, _count(help="Number of runs at once.")] = None,
    quiet: Quiet = False,
) -> None:
    """Compute a paper's figure or table again; write a CSV and a plot, print the table.

    Without a name, list the recipes. Recipes marked "CPU:" run a shortened version on a CPU, and all
    cells with --device cuda. Recipes that train accept --epochs, --seeds, --epsilons and others.

    Example: hush reproduce gg-dimension
    """
    from hush.training.progress import Progress
    from hush_recipes.registry import all_recipes

    recipes = all_recipes()
    if not names:
        width = max(map(len, recipes))
        for name, recipe in recipes.items():
            print(f"{name:{width}}  {(getdoc(recipe) or '').splitlines()[0]}")
        return
    for name in names:
        if name not in recipes:
            near = get_close_matches(name, recipes, 3) or recipes
            raise InvalidValue(f"{name!r} is no recipe; choose from {', '.join(near)}.")
    choices = {
        "model": model,
        "data": data,
        "device": device,
        "betas": _numbers("--betas", betas, _BETAS),
        "epsilons": _numbers("--epsilons", epsilons, _EPSILONS),
        "seeds": seeds,
        "epochs": epochs,
        "steps": steps,
        "learning_rates": _numbers("--learning-rates", learning_rates, _LEARNING_RATES),
        "only": only,
        "processes": processes,
    }
    chosen = {name: value for name, value in choices.items() if value is not None}
    for name in names:
        unknown = [choice for choice in chosen if choice not in signature(recipes[name]).parameters]
        if unknown:
            raise InvalidValue(f"{name} has no choice of {', '.join(unknown)}: leave that out.")
        _check_device(name, recipes[name], device)
    from hush_recipes.workers import check_cache

    check_folder("--out", out)
    check_cache()
    for name in names:
        try:
            with Progress(f"computing {name}", visible=not quiet):
                figure = recipes[name](**chosen)
        except KeyboardInterrupt:
            print_error(f"{name} was stopped. {_kept(recipes[name])}")
            raise
        _show(name, figure, out)


def _show(name: str, figure: "Figure", out: Path) -> None:
    """Print a figure's table, then write its files: what fails there loses no numbers."""
    print(f"{name}: {figure.title}\n\n{figure.table().markdown()}\n")
    for note in figure.notes:
        print(f"  {note}")
    try:
        files = figure.save(out)
    except OSError as error:
        raise InvalidValue(
            f"--out={out}: {error.filename or figure.name} cannot be written ({error.strerror}): the "
            "table above is all that is left of the work. Copy it from there; the next time permit the "
            "file, make room, or pass another --out."
        ) from error
    print(f"  written: {', '.join(map(str, files))}\n")


def _kept(recipe: Callable[..., Any]) -> str:
    """What is left of a recipe that was stopped: results of the jobs that it gave to its processes."""
    from hush_recipes.workers import CACHE

    if "processes" not in signature(recipe).parameters:
        return "Nothing of it is kept."
    if folder := os.environ.get(CACHE):
        return f"Its runs that ended are kept in {CACHE}={folder}: the same command does the others."
    return (
        f"Nothing of it is kept. Set the environment variable {CACHE} to a folder, and runs that ended "
        "are kept there for the next time."
    )


def _check_device(name: str, recipe: Callable[..., Any], device: str | None) -> None:
    """Raise if the device that is asked for, or else the recipe's own, is not there."""
    own = signature(recipe).parameters.get("device")
    if own is None:
        return
    try:
        device_of(device or own.default)
    except InvalidValue as error:
        raise InvalidValue(f"{name}: {error}") from error


def _numbers(option: str, text: str | None, allowed: Range) -> tuple[float, ...] | None:
    """The numbers of a comma-separated list, each within its range."""
    if text is None:
        return None
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InvalidValue(
            f"{option} {text} must be numbers with commas between them, as 1,2.5."
        ) from None
    return tuple(allowed.check(option, number) for number in numbers)
