from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hush.core.errors import DataError, Unsupported
from hush.gradients.losses import per_sample_loss
from hush.gradients.recording import record
from hush.gradients.tree import check_arguments, submodules

INPUTS, TARGETS = torch.randn(5, 4), torch.arange(5) % 3


class ModelOutput(dict[str, Tensor]):
    """A dictionary with attributes, as transformers returns."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Returning(nn.Linear):
    def __init__(self, wrap: Any) -> None:
        super().__init__(4, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss(), per_sample])
@pytest.mark.parametrize(
    ("wrap", "part"),
    [
        (lambda scores: {"logits": scores}, r'outputs\["logits"\]'),
        (lambda scores: ModelOutput(logits=scores), r"outputs\.logits"),
        (lambda scores: (scores, scores), r"outputs\[0\]"),
    ],
    ids=["dictionary", "ModelOutput", "tuple"],
)
def test_outputs_that_a_loss_does_not_take_are_named_with_a_loss_that_does(
    wrap: Any, part: str, loss: Any
) -> None:
    with pytest.raises(Unsupported, match=rf"the model returns .*cross_entropy\({part}, y, reduction"):
        record(Returning(wrap), per_sample_loss(loss), INPUTS, TARGETS)


class Two(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return ids if mask is None else ids * mask


def test_inputs_that_forward_does_not_take_are_named() -> None:
    for fitting in (INPUTS, (INPUTS, INPUTS), {"ids": INPUTS}, {"mask": INPUTS, "ids": INPUTS}):
        check_arguments(Two(), fitting)
    with pytest.raises(DataError, match=r"names ids, masks, but forward\(\) takes .*\bmask\b"):
        check_arguments(Two(), {"ids": INPUTS, "masks": INPUTS})
    with pytest.raises(DataError, match=r"names mask, but .*missing a required argument: 'ids'"):
        check_arguments(Two(), {"mask": INPUTS})
    with pytest.raises(DataError, match="too many positional arguments"):
        check_arguments(Two(), (INPUTS, INPUTS, INPUTS))


def test_submodules_are_all_modules_each_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"a": nn.GELU()}))
    model.register_module("left_out", None)
    found = submodules(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())
