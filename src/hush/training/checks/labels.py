"""Labels that no class of the model stands for are refused, without saying whose."""

from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError
from hush.gradients.tree import call_model, tree_leaves
from hush.training.data import Data, pair_of


@torch.no_grad()
def check_labels(model: nn.Module, loss: Any, inputs: Any, data: Data) -> None:
    """Raise if some label is no class, where the loss takes classes and the data is in memory.

    `inputs` are a few records, to see how many classes there are. torch's own error would come in the
    middle of a run, and show a private label.
    """
    pair = pair_of(data)
    if pair is None or not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    outputs = call_model(model, inputs)
    labels = [part for part in tree_leaves(pair[1]) if not part.is_floating_point()]
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or not labels:
        return
    classes = outputs.shape[1]
    for part in labels:
        wrong = (part < 0) | (part >= classes)
        if bool((wrong & (part != loss.ignore_index)).any()):
            raise DataError(
                f"some labels are not among the model's {classes} classes, 0 to {classes - 1} (which is "
                "private and not shown): their loss is not defined. Number the classes from 0, or "
                "give the model more outputs."
            )
