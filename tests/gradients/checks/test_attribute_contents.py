"""What an attribute holds, told apart by its contents and put back."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hush.gradients.checks.attribute_contents import AttributeReader, restorer


class Slots:
    __slots__ = ("value",)
    value: int


class SlotBesideDictionary(Slots):
    """Has a dictionary as well."""


class Named(dict[str, int]):
    """A dictionary with attributes."""

    value = 0


def slotted(kind: type[Slots]) -> Any:
    made = kind()
    made.value = 0
    return made


def set_value(held: Any) -> None:
    held.value = 1


def object_also_within_another() -> Any:
    inner = SimpleNamespace(value=0)
    return [SimpleNamespace(first=inner), inner]


def set_inner(held: Any) -> None:
    held[1].value = 1


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array": (lambda: np.zeros(3), lambda held: held.fill(1)),
    "array of objects": (
        lambda: np.array([[], None], dtype=object),
        lambda held: held.__setitem__(1, 5),
    ),
    "bytearray": (lambda: bytearray(b"a"), lambda held: held.extend(b"b")),
    "set": (lambda: {1}, lambda held: held.add(2)),
    "list in a tuple": (lambda: ([1], 2), lambda held: held[0].append(3)),
    "slots": (lambda: slotted(Slots), set_value),
    "slots and dictionary": (lambda: slotted(SlotBesideDictionary), set_value),
    "attribute of a dictionary": (lambda: Named(a=1), set_value),
    "sign of a zero": (lambda: torch.zeros(2), lambda held: held.mul_(-1)),
    "parameter of no module": (
        lambda: [nn.Parameter(torch.zeros(2))],
        lambda held: held[0].data.fill_(1),
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), lambda held: held._values().fill_(2)),
    "object within another": (object_also_within_another, set_inner),
    "long list": (lambda: list(range(5000)), lambda held: held.__setitem__(4000, object())),
}
NOT_PUT_BACK = {"attribute of a dictionary", "parameter of no module", "sparse"}
"""What a pass changes there is refused, or restored by nobody: none is told apart after that."""


@pytest.mark.parametrize("name", KINDS)
def test_a_change_is_noticed_and_put_back(name: str) -> None:
    make, change = KINDS[name]
    held = make()

    def contents() -> Any:
        return AttributeReader(4096, False, set()).content(held)

    before, put_back = contents(), restorer(held)
    assert contents() == before
    change(held)
    assert contents() != before
    if name not in NOT_PUT_BACK:
        assert put_back() is held
        assert contents() == before
