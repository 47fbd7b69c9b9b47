"""Buffers of a released model: statistics of records that get into them outside of a private step.

A batch norm that runs on records in training mode between two steps, or after the last, keeps their mean
and variance, which are released with the weights, without noise.
"""

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from hush.core.errors import LedgerError
from hush.gradients.forward.module_tree import ModuleTree
from hush.gradients.tree import local_shard

_MOST_ENTRIES = 4096
"""Of a buffer of integers that is read: larger ones are masks and positions."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

BufferNorms = dict[tuple[torch.device, torch.dtype], tuple[list[str], Tensor]]
"""Names and the bits of the norms of buffers, by device and precision."""


def read_buffers(tree: ModuleTree) -> BufferNorms:
    """Norms of a model's buffers, on their devices: those of real numbers, and small ones of others."""
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
    for path, module in tree.modules().items():
        for name, buffer in module._buffers.items():
            value = None if buffer is None else _comparable(local_shard(buffer))
            if value is not None:
                names, values = kinds.setdefault((value.device, value.dtype), ([], []))
                names.append(f"{path}.{name}".lstrip("."))
                values.append(value)
    return {
        kind: (names, torch.stack(torch._foreach_norm(values)).unsqueeze(1).view(torch.uint8))
        for kind, (names, values) in kinds.items()
    }


def _comparable(buffer: Tensor) -> Tensor | None:
    """The buffer as real numbers; None: it is not compared."""
    if buffer.layout is not torch.strided or buffer.is_meta:
        return None
    if buffer.dtype in _FLOATS:
        return buffer
    if buffer.is_complex():
        return torch.view_as_real(buffer.resolve_conj())
    small = buffer.is_floating_point() or buffer.numel() <= _MOST_ENTRIES
    return buffer.double() if small else None


def changed_buffers(before: BufferNorms, after: BufferNorms) -> list[str]:
    """Names of the buffers that are not what they were, or are not there any more."""
    if before.keys() == after.keys() and all(
        before[kind][0] == names and torch.equal(before[kind][1], norms)
        for kind, (names, norms) in after.items()
    ):
        return []
    was, now = _by_name(before), _by_name(after)
    return [name for name in was | now if was.get(name) != now.get(name)]


def _by_name(buffers: BufferNorms) -> dict[str, list[int]]:
    return {
        name: bits
        for names, norms in buffers.values()
        for name, bits in zip(names, norms.tolist(), strict=True)
    }


def refuse_changed_buffers(names: Iterable[str]) -> NoReturn:
    """Raise `LedgerError` for changed buffers; the ledger stays valid: nothing was released yet."""
    changed = sorted(names)
    several = f" and {len(changed) - 3} others" if len(changed) > 3 else ""
    raise LedgerError(
        f"the model's buffers {', '.join(changed[:3])}{several} were changed outside of the private "
        "step, where nothing is charged: statistics of records there, such as those a batch norm keeps "
        "when it runs in training mode, are released with the model, without noise. Put back what was "
        "there. If the change did not depend on the records (buffers that were loaded, or set to what "
        "is public), call step.adopt_weights() right after it."
    )
