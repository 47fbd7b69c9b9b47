"""Torch calls without a rule: under `vmap`, with per-sample copies of what records share, or alone."""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, current_level, is_batchedtensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.nn import functional

from hush.gradients.checks.isolation import shared_write
from hush.gradients.precision import precise_under_autocast, to_autocast_dtype
from hush.gradients.tree import tree_leaves, tree_map

if TYPE_CHECKING:
    from hush.gradients.forward.interception import Recording

_NEEDS_VALUES = re.compile(
    r"vmap: .*(\.item\(\)|dynamic shape|data-dependent control flow)|Batching rule not implemented",
    re.DOTALL,
)
"""torch's errors for a call that `vmap` cannot do for all records, as where values decide on a shape."""

_DRAWS_INTO_SHARED = re.compile("vmap: .*in-?place randomness on an unbatched tensor")
"""torch's error for a draw into a tensor that all records share (`torch.empty(n, 1).bernoulli_(p)`)."""

_CONSTANTS = {
    *(torch.zeros, torch.ones, torch.full, torch.empty),
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
    *(torch.clone, Tensor.clone),
}
"""Functions that return new memory, into which a model may write something of a record."""

_FLOAT32 = {
    getattr(space, name)
    for space in (torch, Tensor, functional)
    for name in (
        *("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "prod", "sum", "logsumexp"),
        *(
            "layer_norm",
            "group_norm",
            "norm",
            "normalize",
            "cosine_similarity",
            "dist",
            "cdist",
            "pdist",
        ),
        *("cross_entropy", "nll_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
        *("binary_cross_entropy_with_logits", "poisson_nll_loss", "cosine_embedding_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss", "multilabel_margin_loss", "multi_margin_loss"),
        *("soft_margin_loss", "triplet_margin_loss", "softplus"),
    )
    if hasattr(space, name)
}
"""Functions that autocast computes in single precision; under `vmap` they are taken apart before it."""

_CONVOLUTIONS = {
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
}
"""Functions that autocast does not reach under `vmap`."""


def call(recording: "Recording", func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call, each record with its own copy of a parameter or of what is derived from one.

    A copy of a constant, too, where the pass is run again because the model writes into it.
    """
    batched, shared = _of_records_or_shared(args, kwargs)
    output = _call(recording, func, args, kwargs, per_sample=batched and shared)
    if shared and not batched and any(map(is_batchedtensor, tree_leaves(output))):
        # it draws for each record, as dropout of a parameter does
        return _call(recording, func, args, kwargs, per_sample=True)
    if func in _CONSTANTS:
        own = is_batchedtensor(output)
        recording.constants.append(None if own else output)
        if not own and len(recording.constants) - 1 in recording.path.own_constants:
            return recording.run_batched(torch.clone, output)
    return output


def _of_records_or_shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a call takes something of a record, and something shared that has a gradient."""
    batched = shared = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
            if is_batchedtensor(leaf):
                batched = True
            elif leaf.requires_grad:
                shared = True
    return batched, shared


def _call(recording: "Recording", func: Any, args: Any, kwargs: Any, *, per_sample: bool) -> Any:
    if per_sample and torch.is_grad_enabled() and not recording.losses_only:
        args, kwargs = tree_map((args, kwargs), recording.per_sample)
    if func in _CONVOLUTIONS:
        args, kwargs = tree_map((args, kwargs), to_autocast_dtype)
    if func in _FLOAT32:
        args, kwargs = tree_map((args, kwargs), precise_under_autocast)
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if _DRAWS_INTO_SHARED.search(str(error)):
            recording.interrupt(shared_write(func, next(tree_leaves((args, kwargs)))))
        if not _NEEDS_VALUES.match(str(error)) or current_level() != recording.level:
            raise
    return _run_alone(recording, func, args, kwargs)


def _run_alone(recording: "Recording", func: Any, args: Any, kwargs: Any) -> Any:
    """The call's result for the only record, outside of `vmap`; raises `DataDependentBranch`.

    It is given copies of what is not the record's, so that nothing is written into the model.
    """
    recording.path.check_alone(recording.records)
    copies: list[Tensor] = []

    def own(value: Tensor) -> Tensor:
        if is_batchedtensor(value):
            return recording.by_record(value)[0]
        copies.append(recording.by_record(recording.per_sample(value))[0].clone())
        return copies[-1]

    own_args, own_kwargs = tree_map((args, kwargs), own)
    versions = [copy._version for copy in copies]
    with temporarily_pop_interpreter_stack():
        output = func(*own_args, **own_kwargs)
        output = tree_map(output, lambda part: part.unsqueeze(0))
    for copy, version in zip(copies, versions, strict=True):
        if copy._version != version:
            raise shared_write(func, copy)
    return tree_map(output, lambda part: _add_batch_dim(part, 0, recording.level))
