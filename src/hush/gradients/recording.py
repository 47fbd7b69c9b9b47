"""Per-sample gradients of a batch: one forward and one backward pass that leave a gradient tape.

The model runs under `torch.vmap`, each record a batch of one, so that no other record can enter its
loss. Inside, every torch call is intercepted (`interception.Recording`) and layers leave the factors of
their weights' per-sample gradients. The backward pass is an ordinary one and never forms a weight's
gradient summed over records.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import run_by_branch
from hush.gradients.checks.isolation import translate_vmap_errors
from hush.gradients.interception import Recording, one_view
from hush.gradients.rules.embedding import merge_terms
from hush.gradients.tape import BranchedTape, GradientTape
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import tree_leaves, tree_map

Loss = Callable[[Any, Any], Tensor]
"""Outputs and targets of a batch to one value per record."""

Views = Callable[[Any], Any]
"""The inputs of one record to several views of it (augmentations), along a new first dimension."""


def record(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, views: Views | None = None
) -> GradientTape | BranchedTape:
    """The gradient tape of one batch: the gradient of each record's own loss.

    Where the model branches on a value (`if mask.all():`), each record takes its own branch
    (`run_by_branch`).

    Args:
        model: only parameters that require a gradient take part.
        loss: one value per record.
        inputs: a tensor, or a tuple or dictionary of tensors for a model that takes several; records
            are along the first dimension of each.
        targets: as the inputs.
        views: if given, a record's loss is the mean over the views that this returns for it.
    """
    parts = run_by_branch(partial(_record_branch, model, loss, views or one_view), inputs, targets)
    return parts[0][1] if len(parts) == 1 else BranchedTape(parts)


@torch.no_grad()
def per_sample_losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    """The per-sample losses of a batch, whatever the other records are: (records,).

    The model sees each record alone, as on the tape, so that a model that mixes the records of a batch
    cannot let one decide for others.
    """
    if len(next(tree_leaves(inputs))) == 0:
        return torch.zeros(0, device=next(model.parameters()).device)

    def losses(inputs: Any, targets: Any) -> Tensor:
        records, device = len(next(tree_leaves(inputs))), next(model.parameters()).device
        recording = Recording(model, dict(model.named_parameters()), records, device, losses_only=True)
        with torch.no_grad():
            return recording.losses(loss, inputs, targets, one_view)

    parts = run_by_branch(losses, inputs, targets)
    gathered = torch.cat([values[part.places] for part, values in parts])
    return gathered[torch.cat([part.rows for part, _ in parts]).argsort()]


def expand_views(views: Views, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """The views of all records, one after another, and as many targets."""
    by_record = torch.vmap(views, randomness="different")(inputs)
    count = next(tree_leaves(by_record)).shape[1]
    return tree_map(by_record, lambda value: value.flatten(0, 1)), tree_map(
        targets, lambda value: value.repeat_interleave(count, dim=0)
    )


def _record_branch(
    model: nn.Module, loss: Loss, views: Views, inputs: Any, targets: Any
) -> GradientTape:
    """The tape of records that take the same branch; raises `DataDependentBranch` if they do not."""
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    device = next(iter(trainable.values())).device
    records = len(next(tree_leaves(inputs)))
    terms: dict[str, Term]
    if records == 0:
        terms = {name: Dense(v.detach().new_zeros(0, *v.shape)) for name, v in trainable.items()}
        return GradientTape(terms, device)
    recording = Recording(model, trainable, records, device)
    versions = [value._version for value in model.parameters()]
    with torch.enable_grad():
        losses = recording.losses(loss, inputs, targets, views)
        if [value._version for value in model.parameters()] != versions:
            raise Unsupported(
                "the model changes its parameters in forward(), where gradients are still to be worked "
                "out with them. Change them between steps."
            )
        with translate_vmap_errors(model, lambda: recording.reads_values):
            recording.backward(losses)
    terms = {name: merge_terms(uses) for name, uses in recording.terms.items() if uses}
    unused = tuple(name for name in trainable if name not in terms)
    for name in unused:
        zero = torch.zeros((), dtype=trainable[name].dtype, device=device)
        terms[name] = Dense(zero.expand(records, *trainable[name].shape))
    return GradientTape(
        {name: terms[name] for name in trainable}, device, unused, recording.reads_values
    )
