"""Isolation of records: operations by which one record would reach another, and why they are refused."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _dispatch_has_kernel_for_dispatch_key
from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.autograd_function import custom_function_call
from torch._ops import OpOverload, OpOverloadPacket

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import SharedWrite, random_state, same_draws
from hush.gradients.checks.torch_errors import translate_data_errors
from hush.gradients.tree import call_model, tree_leaves, tree_map

_IN_PLACE = re.compile(r"(?!__).*[^_]_|__setitem__|__i(add|sub|mul|truediv|and|or|xor|pow)__")
_STATISTICS = {"update_stats": 1, "gather_stats": 3, "gather_stats_with_counts": 3}
"""Functions `batch_norm_...` that write into running statistics, which their schemas do not say, and the
place of the first: `vmap` runs them for one record after another, on statistics that all share."""


@lru_cache(maxsize=4096)
def _written(name: str) -> slice | None:
    """Arguments that a function of this name writes into; None: it writes into none."""
    if _IN_PLACE.fullmatch(name):
        return slice(1)
    place = _STATISTICS.get(name.partition(".")[0].removeprefix("batch_norm_"))
    return None if place is None else slice(place, place + 2)


def is_custom_operator(func: Any) -> bool:
    """Whether a function is an operator that is not torch's own (`torch.ops.library.name`)."""
    return isinstance(func, OpOverload | OpOverloadPacket) and not _overloads(func)[0].name().startswith(
        ("aten::", "prims::", "prim::")
    )


def _overloads(func: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    if isinstance(func, OpOverload):
        return [func]
    return [getattr(func, name) for name in func.overloads()]


def check_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read_only: Sequence[Tensor]
) -> None:
    """Raise for a torch call that can carry something of one record to others.

    That is one that writes it into a tensor that all records share, of which `read_only` may not be
    written at all (what is written could come from a value that was read), an `autograd.Function` or
    a custom operator that says how `torch.vmap` runs it (it is given all records at once), and a draw
    from a generator that is not the step's.
    """
    if kwargs.get("generator") is not None:
        raise Unsupported(
            "the model draws from a generator of its own: what a record gets from it depends on who "
            "else is in the batch. Leave it out; dropout and its like draw from the step's."
        )
    name, has_rule = getattr(func, "__name__", ""), False
    if func is custom_function_call:
        has_rule, name = args[0].vmap is not torch.autograd.Function.vmap, args[0].__name__
    elif is_custom_operator(func):
        names = [each.name() for each in _overloads(func)]
        has_rule = any(_dispatch_has_kernel_for_dispatch_key(each, "FuncTorchBatched") for each in names)
        name = names[0]
    if has_rule:
        raise Unsupported(
            f"{name} has a batching rule of its own (vmap): it is given all records of a batch at "
            "once, and nothing shows that it keeps them apart, so clipping one record's gradient may "
            "not bound its influence. Leave the rule out, with generate_vmap_rule = True in an "
            "autograd.Function."
        )
    written = _written(name)
    if written is None:
        return
    for target in (*args[written], kwargs.get("running_mean"), kwargs.get("running_var")):
        if not isinstance(target, Tensor) or is_batchedtensor(target):
            continue
        protected = any(shares_memory(target, value) for value in read_only)
        if protected or any(map(is_batchedtensor, tree_leaves((args, kwargs)))):
            raise shared_write(func, target)


def shared_write(func: Any, target: Tensor) -> SharedWrite:
    """The error of a call that writes something of a record into a tensor that all records share."""
    return SharedWrite(
        f"the model writes what it computes for a record into a tensor of shape {tuple(target.shape)} "
        f"that all records share ({getattr(func, '__name__', func)}): what it keeps of them, such as "
        "running statistics, would be released without noise. Use a module that keeps nothing, and new "
        "tensors in place of in-place writes.",
        target,
    )


