"""Attributes of a module whose contents change only with the object in their place.

Most are, and a snapshot in every step need not read them again.
"""

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from hush.gradients.checks.attribute_contents import AttributeReader, Content, is_fixed

Attribute = tuple[int, str]
"""A module, by its number, and the name of an attribute or buffer."""

NOT_WATCHED = frozenset(nn.Module().__dict__)
"""Parameters (which the tape covers), hooks, and the training flag; buffers are watched one by one."""


@dataclass(frozen=True, eq=False)
class FixedAttributes:
    """Attributes of a module that are numbers, names or functions, with their contents.

    Most attributes are, and are the very objects that they were in the snapshot before.
    """

    names: tuple[str, ...]
    """All attributes of the module, also those that are not watched."""
    fixed: tuple[str, ...]
    values: tuple[Any, ...]
    contents: dict[Attribute, Content]
    others: tuple[str, ...]
    """Watched attributes that are read in every snapshot: tensors, containers and objects."""

    def current(self, attributes: dict[str, Any]) -> bool:
        """Whether a module that has these attributes now has the same contents in the fixed ones."""
        return self.names == tuple(attributes) and all(
            map(is_, self.values, [attributes[name] for name in self.fixed])
        )


def fixed_attributes(
    number: int, attributes: dict[str, Any], reader: AttributeReader
) -> FixedAttributes:
    """Those of a module's attributes that are fixed, as they are now.

    Args:
        number: of the module.
        attributes: its dictionary.
        reader: of contents.
    """
    watched = {name: value for name, value in attributes.items() if name not in NOT_WATCHED}
    fixed = {name: value for name, value in watched.items() if is_fixed(value)}
    return FixedAttributes(
        tuple(attributes),
        tuple(fixed),
        tuple(fixed.values()),
        {(number, name): reader.content(value) for name, value in fixed.items()},
        tuple(name for name in watched if name not in fixed),
    )
