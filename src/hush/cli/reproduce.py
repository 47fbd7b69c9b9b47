"""`hush reproduce`: figures and tables of the papers, ours beside theirs."""

from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from hush.core.errors import InvalidValue


def reproduce(
    names: Annotated[list[str], typer.Argument(help="Which ones; `list` shows their names.")],
    out: Annotated[Path, typer.Option(help="Where CSV and PNG files go.")] = Path("runs/reproduce"),
    model: Annotated[
        str | None, typer.Option(help="Network in place of the recipe's own, where it has one.")
    ] = None,
) -> None:
    """Compute a paper's figure or table again; write a CSV and a plot, print the table.

    Example: hush reproduce gg-dimension
    """
    from hush.reproduce.recipes import RECIPES

    if names == ["list"]:
        print("\n".join(RECIPES))
        return
    for name in names:
        if name not in RECIPES:
            raise InvalidValue(f"{name!r} is no recipe; choose from {', '.join(RECIPES)}.")
        if model is not None and "model" not in signature(RECIPES[name]).parameters:
            raise InvalidValue(f"{name} has no choice of network. Leave out --model.")
    for name in names:
        figure = RECIPES[name]() if model is None else RECIPES[name](model=model)
        files = figure.save(out)
        print(f"{name}: {figure.title}\n\n{figure.table().markdown()}\n")
        for note in figure.notes:
            print(f"  {note}")
        print(f"  written: {', '.join(map(str, files))}\n")