def shares_memory(value: Tensor, protected: Tensor) -> bool:
    """Whether writing to one could write to the other, whatever the views; not for sparse ones."""
    if value is protected:
        return True
    if (
        is_functorch_wrapped_tensor(value)
        or torch.strided != value.layout
        or protected.layout != value.layout
    ):
        return False
    return value.untyped_storage().data_ptr() == protected.untyped_storage().data_ptr() != 0


@torch.no_grad()
def check_independent_losses(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Raise if the loss of a record depends on which other record is beside it.

    A private step gives every record to the model and the loss on its own. One that compares records,
    such as a contrastive loss or a layer with batch statistics, would run, and learn something else.
    A record must keep its loss when the other of two is replaced by a copy of it: of the same shape, at
    the same place and with the same draws, kernels round alike (Assumption K), in any precision, so
    that little is allowed. Together it must also have about the loss that it has alone; of a model that
    draws this is not compared, as it draws anew for a batch of another size.

    Args:
        model: Compared in evaluation mode and without autocast; its modes are left as they were.
        loss: One value per record.
        inputs: Inputs of at least two records.
        targets: Their targets.
        around: Context of each pass, so that all begin from the same state of the model.
    """

    def values(*rows: int) -> Tensor:
        """The loss of these records in one batch."""
        chosen = partial(_rows, list(rows))
        with around():
            return loss(call_model(model, tree_map(inputs, chosen)), tree_map(targets, chosen))

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with translate_data_errors(model), _without_autocast(model, partial(values, 0)):
            before = random_state()
            together = values(0, 1)
            draws = not all(map(torch.equal, random_state(), before))
            separate = [values(0), values(1)]
            if any(value.shape != (1,) for value in separate):
                return  # a loss that is already reduced, which the tape explains
            independent = (
                together.shape == (2,)
                and all(_same_loss_beside(model, values, *rows) for rows in ((0, 1), (1, 0)))
                and (draws or _close(together, torch.cat(separate), _OTHER_SIZE))
            )
    finally:
        for module, mode in modes:
            module.training = mode
    if not independent:
        raise Unsupported(
            "the loss of a record changes with who else is in the batch: clipping one record's gradient "
            "would not bound its influence, and a private step works out each record alone. Use a model "
            "and a loss that treat records one by one (no batch statistics, no comparisons between "
            "records, no outputs and targets whose shapes differ and broadcast)."
        )


_SAME_SHAPE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""By how much the loss of a record may move with the other one, relative to it or to 1.

By Assumption K not at all; a kernel that adds in an order of its own, or for which records are grouped
(experts), leaves roundings."""
_OTHER_SIZE = {torch.float64: 1e-2, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""The same between batches of one and of two, for which kernels differ, some in TensorFloat-32."""


@contextmanager
def _without_autocast(model: nn.Module, run: Callable[[], Any]) -> Iterator[None]:
    """Context without autocast, unless `run` needs it: low precision hides one record in another."""
    kind = next(model.parameters()).device.type
    enabled = torch.is_autocast_enabled(kind)
    if enabled:
        with torch.autocast(kind, enabled=False):
            try:
                run()
            except RuntimeError:  # inputs or weights of mixed types, which autocast converts
                enabled = False
    with torch.autocast(kind, enabled=False) if enabled else nullcontext():
        yield


def _same_loss_beside(model: nn.Module, values: Callable[..., Tensor], row: int, neighbour: int) -> bool:
    """Whether a record has the same losses beside another one as beside itself, under the same draws."""
    for place in (0, 1):
        losses = []
        for other in (neighbour, row):
            with same_draws(model):
                losses.append(values(*((row, other) if place == 0 else (other, row)))[place])
        if not _close(losses[0], losses[1], _SAME_SHAPE):
            return False
    return True


def _rows(rows: list[int], values: Tensor) -> Tensor:
    return values[rows]


def _close(values: Tensor, expected: Tensor, tolerances: dict[torch.dtype, float]) -> bool:
    tolerance = tolerances.get(values.dtype, 0.0)
    return torch.allclose(values, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
