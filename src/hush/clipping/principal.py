"""How to find the directions that carry most of the gradients."""

from dataclasses import dataclass

from hush.core.number import check_count
from hush.core.value import Value


@dataclass(frozen=True, kw_only=True)
class Principal(Value):
    """Principal directions of public gradients, found by power iteration in groups of parameters.

    They are found anew every `every` steps, by `iterations` rounds; the parameters are split into
    `groups`, each with directions of its own, which takes so many times less memory.
    """

    groups: int = 1
    every: int = 100
    iterations: int = 2

    def __post_init__(self) -> None:
        for name in ("groups", "every", "iterations"):
            why = "public gradients are looked at that often, or in that many parts"
            object.__setattr__(self, name, check_count(name, getattr(self, name), why, at_least=1))
