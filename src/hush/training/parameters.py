"""Layout of a flat gradient: trainable parameters one after another, in blocks of the clipping."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.core.parts import Clipping
from hush.core.sensitivity import SensitivitySet
from hush.gradients.terms import ROUNDING

_DOUBLE_ROUNDING = 2.0**-12
"""Share of its bound by which rounding in double precision lets a record move a sum more than that."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient, by name, in the model's order."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@dataclass(frozen=True, eq=False)
class Layout:
    """Trainable parameters and sensitivity sets of one step.

    Worked out once a step, as walking the modules of a deep model takes longer than adding its noise.
    """

    parameters: dict[str, nn.Parameter]
    sensitivity: Sequence[SensitivitySet]
    """One a block of the clipping."""

    @classmethod
    def of(cls, model: nn.Module, clipping: Clipping) -> "Layout":
        """Layout of the model as it is now: which parameters are frozen may change between steps."""
        parameters = trainable_parameters(model)
        return cls(parameters, clipping.sensitivity(sum(value.numel() for value in parameters.values())))

    @property
    def block_sizes(self) -> list[int]:
        """Coordinates in each block of the clipping."""
        return [block.dimension or 0 for block in self.sensitivity]

    @property
    def rounding(self) -> float:
        """Share of its bound by which rounding may let one record move a clipped sum more than that."""
        double = all(value.dtype == torch.float64 for value in self.parameters.values())
        return _DOUBLE_ROUNDING if double else ROUNDING


def split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector in the shapes of the parameters."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view_as(own) for part, own in zip(parts, parameters, strict=True)]


def set_gradients(parameters: Sequence[nn.Parameter], gradient: Tensor) -> None:
    """Write a flat gradient into the parameters' `grad`, in their own precision."""
    gradients = [torch.empty_like(parameter) for parameter in parameters]
    torch._foreach_copy_(gradients, split_like(gradient, parameters))
    for parameter, own in zip(parameters, gradients, strict=True):
        parameter.grad = own
