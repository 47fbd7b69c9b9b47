"""Per-sample gradients of a batch: one forward and one backward pass that leave a gradient tape.

The model runs under `torch.vmap`, each record a batch of one, so that no other record can enter its
loss, and every torch call is intercepted (`forward.interception`). The backward pass is an ordinary one
and never forms a weight's gradient summed over records.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import (
    DataDependentBranch,
    Path,
    gather_records,
    random_state,
    run_by_branch,
    set_random_state,
)
from hush.gradients.checks.torch_errors import translate_vmap_errors
from hush.gradients.forward.interception import Recording
from hush.gradients.rules.tied_embedding import merge_terms
from hush.gradients.tape import BranchedTape, GradientTape
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import (
    Loss,
    Views,
    pass_watchers,
    sharded_models,
    submodules,
    tree_leaves,
    value_readers,
)


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
    if model in sharded_models:
        return _record_sharded(model, loss, inputs, targets, views)
    before = random_state()
    branch, watcher = partial(_record_branch, model, loss, views), pass_watchers.get(model)
    run = partial(run_by_branch, branch, inputs, targets, watcher)
    parts = run()
    if parts[0][1].reads_values and model not in value_readers:
        # that it does is no matter of the records: it may do without from now on (`uncompiled`)
        value_readers.add(model)
        set_random_state(before)
        parts = run()
    return parts[0][1] if len(parts) == 1 else BranchedTape(parts)


@torch.no_grad()
def per_sample_losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    """The per-sample losses of a batch, whatever the other records are: (records,).

    The model sees each record alone, as on the tape, so that a model that mixes the records of a batch
    cannot let one decide for others.
    """
    if len(next(tree_leaves(inputs))) == 0:
        return torch.zeros(0, device=next(model.parameters()).device)

    def losses(inputs: Any, targets: Any, path: Path) -> Tensor:
        records, device = len(next(tree_leaves(inputs))), next(model.parameters()).device
        trainable = dict(model.named_parameters())
        recording = Recording(model, trainable, records, device, path, losses_only=True)
        return recording.losses(loss, inputs, targets)

    shards = sharded_models.get(model)
    with nullcontext() if shards is None else shards.gathering():
        return gather_records(run_by_branch(losses, inputs, targets, pass_watchers.get(model)))


def _record_sharded(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, views: Views | None
) -> GradientTape:
    """The tape of a model whose weights the ranks gather together, one module after another.

    All ranks must run the same modules in the same order: no record may have a pass of its own.
    """

    def in_one_pass(inputs: Any, targets: Any, path: Path) -> GradientTape | None:
        path.lockstep = True
        try:
            return _record_branch(model, loss, views, inputs, targets, path)
        except DataDependentBranch:
            return None

    before = random_state()
    with sharded_models[model].gathering():
        for _ in range(2):
            ((_, tape),) = run_by_branch(in_one_pass, inputs, targets, pass_watchers.get(model))
            if tape is not None:
                return tape
            value_readers.add(model)  # as in `record`: it may do without
            set_random_state(before)
    raise Unsupported(
        "the model branches on a value, and its parameters are sharded over ranks: records that branch "
        "differently are computed in passes of their own, and ranks that gather weights in different "
        "orders would wait for each other for ever. Choose with torch.where, or leave fully_shard out."
    )


def _record_branch(
    model: nn.Module, loss: Loss, views: Views | None, inputs: Any, targets: Any, path: Path
) -> GradientTape:
    """The tape of records that take the same branch; raises `DataDependentBranch` if they do not."""
    shards = sharded_models.get(model)
    trainable = (
        {name: value for name, value in model.named_parameters() if value.requires_grad}
        if shards is None
        else shards.trainable()
    )
    device = next(iter(trainable.values())).device
    records = len(next(tree_leaves(inputs)))
    terms: dict[str, Term]
    if records == 0:
        terms = {name: Dense(v.detach().new_zeros(0, *v.shape)) for name, v in trainable.items()}
        return GradientTape(terms, device)
    recording = Recording(model, trainable, records, device, path)
    versions = _parameter_versions(model)
    with torch.enable_grad(), recording.copies_released():
        losses = recording.losses(loss, inputs, targets, views)
        if _parameter_versions(model) != versions:
            raise Unsupported(
                "the model changes its parameters in forward(), where gradients are still to be worked "
                "out with them. Change them between steps."
            )
        with translate_vmap_errors(model, lambda: path.reads_values):
            recording.backward(losses)
    unused = tuple(name for name, uses in recording.terms.items() if not uses)
    for name in unused:
        zero = torch.zeros((), dtype=trainable[name].dtype, device=device)
        recording.terms[name].append(Dense(zero.expand(records, *trainable[name].shape)))
    terms = {
        name: uses[0] if len(uses) == 1 else merge_terms(uses) for name, uses in recording.terms.items()
    }
    return GradientTape(terms, device, unused, path.reads_values)


def _parameter_versions(model: nn.Module) -> list[int]:
    """How often each parameter was written to, for each module that has it."""
    by_module = (module._parameters.values() for module in submodules(model))
    if model in sharded_models:
        return sharded_models[model].versions()
    return [value._version for values in by_module for value in values if value is not None]
