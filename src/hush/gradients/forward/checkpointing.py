"""Gradient checkpointing: a segment's activations are recomputed in the backward pass, not kept.

`torch.utils.checkpoint` recomputes a segment of the model by calling it again, after `vmap` and the
recording are over. Here it is called again under both. As in its form without reentrant autograd, the
first pass leaves the graph, with a `Placeholder` for each tensor that the graph saves; the first that
the backward pass asks for starts a second pass, whose saved tensors fill the placeholders in the order
in which they were left, and whose own graph is dropped. So every layer's backward pass runs once, and
leaves its terms once. The form with reentrant autograd is computed in the same way: it has the same
gradients, and those that it loses (of tensors that are no arguments of the segment) as well.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_current_level
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import random_state, set_random_state
from hush.gradients.precision import capturing_cuda_graph
from hush.gradients.tree import tree_leaves

if TYPE_CHECKING:
    from hush.gradients.forward.interception import Recording


@dataclass(frozen=True, eq=False)
class CheckpointCall:
    """A call of `torch.utils.checkpoint.checkpoint`."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    contexts: Callable[[], tuple[Any, Any]] = torch_checkpoint.noop_context_fn
    """Makes the contexts for the first and the second pass (`context_fn`)."""

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors among its arguments, and among those bound to the function beforehand."""
        yield from tree_leaves((self.args, self.kwargs))
        if isinstance(self.function, partial):
            yield from tree_leaves((self.function.args, self.function.keywords))


FirstPass = Callable[[CheckpointCall], AbstractContextManager[None] | None]
"""The context in which a call runs its function; None leaves the call to torch."""


class SavedTensors(saved_tensors_hooks):
    """Functions of what autograd saves, of the tape's own: those of a model are refused."""


_first_passes: list[FirstPass] = []
_enter_hooks = saved_tensors_hooks.__enter__
_generator = torch_checkpoint._checkpoint_without_reentrant_generator
_signature = inspect.signature(_generator)
_function = torch_checkpoint.CheckpointFunction


@contextmanager
def checkpoints_replaced(first_pass: FirstPass) -> Iterator[None]:
    """Context in which a call of `torch.utils.checkpoint` runs its function in another context.

    However a model came by the function `checkpoint`, it looks two names up when it is called. A model's
    own functions of what autograd saves are refused.
    """
    _first_passes.append(first_pass)
    saved_tensors_hooks.__enter__ = _enter_own_hooks  # type: ignore[method-assign]
    torch_checkpoint._checkpoint_without_reentrant_generator = _without_reentrant
    torch_checkpoint.CheckpointFunction = _Reentrant  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        _first_passes.pop()
        if not _first_passes:
            saved_tensors_hooks.__enter__ = _enter_hooks  # type: ignore[method-assign]
            torch_checkpoint._checkpoint_without_reentrant_generator = _generator
            torch_checkpoint.CheckpointFunction = _function  # type: ignore[misc]


def _enter_own_hooks(hooks: saved_tensors_hooks) -> None:
    """In place of `saved_tensors_hooks.__enter__`: a model's would be given all records."""
    copies = type(hooks) is save_on_cpu  # as they are, and back
    if not copies and not isinstance(hooks, SavedTensors) and maybe_current_level() is not None:
        raise Unsupported(
            "the model uses torch.autograd.graph.saved_tensors_hooks: its functions are given what "
            "autograd saves of all records at once (and may scale it by the largest, say), so that one "
            "record would change the others' gradients. Leave it out: gradient checkpointing and "
            "save_on_cpu save memory, too."
        )
    _enter_hooks(hooks)


