"""Python state of modules: attributes that a forward pass changes depending on a record.

The tape keeps records apart in everything that is a tensor operation. A plain attribute (a running mean
as a Python float, the activations of the call before) goes past it: what one record leaves there enters
the next one's gradient, or the next step, without being clipped.
"""

import hashlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import ValueReadDetector
from hush.gradients.tree import tree_leaves, tree_map

_Place = tuple[int, str]
"""A module, by its number, and the name of an attribute or buffer of it."""

_NOT_WATCHED = frozenset(nn.Module().__dict__)
"""Parameters (the tape sees them), hooks, and whether it is training; buffers are watched one by one."""
_SMALL = 4096
"""Up to so many entries the contents of a tensor are compared in every step."""
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
        self._regardless: set[_Place] = set()
        """What forward passes change in a way that does not depend on a record."""
        self._constant: dict[_Place, _Content] = {}
        """The same, where the model asks for values: what it was for both records, and must stay."""
        self._before: dict[_Place, _Content] | None = None
        self._held: list[Tensor] = []
        """Tensors known by their identity: held, so that no other one can get it."""

    def begin(self) -> None:
        """Note the attributes as they are now."""
        reading = self._reading(_SMALL)
        self._before = self._contents(reading)
        self._held = reading.held

    def check(self) -> None:
        """Raise if an attribute has changed since `begin`, if that was called, before a release."""
        if self._before is None:
            return
        now = self._contents(self._reading(_SMALL))
        changed = [place for place in _differing(self._before, now) if place not in self._regardless]
        if any(place in self._constant for place in changed):
            full = self._contents(self._reading())
            changed = [place for place in changed if full.get(place) != self._constant.get(place)]
        if changed:
            raise Unsupported(self._reason(changed))
        self._before = None

    def probe(self, run: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> Any:
        """The value of `run` for a few records, after a check that the model keeps nothing of them.

        Args:
            run: One forward and backward pass over inputs and targets.
            inputs: Inputs of one or two records.
            targets: Their targets.

        Raises:
            Unsupported: an attribute took a value that depends on a record. It is put back.
        """
        restore = {place: _restorer(value) for place, value in self._values()}
        before = self._contents(self._reading(exact=True))
        refused = True
        try:
            with ValueReadDetector() as detector:
                result = run(inputs, targets)
            changed = _differing(before, self._contents(self._reading(exact=True)))
            if changed:
                self._put_back(changed, restore)
                after = []
                for row in range(len(next(tree_leaves(inputs)))):
                    one = partial(_row, row)
                    with _same_draws(self._model):
                        run(tree_map(inputs, one), tree_map(targets, one))
                    after.append(self._contents(self._reading()))
                    self._put_back(changed, restore)
                self._compare(changed, after)
                self._allow(changed, after[0], detector.reads_values)
            refused = False
        finally:
            if refused:
                self._put_back(_differing(before, self._contents(self._reading(exact=True))), restore)
        return result

    def _compare(self, changed: "list[_Place]", after: "list[dict[_Place, _Content]]") -> None:
        """Raise if what was changed is not the same for each of the records."""
        own = [
            place
            for place in changed
            if len({state.get(place) for state in after}) > 1 or _of_record(after[0].get(place))
        ]
        if own or len(after) == 1:
            raise Unsupported(self._reason(own or changed))

    def _allow(self, changed: list[_Place], after: "dict[_Place, _Content]", decided: bool) -> None:
        """Let these change, to the same contents only where values were asked for.

        Buffers are closed by the tape itself once a value was asked for.
        """
        modules = {number: module for number, _, module in self._modules()}
        for number, name in changed:
            if decided and name not in modules[number]._buffers:
                self._constant[number, name] = after.get((number, name))
            else:
                self._regardless.add((number, name))

    def _modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        named = [pair for name, root in self._roots.items() for pair in root.named_modules(prefix=name)]
        for number, (name, module) in enumerate(named):
            yield number, name, module

    def _values(self) -> Iterator[tuple[_Place, Any]]:
        for number, _, module in self._modules():
            for name, value in module.__dict__.items():
                if name not in _NOT_WATCHED:
                    yield (number, name), value
            for name, value in module._buffers.items():
                yield (number, name), value

    def _reading(self, most: int | None = None, *, exact: bool = False) -> "_Reading":
        return _Reading(most, exact, {id(module) for _, _, module in self._modules()})

    def _contents(self, reading: "_Reading") -> "dict[_Place, _Content]":
        return {place: reading.content(value) for place, value in self._values()}

    def _put_back(self, places: Iterable[_Place], restore: dict[_Place, Callable[[], Any]]) -> None:
        modules = {number: module for number, _, module in self._modules()}
        for number, name in places:
            module = modules[number]
            if (number, name) not in restore:
                module._buffers.pop(name, None)
                module.__dict__.pop(name, None)
                continue
            held = module._buffers if name in module._buffers else module.__dict__
            held[name] = restore[number, name]()

    def _reason(self, places: Iterable[_Place]) -> str:
        modules = {number: name for number, name, _ in self._modules()}
        names = [f"{modules[number]}.{name}".lstrip(".") for number, name in places]
        return (
            f"the model keeps {', '.join(names[:3])} from its forward pass: what one record leaves "
            "there enters the gradients of others without being clipped, or is released without "
            "noise. Compute it anew in every call, or set it between steps from what is public."
        )


_Content = Any
"""Something hashable that is equal for equal contents."""


class _Reading:
    """Reads numbers, tensors, containers and the attributes of objects; each object once.

    With `most`, longer tensors and containers are known by their identity or length alone; `exact` tells
    a tensor from another one with the same numbers.
    """

    def __init__(self, most: int | None, exact: bool, known: set[int]) -> None:
        self.held: list[Tensor] = []
        self._most = most
        self._exact = exact
        self._known = known

    def content(self, value: Any, objects: bool = True) -> _Content:
        kind = type(value)
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
            return kind, repr(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return kind, value.shape, value.dtype.str, _digest(np.ascontiguousarray(value).tobytes())
        if isinstance(value, _OPAQUE) or id(value) in self._known:
            return (kind,)
        self._known.add(id(value))
        read = partial(self.content, objects=objects)
        if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
            if self._most is not None and len(value) > self._most:
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
        if self._most is not None and value.grad_fn is not None:
            return "derived", plain.shape  # from the parameters, as a normalised weight is in every pass
        large = self._most is not None and plain.numel() > self._most
        if large or plain.layout != torch.strided or plain.is_meta or plain.is_quantized:
            self.held.append(value)
            return "tensor", plain.shape, *identity
        numbers = plain.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        content = "tensor", plain.shape, plain.dtype, _digest(numbers.tobytes())
        # a new tensor with the same numbers is computed in every pass, maybe from the parameters
        return (*content, *identity) if self._exact else content


_RECORD = "record"


@contextmanager
def _same_draws(model: nn.Module) -> Iterator[None]:
    """Let what is drawn be the same each time."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield


def _of_record(content: _Content) -> bool:
    """Whether there is a tensor of one record in it, which `torch.vmap` has left behind."""
    return isinstance(content, tuple) and (content[:1] == (_RECORD,) or any(map(_of_record, content)))


def _differing(before: dict[_Place, _Content], now: dict[_Place, _Content]) -> list[_Place]:
    return [place for place in before | now if before.get(place) != now.get(place)]


def _restorer(value: Any, objects: bool = True) -> Callable[[], Any]:
    """A function that gives the same object with the contents it has now."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return partial(_tensor_back, value, value.detach().clone())
    if isinstance(value, dict):
        return partial(_dict_back, value, {key: _restorer(part, objects) for key, part in value.items()})
    if isinstance(value, (list, deque)):
        return partial(_list_back, value, [_restorer(part, objects) for part in value])
    if objects and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, *_OPAQUE)):
        parts = {key: _restorer(part, False) for key, part in vars(value).items()}
        return partial(_object_back, value, parts)
    return lambda: value


def _object_back(value: Any, parts: dict[str, Callable[[], Any]]) -> Any:
    _dict_back(vars(value), parts)
    return value


def _tensor_back(value: Tensor, copy: Tensor) -> Tensor:
    with torch.no_grad():
        if not torch.equal(value, copy):
            value.copy_(copy)
    return value


def _dict_back(value: dict[Any, Any], parts: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    value.clear()
    value.update({key: back() for key, back in parts.items()})
    return value


def _list_back(value: Any, parts: list[Callable[[], Any]]) -> Any:
    value.clear()
    value.extend(back() for back in parts)
    return value


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 64 else hashlib.blake2b(data, digest_size=16).digest()


def _row(row: int, rows: Tensor) -> Tensor:
    return rows[row : row + 1]
