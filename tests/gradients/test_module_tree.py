"""A walk that is kept is what torch's walk would give, whatever was done to the model since."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hush.gradients.models import ModuleTree


def model() -> Any:
    shared = nn.Linear(3, 3)
    first, second = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 3), shared)
    whole = nn.ModuleDict({"first": first, "second": second, "again": shared, "norm": nn.LayerNorm(3)})
    del whole["norm"].bias
    whole["norm"].register_parameter("absent", None)
    whole["norm"].register_module("nobody", None)
    second[0].bias = first[0].bias
    whole.register_parameter("scale", nn.Parameter(torch.ones(3)))
    return whole


def move_to_the_next_module(whole: Any) -> None:
    # between the same neighbours in the walk
    bias = whole["again"].bias
    del whole["again"].bias
    whole["norm"]._parameters = {"bias": bias, **whole["norm"]._parameters}


def rename(whole: Any) -> None:
    weight = whole["norm"].weight
    del whole["norm"].weight
    whole["norm"].gain = weight


def exchange(whole: Any) -> None:
    whole._modules["first"], whole._modules["second"] = whole["second"], whole["first"]


def reorder(whole: Any) -> None:
    whole._modules["first"] = whole._modules.pop("first")


CHANGES: list[Callable[[Any], object]] = [
    lambda whole: setattr(whole["first"][0], "weight", nn.Parameter(torch.ones(3, 3))),
    lambda whole: setattr(whole["first"][0], "bias", None),
    lambda whole: setattr(whole["norm"], "absent", nn.Parameter(torch.ones(2))),
    lambda whole: setattr(whole["norm"], "nobody", nn.Linear(2, 2)),
    lambda whole: whole["first"].__setitem__(1, nn.Linear(3, 3)),
    lambda whole: whole["second"].append(nn.Sequential(nn.Linear(3, 3))),
    lambda whole: whole.pop("second"),
    lambda whole: setattr(whole["second"][0], "bias", nn.Parameter(torch.ones(3))),
    lambda whole: nn.utils.parametrizations.weight_norm(whole["first"][0]),
    move_to_the_next_module,
    rename,
    exchange,
    reorder,
]


def names(pairs: Any) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in pairs]


def assert_as_torch_walks(tree: ModuleTree) -> None:
    assert names(tree.modules().items()) == names(tree.model.named_modules())
    assert names(tree.parameters().items()) == names(tree.model.named_parameters())
    trained = ((name, value) for name, value in tree.model.named_parameters() if value.requires_grad)
    assert names(tree.trainable().items()) == names(trained)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_structure_is_noticed(change: Callable[[Any], object]) -> None:
    whole = model()
    tree = ModuleTree(whole)
    assert_as_torch_walks(tree)
    before = names(whole.named_modules()), names(whole.named_parameters())
    change(whole)
    assert (names(whole.named_modules()), names(whole.named_parameters())) != before
    assert_as_torch_walks(tree)


def test_a_parameter_that_is_frozen_is_not_trainable_and_back() -> None:
    whole = model()
    tree = ModuleTree(whole)
    count = len(tree.trainable())
    whole["first"].requires_grad_(False)
    assert len(tree.trainable()) == count - 2
    assert_as_torch_walks(tree)
    whole["first"].requires_grad_(True)
    assert len(tree.trainable()) == count


def test_a_walk_is_kept_while_nothing_changes() -> None:
    whole = model()
    tree = ModuleTree(whole)
    assert tree.modules() is tree.modules()
    assert tree.parameters() is tree.parameters()
