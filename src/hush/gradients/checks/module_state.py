"""Python state of modules: attributes that a forward pass changes depending on a record.

The tape isolates records in tensor operations. A plain attribute (a running mean as a Python float, the
activations of the call before) escapes it: what one record leaves there enters the next one's gradient,
or the next step, without being clipped.
"""

import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import same_draws
from hush.gradients.checks.host_randomness import HostState, check_host_draws, host_random_state
from hush.gradients.tree import tree_leaves, tree_map

_Attribute = tuple[int, str]
"""A module, by its number, and the name of an attribute or buffer."""

_NOT_WATCHED = frozenset(nn.Module().__dict__)
"""Parameters (which the tape covers), hooks, and the training flag; buffers are watched one by one."""
_COMPARED_ENTRIES = 4096
"""The largest tensor whose contents are compared in every step."""
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


class ModuleState:
    """Watches the plain attributes and the buffers of a model, and of a loss that is a module.

    **Guarantee.** Where `check` does not raise, no watched attribute has changed since `begin`, except
    those that took the same value for two different records in `probe` (a cache of masks or positions, a
    counter of calls). Of a model that turned values into Python numbers there, these too must stay what
    they were. State outside of modules, such as a global dictionary, is not seen.
    """

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        self._model = model
        self._roots = {"": model, **({"loss": loss} if isinstance(loss, nn.Module) else {})}
        self._record_independent: set[_Attribute] = set()
        """Attributes that forward passes change in a way that does not depend on a record."""
        self._constant: dict[_Attribute, _Content] = {}
        """The same, where the model reads values: their contents for both records, which must stay."""
        self._before: dict[_Attribute, _Content] | None = None
        self._host_state: HostState = ()
        self._reads_values = True
        """Whether the model turns a record into a Python number: until a tape says that it does not."""
        self._references: list[Tensor] = []
        """Tensors compared by identity: referenced, so that no other one can get it."""

    @property
    def changing(self) -> bool:
        """Whether forward passes change attributes: known after `probe`."""
        return bool(self._record_independent or self._constant)

    @property
    def before(self) -> object:
        """Contents of the attributes when the step began; None outside of one."""
        return self._before

    def begin(self) -> None:
        """Take a snapshot of the attributes, and of the host's random state."""
        self._before, self._references = self._snapshot(_COMPARED_ENTRIES)
        self._host_state = host_random_state()

    def check(self) -> None:
        """Raise if an attribute has changed since `begin`, if that was called, before a release.

        So too if numpy or Python's `random` was drawn from.
        """
        if self._before is None:
            return
        check_host_draws(self._host_state)
        after, _ = self._snapshot(_COMPARED_ENTRIES)
        changed = [key for key in _differing(self._before, after) if key not in self._record_independent]
        if any(key in self._constant for key in changed):
            full, _ = self._snapshot()
            changed = [key for key in changed if full.get(key) != self._constant.get(key)]
        if changed:
            raise Unsupported(self._reason(changed))
        self._before = None

    def probe(self, run: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> Any:
        """The value of `run` for a few records, after a check that the model keeps nothing of them.

        Args:
            run: One forward and backward pass over inputs and targets; a tape says whether it reads
                values, and other results are taken to be of the model of the tape before.
            inputs: Inputs of one or two records.
            targets: Their targets.

        Raises:
            Unsupported: an attribute took a value that depends on a record. It is put back.
        """
        restore = {key: _restorer(value) for key, value in self._values(self._modules())}
        before, _ = self._snapshot(by_identity=True)
        host_state = host_random_state()
        refused = True
        try:
            result = run(inputs, targets)
            check_host_draws(host_state)
            self._reads_values = getattr(result, "reads_values", self._reads_values)
            changed = _differing(before, self._snapshot(by_identity=True)[0])
            if changed:
                self._restore(changed, restore)
                after = []
                for row in range(len(next(tree_leaves(inputs)))):
                    only_row = partial(_row, row)
                    with same_draws(self._model):
                        run(tree_map(inputs, only_row), tree_map(targets, only_row))
                    after.append(self._snapshot()[0])
                    self._restore(changed, restore)
                self._compare(changed, after)
                self._allow(changed, after[0])
            refused = False
        finally:
            if refused:
                self._restore(_differing(before, self._snapshot(by_identity=True)[0]), restore)
        return result

    def _compare(self, changed: "list[_Attribute]", after: "list[dict[_Attribute, _Content]]") -> None:
        """Raise if a changed attribute depends on the record."""
        dependent = [
            key
            for key in changed
            if len({state.get(key) for state in after}) > 1 or _holds_record(after[0].get(key))
        ]
        if dependent or len(after) == 1:
            raise Unsupported(self._reason(dependent or changed))

    def _allow(self, changed: list[_Attribute], after: "dict[_Attribute, _Content]") -> None:
        """Let these attributes change, to the same contents only where the model reads values.

        Buffers are closed by the tape itself once a value was read.
        """
        modules = self._modules()
        for number, name in changed:
            if self._reads_values and name not in modules[number][1]._buffers:
                self._constant[number, name] = after.get((number, name))
            else:
                self._record_independent.add((number, name))

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """All modules with their names; an attribute knows its own by its place here."""
        return [pair for name, root in self._roots.items() for pair in root.named_modules(prefix=name)]

    def _values(self, modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[_Attribute, Any]]:
        for number, (_, module) in enumerate(modules):
            for name, value in module.__dict__.items():
                if name not in _NOT_WATCHED:
                    yield (number, name), value
            for name, value in module._buffers.items():
                yield (number, name), value

    def _snapshot(
        self, max_entries: int | None = None, *, by_identity: bool = False
    ) -> "tuple[dict[_Attribute, _Content], list[Tensor]]":
        """Contents of all watched attributes, and the tensors that were compared by identity."""
        modules = self._modules()
        reader = _Reader(max_entries, by_identity, {id(module) for _, module in modules})
        return {key: reader.content(value) for key, value in self._values(modules)}, reader.references

    def _restore(
        self, attributes: Iterable[_Attribute], restore: dict[_Attribute, Callable[[], Any]]
    ) -> None:
        modules = self._modules()
        for number, name in attributes:
            module = modules[number][1]
            if (number, name) not in restore:
                module._buffers.pop(name, None)
                module.__dict__.pop(name, None)
                continue
            owner = module._buffers if name in module._buffers else module.__dict__
            owner[name] = restore[number, name]()

    def _reason(self, attributes: Iterable[_Attribute]) -> str:
        modules = self._modules()
        names = [f"{modules[number][0]}.{name}".lstrip(".") for number, name in attributes]
        return (
            f"the model keeps {', '.join(names[:3])} from its forward pass: what one record leaves "
            "there enters the gradients of others without being clipped, or is released without "
            "noise. Compute it anew in every call, or set it between steps from what is public."
        )


_Content = Any
"""Something hashable that is equal for equal contents."""


@dataclass(eq=False)
class _Reader:
    """Reads numbers, tensors, containers and the attributes of objects; each object once.

    Tensors and containers of more than `max_entries` are compared by identity or length alone;
    `by_identity` tells a tensor from another one with the same numbers.
    """

    max_entries: int | None
    by_identity: bool
    visited: set[int]
    references: list[Tensor] = field(default_factory=list)

    def content(self, value: Any, objects: bool = True) -> _Content:
        kind = type(value)
        # nearly all attributes are these: a stride, a number of channels, a name
        if kind in _PLAIN or (kind is tuple and len(value) < 9 and _PLAIN.issuperset(map(type, value))):
            return kind, repr(value)
        if isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            return kind, repr(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return kind, value.shape, value.dtype.str, _digest(np.ascontiguousarray(value).tobytes())
        if isinstance(value, _OPAQUE) or id(value) in self.visited:
            return (kind,)
        self.visited.add(id(value))
        read = partial(self.content, objects=objects)
        if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
            if self.max_entries is not None and len(value) > self.max_entries:
                return kind, len(value)
            if isinstance(value, dict):
                return kind, tuple((read(key), read(part)) for key, part in value.items())
            parts = tuple(map(read, value))
            return kind, frozenset(parts) if isinstance(value, (set, frozenset)) else parts
        # the attributes of an object, not those of the objects in it: a trainer holds the whole program
        return kind, self.content(vars(value), False) if objects and hasattr(value, "__dict__") else ()

    def _tensor(self, value: Tensor) -> _Content:
        if isinstance(value, nn.Parameter):
            return "parameter", id(value)
        if is_functorch_wrapped_tensor(value):
            return (_RECORD,)
        plain = value.detach()
        identity = (id(value), 0 if value.is_inference() else value._version)
        if self.max_entries is not None and value.grad_fn is not None:
            return "derived", plain.shape  # from the parameters, as a normalised weight is in every pass
        large = self.max_entries is not None and plain.numel() > self.max_entries
        if large or plain.layout != torch.strided or plain.is_meta or plain.is_quantized:
            self.references.append(value)
            return "tensor", plain.shape, *identity
        numbers = plain.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        content = "tensor", plain.shape, plain.dtype, _digest(numbers.tobytes())
        # a new tensor with the same numbers is computed in every pass, maybe from the parameters
        return (*content, *identity) if self.by_identity else content


_RECORD = "record"


def _holds_record(content: _Content) -> bool:
    """Whether there is a tensor of one record in it, which `torch.vmap` has left behind."""
    return isinstance(content, tuple) and (content[:1] == (_RECORD,) or any(map(_holds_record, content)))


def _differing(
    before: dict[_Attribute, _Content], after: dict[_Attribute, _Content]
) -> list[_Attribute]:
    return [key for key in before | after if before.get(key) != after.get(key)]


def _restorer(value: Any, objects: bool = True) -> Callable[[], Any]:
    """A function that gives the same object with the contents it has now."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return partial(_restore_tensor, value, value.detach().clone())
    if isinstance(value, dict):
        return partial(_refill, value, value, {k: _restorer(part, objects) for k, part in value.items()})
    if isinstance(value, (list, deque)):
        return partial(_refill, value, value, [_restorer(part, objects) for part in value])
    if objects and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, *_OPAQUE)):
        parts = {key: _restorer(part, False) for key, part in vars(value).items()}
        return partial(_refill, value, vars(value), parts)
    return lambda: value


def _restore_tensor(value: Tensor, copy: Tensor) -> Tensor:
    with torch.no_grad():
        if not torch.equal(value, copy):
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


def _row(row: int, rows: Tensor) -> Tensor:
    return rows[row : row + 1]
