"""Contents of Python attributes: read to be compared, and put back as they were."""

import hashlib
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

T = TypeVar("T")
Content = Any
"""Something hashable that is equal for equal contents."""

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


@dataclass(eq=False)
class AttributeReader:
    """Reads numbers, tensors, containers and the attributes of objects; each object once.

    Tensors and containers of more than `max_entries` are compared by identity or that of their parts
    alone; `by_identity` tells a tensor from another one with the same numbers. `visited` has the modules
    and parameters of the model to begin with, which are watched otherwise.
    """

    max_entries: int | None
    by_identity: bool
    visited: set[int]
    references: list[Tensor] = field(default_factory=list)

    def content(self, value: Any, objects: bool = True) -> Content:
        """Something hashable that is equal for equal contents."""
        kind = type(value)
        if kind in _PLAIN or _is_plain_tuple(value):
            return kind, repr(value)
        if isinstance(value, nn.Parameter) and id(value) in self.visited:
            return "parameter", id(value)
        # an object within another is read less deeply, and may be met again where more is read of it
        place = id(value) if objects else ~id(value)
        if {id(value), place} & self.visited:
            return (kind,)
        if isinstance(value, (bool, int, float, complex, str, bytes, bytearray, np.generic)):
            return kind, repr(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return kind, value.shape, value.dtype.str, _digest(np.ascontiguousarray(value).tobytes())
        if isinstance(value, _OPAQUE):
            return (kind,)
        self.visited.add(place)
        read = partial(self.content, objects=objects)
        if isinstance(value, np.ndarray):
            return kind, value.shape, tuple(map(read, value.flat))
        if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
            if self.max_entries is not None and len(value) > self.max_entries:
                parts = [*value, *value.values()] if isinstance(value, dict) else value
                return kind, len(value), hash(tuple(map(id, parts)))
            if isinstance(value, dict):
                own = tuple((name, read(part)) for name, part in getattr(value, "__dict__", {}).items())
                return kind, own, tuple((read(key), read(part)) for key, part in value.items())
            parts = tuple(map(read, value))
            return kind, frozenset(parts) if isinstance(value, (set, frozenset)) else parts
        # the attributes of an object, not those of the objects in it: a trainer holds the whole program
        attributes = _attributes_of(value) if objects else {}
        return kind, tuple((name, self.content(part, False)) for name, part in attributes.items())

    def _tensor(self, value: Tensor) -> Content:
        if is_functorch_wrapped_tensor(value):
            return (_RECORD,)
        plain = value.detach()
        identity = (id(value), 0 if value.is_inference() else value._version)
        if self.max_entries is not None and value.grad_fn is not None:
            return "derived", plain.shape  # from the parameters, as a normalised weight is in every pass
        large = self.max_entries is not None and plain.numel() > self.max_entries
        if plain.layout == torch.sparse_coo and not large and not plain.is_meta:
            parts = [_numbers(part.cpu()).numpy() for part in (plain._indices(), plain._values())]
            return "sparse", plain.shape, *(_digest(part.tobytes()) for part in parts)
        if large or not _in_memory(plain):
            self.references.append(value)
            return "tensor", plain.shape, *identity
        numbers = _numbers(plain.cpu()).numpy()
        content = "tensor", plain.shape, plain.dtype, _digest(numbers.tobytes())
        # a new tensor with the same numbers is computed in every pass, maybe from the parameters
        return (*content, *identity) if self.by_identity else content


def _attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object: in its dictionary and in slots."""
    declared = [base.__dict__.get("__slots__", ()) for base in type(value).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    own = ("__weakref__", "__dict__")
    in_slots = {name: getattr(value, name) for name in slots if name not in own and hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}


def is_fixed(value: Any) -> bool:
    """Whether an object's content is always the same: a stride, a number of channels, a name."""
    return type(value) in _PLAIN or _is_plain_tuple(value) or isinstance(value, _OPAQUE)


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and len(value) < 9 and _PLAIN.issuperset(map(type, value))


def read_later(value: Tensor | None, max_entries: int) -> bool:
    """Whether a tensor is small and on a GPU: to read it now would be to wait for all work there."""
    return (
        type(value) is Tensor
        and value.device.type != "cpu"
        and value.numel() <= max_entries
        and value.grad_fn is None
        and _in_memory(value)
    )


def copied_there(tensors: dict[T, Tensor]) -> dict[T, Tensor]:
    """Bytes of tensors as they are now, copied on their devices, which nobody waits for."""
    copies: dict[T, Tensor] = {}
    for device in {value.device for value in tensors.values()}:
        parts = {key: _numbers(value) for key, value in tensors.items() if value.device == device}
        together = torch.cat(list(parts.values())).split(list(map(len, parts.values())))
        copies |= dict(zip(parts, together, strict=True))
    return copies


def differing_copies(before: dict[T, Tensor], after: dict[T, Tensor]) -> list[T]:
    """Keys of both whose bytes are not the same; waits for the devices."""
    common = [key for key in before if key in after]
    return [key for key in common if not torch.equal(before[key], after[key].to(before[key].device))]


def _in_memory(value: Tensor) -> bool:
    """Whether a tensor is plain numbers in memory."""
    if is_functorch_wrapped_tensor(value):
        return False
    return value.layout == torch.strided and not (value.is_meta or value.is_quantized)


def _numbers(value: Tensor) -> Tensor:
    """The bytes of a tensor, one after another."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


_RECORD = "record"


def holds_record(content: Content) -> bool:
    """Whether there is a tensor of one record in it, which `torch.vmap` has left behind."""
    return isinstance(content, tuple) and (content[:1] == (_RECORD,) or any(map(holds_record, content)))


def restorer(value: Any, objects: bool = True) -> Callable[[], Any]:
    """A function that gives the same object with the contents it has now."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return partial(_restore_tensor, value, value.detach().clone())
    if isinstance(value, dict):
        return partial(_refill, value, value, {k: restorer(part, objects) for k, part in value.items()})
    if isinstance(value, (list, deque)):
        return partial(_refill, value, value, [restorer(part, objects) for part in value])
    if isinstance(value, tuple):
        return partial(_restore_parts, value, [restorer(part, objects) for part in value])
    if isinstance(value, (set, bytearray)):
        return partial(_restore_plain, value, value.copy())
    if isinstance(value, np.ndarray):
        return partial(_restore_array, value, value.copy())
    if objects and not isinstance(value, (nn.Module, nn.Parameter, *_OPAQUE)) and not is_fixed(value):
        own = getattr(value, "__dict__", {})
        parts = {key: restorer(part, False) for key, part in own.items()}
        slots = {key: part for key, part in _attributes_of(value).items() if key not in own}
        return partial(_restore_object, value, partial(_refill, value, own, parts), slots)
    return lambda: value


def _restore_parts(value: tuple[Any, ...], parts: list[Callable[[], Any]]) -> tuple[Any, ...]:
    for restored in parts:
        restored()
    return value


def _restore_plain(value: Any, copy: Any) -> Any:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(copy)
    return value


def _restore_array(value: Any, copy: Any) -> Any:
    value[...] = copy
    return value


def _restore_object(value: Any, dictionary: Callable[[], Any], slots: dict[str, Any]) -> Any:
    dictionary()
    for name, part in slots.items():
        object.__setattr__(value, name, part)
    return value


def _restore_tensor(value: Tensor, copy: Tensor) -> Tensor:
    same = torch.equal(value, copy)
    if same and _in_memory(value):  # zeros of another sign are equal
        same = torch.equal(_numbers(value), _numbers(copy))
    with torch.no_grad():
        if not same:
            value.copy_(copy)
    return value


def _refill(
    value: Any, contents: Any, parts: dict[Any, Callable[[], Any]] | list[Callable[[], Any]]
) -> Any:
    """The value, after its container of contents is filled with the restored parts."""
    contents.clear()
    if isinstance(parts, dict):
        contents.update({key: restored() for key, restored in parts.items()})
    else:
        contents.extend(restored() for restored in parts)
    return value


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 64 else hashlib.blake2b(data, digest_size=16).digest()
