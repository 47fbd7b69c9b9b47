"""Made-up records in place of private ones, to find out what a model does before the first draw."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hush.gradients.tree import tree_map


def stand_ins(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Made-up inputs and targets: the same whatever the records hold, of their shapes and types.

    Inputs are normal, as those that networks are made for, and targets uniform on [0, 1), as
    probabilities are; integers are zeros and ones, which most vocabularies and classes have. No two rows
    that follow each other are alike.

    Args:
        inputs: of a few records; only shapes, types and devices count.
        targets: likewise.
    """
    generator = torch.Generator().manual_seed(0)

    def made_up(value: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        if value.is_floating_point() or value.is_complex():
            return draw(value.shape, generator=generator).to(value.device, value.dtype)
        row = torch.randint(0, 2, value.shape[1:], generator=generator)
        turn = torch.arange(len(value)).reshape(-1, *[1] * row.dim())
        return ((row + turn) % 2).to(value.device, value.dtype)

    return (
        tree_map(inputs, partial(made_up, draw=torch.randn)),
        tree_map(targets, partial(made_up, draw=torch.rand)),
    )