def _without_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what `checkpoint` runs before and after its function, with reentrant autograd off."""
    bound = _signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments
    call = CheckpointCall(named["fn"], named["args"], named["kwargs"], named["context_fn"])
    context = _first_passes[-1](call)
    if context is None:
        yield from _generator(*args, **kwargs)
    else:
        with context:
            yield


class _Reentrant:
    """In place of the function that `checkpoint` applies with reentrant autograd on."""

    @staticmethod
    def apply(segment: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        context = _first_passes[-1](CheckpointCall(segment, args))
        if context is None:
            return _function.apply(segment, preserve_rng_state, *args)
        with context:
            return segment(*args)


def checkpointed_segments(recording: "Recording") -> AbstractContextManager[None]:
    """Context in which checkpointed segments are recomputed under the recording."""

    def first_pass(call: CheckpointCall) -> AbstractContextManager[None] | None:
        # none in another thread, whose model is not recorded
        return None if maybe_current_level() is None else Segment(recording, call).first_pass()

    return checkpoints_replaced(first_pass)


class Segment:
    """A part of the forward pass that is run again, from the same state, when its activations are due.

    The tensors that it is given belong to a `vmap` that is over by then. They are used as they are: a
    tensor knows its `vmap` by the level alone, and the second one is at the same level.
    """

    def __init__(self, recording: "Recording", call: CheckpointCall) -> None:
        recording.check_level("gradient checkpointing")
        if capturing_cuda_graph():
            raise Unsupported(
                "gradient checkpointing while a CUDA graph is captured: the state of the random "
                "numbers, by which a segment is recomputed with the same draws, is not known before the "
                "graph is replayed. Leave out replay=True, or turn gradient checkpointing off."
            )
        self._recording = ref(recording)  # whose terms hold the graph, which holds this
        self._place = recording.place
        self._call = call
        self._inputs = [_plain(value) for value in call.tensors()]
        self._versions = [value._version for value in self._inputs]
        self._random_state = random_state()
        self._autocast = _autocast_state({"cpu", recording.device.type})
        self._contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = call.contexts()
        self._placeholders: list[ref[Placeholder]] = []

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Context in which what autograd saves is replaced by placeholders."""
        if not torch.is_grad_enabled():
            yield
            return

        def pack(value: Tensor) -> Placeholder:
            placeholder = Placeholder(self, value)
            self._placeholders.append(ref(placeholder))
            return placeholder

        with SavedTensors(pack, Placeholder.unpack), self._contexts[0]:
            yield

    def recompute(self) -> None:
        """Run the segment again, and fill the placeholders that are still needed."""
        recording = self._recording()
        if recording is None:
            raise RuntimeError("a checkpointed segment is recomputed after its recording is over")
        if [value._version for value in self._inputs] != self._versions:
            raise Unsupported(
                "a segment of the model that is recomputed (gradient checkpointing) has its inputs "
                "changed in place: the second time it would compute something else, and a record's "
                "gradient be that of no loss. Make a new tensor in place of x.add_(...) or inplace=True."
            )
        filled = 0

        def pack(value: Tensor) -> None:
            nonlocal filled
            if filled < len(self._placeholders):
                placeholder = self._placeholders[filled]()
                if placeholder is not None:
                    placeholder.fill(value)
            filled += 1

        # what the second pass draws was drawn already: afterwards the generators stand where they stood
        now = random_state()
        set_random_state(self._random_state)
        try:
            with torch.enable_grad(), self._autocast(), SavedTensors(pack, _never_unpacked):
                recording.run_again(self._second_pass, self._place)
        finally:
            set_random_state(now)
        if filled != len(self._placeholders):
            _refuse_other_work(f"it saved {filled} tensors and not {len(self._placeholders)}")

    def _second_pass(self) -> None:
        with self._contexts[1]:
            self._call.run()


class Placeholder:
    """A tensor of a segment's graph, which is there once the segment was run again."""

    def __init__(self, segment: Segment, value: Tensor) -> None:
        self._segment = segment
        self._kind = value.shape, value.dtype, value.device
        self._value: Tensor | None = None
        self._version = 0

    def fill(self, value: Tensor) -> None:
        kind = value.shape, value.dtype, value.device
        if kind != self._kind:
            _refuse_other_work(f"it saved a tensor of {kind[0]}, {kind[1]} and not {self._kind}")
        # without the second pass's graph, which is not used
        self._value, self._version = value.detach(), value._version

    def unpack(self) -> Tensor:
        """The tensor; the segment is run again for the first of its placeholders."""
        if self._value is None:
            self._segment.recompute()
        if self._value is None:
            raise RuntimeError("a tensor of a checkpointed segment was not recomputed")
        if self._value._version != self._version:
            # the text of autograd's own check, which does not see tensors that hooks hand back
            raise RuntimeError("a tensor to be differentiated was modified by an inplace operation")
        return self._value


def _refuse_other_work(what: str) -> None:
    raise Unsupported(
        "a segment of the model that is recomputed (gradient checkpointing) did other work the second "
        f"time ({what}): a record's gradient would be that of no loss. Let it depend on its inputs, the "
        "parameters and torch's random numbers alone, or turn gradient checkpointing off."
    )


def _never_unpacked(packed: None) -> Tensor:
    raise RuntimeError("the graph of a segment's second pass has no backward pass")


def _plain(value: Tensor) -> Tensor:
    """The tensor of all records below the wrapper that `vmap` gives a model; it counts the writes."""
    return get_unwrapped(value) if is_batchedtensor(value) else value


def _autocast_state(devices: set[str]) -> Callable[[], AbstractContextManager[None]]:
    """A context that brings the present autocast state back, each time it is asked for."""
    options = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in sorted(devices)
    ]
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def state() -> Iterator[None]:
        with ExitStack() as stack:
            for option in options:
                stack.enter_context(torch.autocast(*option, cache_enabled=cached))
            yield

    return state
