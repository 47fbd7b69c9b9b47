"""Records kept apart: what a model or a loss does that would let one touch another, and why not."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from hush.core.errors import DataError, Unsupported
from hush.gradients.structure import called, each, tensors

_IN_PLACE = re.compile(r"(?!__).*[^_]_|__setitem__|__i(add|sub|mul|truediv|and|or|xor|pow)__")


def check_written(func: Any, args: tuple[Any, ...], closed: Sequence[Tensor]) -> None:
    """Raise for a call that writes something of one record into a tensor that all records share.

    `closed` may not be written at all: what is written could come from a value that was asked for.
    """
    name = getattr(func, "__name__", "")
    if not _IN_PLACE.fullmatch(name) or not args or not isinstance(args[0], Tensor):
        return
    own = any(args[0] is value for value in closed)
    if not is_batchedtensor(args[0]) and (own or any(map(is_batchedtensor, tensors(args[1:])))):
        raise Unsupported(
            f"the model writes what it computes for a record into a tensor of shape "
            f"{tuple(args[0].shape)} that all records share ({name}): what it keeps of them, such as "
            "running statistics, would leave the room without noise. Use a module that keeps nothing, "
            "and new tensors in place of in-place writes."
        )


@contextmanager
def indices_not_shown() -> Iterator[None]:
    """Say that an index was out of range without saying which one, as torch's own errors do."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if not re.search("out of (bounds|range)", str(error)):
            raise
        raise DataError(
            "an index of some record is out of range: a label that is no class, or a token that is not "
            "in the embedding (its value is private and not shown). Check the labels and inputs against "
            "the model's sizes."
        ) from None


@contextmanager
def explained(model: nn.Module, decided: Callable[[], bool]) -> Iterator[None]:
    """Say what an error of `vmap` means for privacy, and put back buffers that were replaced.

    Where the model has decided by a value, any new buffer could hold something of a record.
    """
    before = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        with indices_not_shown():
            yield
    except RuntimeError as error:
        if not re.search("vmap|functorch|storage|Batching rule", str(error)):
            raise
        raise Unsupported(
            "the model or the loss does something that cannot be done for each record on its own, and "
            "a record's own gradient is what is clipped. (Gradient checkpointing is one such thing: "
            "turn it off, a smaller physical_batch saves the same memory.) "
            f"{str(error).splitlines()[0]}"
        ) from error
    finally:
        kept = []
        for module, buffers in before:
            for name, buffer in buffers.items():
                now = module._buffers.get(name)
                if now is not None and now is not buffer and (decided() or is_batchedtensor(now)):
                    module._buffers[name] = buffer
                    kept.append(name)
    if kept:
        raise Unsupported(
            f"the model replaces its buffer(s) {', '.join(kept)} by what it computes for a record: what "
            "it keeps of the records would leave the room without noise. Use a module without running "
            "statistics."
        )


@torch.no_grad()
def check_apart(model: nn.Module, loss: Callable[[Any, Any], Tensor], inputs: Any, targets: Any) -> None:
    """Raise if the loss of two records together is not what it is for each alone.

    A private step gives every record to the model and the loss on its own. One that compares records,
    such as a contrastive loss or a layer with batch statistics, would run, and learn something else.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        together, *alone = (
            loss(called(model, each(inputs, rows)), each(targets, rows))
            for rows in (_both, _first, _second)
        )
    finally:
        for module, mode in modes:
            module.training = mode
    if any(value.shape != (1,) for value in alone):
        return  # a loss that is already reduced, which the tape explains
    tolerance = 1e-3 if together.dtype in (torch.float32, torch.float64) else 5e-2
    if together.shape != (2,) or not torch.allclose(
        together, torch.cat(alone), rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise Unsupported(
            "the loss of a record changes with who else is in the batch: clipping one record's gradient "
            "would not bound its influence, and a private step works out each record alone. Use a model "
            "and a loss that treat records one by one (no batch statistics, no comparisons between "
            "records, no outputs and targets whose shapes differ and broadcast)."
        )


def _both(rows: Tensor) -> Tensor:
    return rows[:2]


def _first(rows: Tensor) -> Tensor:
    return rows[:1]


def _second(rows: Tensor) -> Tensor:
    return rows[1:2]
