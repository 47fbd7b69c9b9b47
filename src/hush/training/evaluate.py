"""How good a model is on data that nobody needs protected."""

from typing import Any

import torch
from torch import Tensor, nn

from hush.gradients.admissible import per_record
from hush.gradients.structure import called, each
from hush.training.records import Data, count, take

_BATCH = 1024


@torch.no_grad()
def evaluate(model: nn.Module, loss: Any, data: Data) -> dict[str, float]:
    """Mean loss, and accuracy where the outputs are scores of classes.

    Nothing here is charged: pass public or held-out records, not the training set.
    """
    each_loss = per_record(loss)
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total_loss, right, classified = 0.0, 0, True
    try:
        for indices in torch.arange(count(data)).split(_BATCH):
            inputs, targets = each(take(data, indices), lambda rows: rows.to(device))
            outputs = called(model, inputs)
            total_loss += float(each_loss(outputs, targets).double().sum())
            classified = (
                isinstance(outputs, Tensor)
                and outputs.dim() == 2
                and targets.dim() == 1
                and not targets.is_floating_point()
            )
            right += int((outputs.argmax(1) == targets).sum()) if classified else 0
    finally:
        for module, mode in modes:
            module.training = mode
    result = {"loss": total_loss / count(data)}
    return {**result, "accuracy": right / count(data)} if classified else result
