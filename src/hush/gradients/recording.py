"""One forward and one backward pass that leave every parameter's per-example gradients on a tape.

The model runs under `torch.vmap`, each record a batch of one, so that no other record can enter its
loss. Inside, a function mode looks at every torch call (`Recording`). The backward pass is an ordinary
one and never forms the gradient of a weight summed over records.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import by_decision
from hush.gradients.checks.isolation import translate_vmap_errors
from hush.gradients.interception import Recording, one_view
from hush.gradients.tape import GradientTape, SplitTape, joined
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import tree_leaves, tree_map

Loss = Callable[[Any, Any], Tensor]
"""Outputs and targets of a batch to one value per record."""

Views = Callable[[Any], Any]
"""The inputs of one record to several views of it, along a new first dimension."""


def record(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, views: Views | None = None
) -> GradientTape | SplitTape:
    """The tape of one batch: the gradient of each record's own loss.

    `inputs` is a tensor, or a tuple or dictionary of tensors for a model that takes several; records
    are along the first dimension of each. Only parameters that require a gradient take part. Where
    the model decides by a value (`if mask.all():`), each record decides for itself (`by_decision`).
    With `views`, a record's loss is the mean over the views of it that the function returns.
    """
    recorded = partial(_record_alike, model, loss, views or one_view)
    parts = by_decision(recorded, inputs, targets)
    return parts[0][1] if len(parts) == 1 else SplitTape(parts)


@torch.no_grad()
def per_record_losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    """Loss of each record of a batch, whatever the other records are.

    Each is given to the model alone, as on the tape, so that a model that mixes the records of a batch
    cannot let one decide for others.
    """
    records = len(next(tree_leaves(inputs)))
    if records == 0:
        return torch.zeros(0, device=next(model.parameters()).device)
    parts = by_decision(partial(_losses_alike, model, loss), inputs, targets)
    gathered = torch.cat([values[part.places] for part, values in parts])
    return gathered[torch.cat([part.rows for part, _ in parts]).argsort()]


def _losses_alike(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    records = len(next(tree_leaves(inputs)))
    recording = Recording({}, records, next(model.parameters()).device, _state(model))
    return recording.losses(model, loss, inputs, targets, one_view)


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def expand_views(views: Views, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """The views of all records, one after another, and as many targets."""
    apart = torch.vmap(views, randomness="different")(inputs)
    count = next(tree_leaves(apart)).shape[1]
    return tree_map(apart, lambda value: value.flatten(0, 1)), tree_map(
        targets, lambda value: value.repeat_interleave(count, dim=0)
    )


def _record_alike(model: nn.Module, loss: Loss, views: Views, inputs: Any, targets: Any) -> GradientTape:
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    device = next(iter(trainable.values())).device
    records = len(next(tree_leaves(inputs)))
    if records == 0:
        empty: dict[str, Term] = {
            name: Dense(v.detach().new_zeros(0, *v.shape)) for name, v in trainable.items()
        }
        return GradientTape(empty, device)
    recording = Recording(trainable, records, device, _state(model))
    versions = [value._version for value in model.parameters()]
    with torch.enable_grad():
        losses = recording.losses(model, loss, inputs, targets, views)
        if [value._version for value in model.parameters()] != versions:
            raise Unsupported(
                "the model changes its parameters in forward(), where gradients are still to be worked "
                "out with them. Change them between steps."
            )
        with translate_vmap_errors(model, lambda: recording.decided):
            recording.run_back(losses)
    terms = {name: joined(uses) for name, uses in recording.terms.items() if uses}
    idle = tuple(name for name in trainable if name not in terms)
    for name in idle:
        zero = torch.zeros((), dtype=trainable[name].dtype, device=device)
        terms[name] = Dense(zero.expand(records, *trainable[name].shape))
    return GradientTape({name: terms[name] for name in trainable}, device, idle, recording.decided)
