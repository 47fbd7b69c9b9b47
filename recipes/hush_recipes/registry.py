"""Every recipe by its name: `gg_fig2` in a module of `hush_recipes.gg` is the recipe gg-fig2."""

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pkgutil import walk_packages

import hush_recipes
from hush_recipes.figure import Figure

Recipe = Callable[..., Figure]


def variant(recipe: Recipe, summary: str, *arguments: object) -> Recipe:
    """A recipe with its first arguments fixed, and a line of its own in the list of recipes."""
    fixed = partial(recipe, *arguments)
    fixed.__doc__ = summary
    return fixed


def _order(name: str) -> list[tuple[str, int]]:
    """Sorts fig10 behind fig9."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", name)]


def all_recipes() -> dict[str, Recipe]:
    """Recipes by name, in the order of papers, figures and tables."""
    by_name = {}
    for module in walk_packages(hush_recipes.__path__, f"{hush_recipes.__name__}."):
        paper = module.name.split(".")[1]
        for name, value in vars(import_module(module.name)).items():
            if name.startswith(f"{paper}_") and callable(value):
                by_name[name.replace("_", "-")] = value
    return {name: by_name[name] for name in sorted(by_name, key=_order)}
