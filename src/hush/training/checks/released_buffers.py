"""Buffers of a released model: statistics of records that get into them outside of a private step.

A batch norm that runs on records in training mode between two steps, or after the last, keeps their mean
and variance, which are released with the weights, without noise.
"""

import hashlib
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hush.core.errors import LedgerError
from hush.gradients.models import ModuleTree
from hush.gradients.tree import local_shard

_MOST_ENTRIES = 4096
"""Of a buffer of integers that has a norm: larger ones are masks and positions."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Norms = dict[tuple[torch.device, torch.dtype], tuple[list[str], Tensor]]
"""Names and the bits of the norms of buffers, by device and precision."""


class Version(NamedTuple):
    """A buffer as it was at one of torch's counts of writes."""

    value: Tensor
    """Referenced, so that no other one can have its identity."""
    address: int
    writes: int | None
    """None: they are not counted."""
    content: bytes

    def is_of(self, value: Tensor) -> bool:
        """Whether it is this buffer, and torch has counted no writes since."""
        same = value is self.value and _address(value) == self.address
        return same and self.writes is not None and self.writes == value._version


class Buffers(NamedTuple):
    """What a model's buffers are recognised by."""

    versions: dict[str, Version]
    norms: Norms
    """On their devices, of real numbers and small ones of others: writes that torch does not count."""


def read_buffers(
    tree: ModuleTree, before: Buffers | None = None, left_out: Set[str] = frozenset()
) -> Buffers:
    """The buffers of a model as they are now.

    Contents are read where there is another buffer or torch has counted writes, so that a step does not
    wait for them.

    Args:
        tree: of the model.
        before: an earlier reading.
        left_out: names of buffers that are not to be read.
    """
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
    versions: dict[str, Version] = {}
    for path, module in tree.modules().items():
        for name, buffer in module._buffers.items():
            key = f"{path}.{name}".lstrip(".")
            if buffer is None or key in left_out:
                continue
            value = local_shard(buffer)
            versions[key] = _version(value, None if before is None else before.versions.get(key))
            if (number := _comparable(value)) is not None:
                names, values = kinds.setdefault((number.device, number.dtype), ([], []))
                names.append(key)
                values.append(number)
    norms = {
        kind: (names, torch.stack(torch._foreach_norm(values)).unsqueeze(1).view(torch.uint8))
        for kind, (names, values) in kinds.items()
    }
    return Buffers(versions, norms)


def _version(value: Tensor, before: Version | None) -> Version:
    if before is not None and before.is_of(value):
        return before
    writes = None if value.is_inference() else value._version
    return Version(value, _address(value), writes, _digest(value))


@torch.no_grad()
def _digest(value: Tensor) -> bytes:
    """Digest of a buffer's numbers."""
    if value.layout is not torch.strided or value.is_meta:
        return b""
    real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    numbers = real.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{value.shape} {value.dtype}".encode() + numbers.tobytes()).digest()


def _address(value: Tensor) -> int:
    return value.data_ptr() if value.layout is torch.strided and not value.is_meta else 0


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


def changed_buffers(before: Buffers, after: Buffers) -> set[str]:
    """Names of the buffers that are not what they were, or are not there any more."""
    contents = [{key: one.content for key, one in each.versions.items()} for each in (before, after)]
    changed = _differing(*contents)
    if before.norms.keys() == after.norms.keys() and all(
        before.norms[kind][0] == names and torch.equal(before.norms[kind][1], norms)
        for kind, (names, norms) in after.norms.items()
    ):
        return changed
    return changed | _differing(_by_name(before.norms), _by_name(after.norms))


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    return {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}


def _by_name(buffers: Norms) -> dict[str, list[int]]:
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
