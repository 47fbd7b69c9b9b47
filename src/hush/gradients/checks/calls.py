"""Calls of a model and of a loss, with errors that say what they were given and what they need."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hush.core.errors import DataError, Unsupported
from hush.core.ranges import with_article


def check_arguments(model: nn.Module, inputs: Any) -> None:
    """Raise if `forward` does not take inputs of these names or in this number.

    Args:
        model: the trained one.
        inputs: of any records: a tensor, a tuple of arguments, or a dictionary of them by name.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of compiled code, which says so when it is called
        return
    named = isinstance(inputs, dict)
    try:
        if named:
            signature.bind(**inputs)
        else:
            signature.bind(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    except TypeError as error:
        given = f"the names {', '.join(map(str, inputs))}" if named else "a place each"
        raise DataError(
            f"the inputs have {given} and forward() takes {signature} ({error}): a dictionary's keys "
            "are names of its arguments, and a tuple's parts follow their order. Rename or leave out "
            "what it does not take, and add what it needs."
        ) from error


def call_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    """The losses of some records; raises where a gradient cannot be taken through them.

    Args:
        loss: one value per record.
        outputs: of the model.
        targets: of the records.
    """
    try:
        values = loss(outputs, targets)
    except (TypeError, AttributeError) as error:
        if isinstance(outputs, Tensor):
            raise
        kind = with_article(type(outputs).__name__)
        part = "outputs[0]"
        if isinstance(outputs, dict):
            part = 'outputs["logits"]' if type(outputs) is dict else "outputs.logits"
        raise Unsupported(
            f"the model returns {kind}, which the loss does not take ({error}): each record's gradient "
            "is taken through its own loss. Pass a loss that picks the scores, e.g. lambda outputs, y: "
            f'torch.nn.functional.cross_entropy({part}, y, reduction="none").'
        ) from error
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = str(values.dtype) if isinstance(values, Tensor) else with_article(type(values).__name__)
        raise Unsupported(
            f"the loss returned {kind}: a gradient is taken through a tensor of floating-point numbers, "
            "one a record, and through nothing else. Return that tensor, without .item(), float() or "
            "argmax."
        )
    return values
