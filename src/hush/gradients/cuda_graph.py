"""Clipped sums of physical batches, computed by replaying CUDA graphs.

For small models, launching kernels takes longer than running them. A CUDA graph launches all kernels at
once. A batch is padded to one of a few sizes with copies of its first record, which get weight 0, so a
few graphs cover batches of random size. Computations that synchronise host and GPU cannot be captured.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hush.clipping.norms import L2Linf, Linf
from hush.core.errors import PerformanceWarning, Unsupported, shorten
from hush.core.parts import ClippedSum, Clipping
from hush.gradients.recording import host_draws_restored, host_states, record
from hush.gradients.tape import MaskedTape
from hush.gradients.tree import Loss, Views, tree_leaves, tree_map

_MOST_GRAPHS = 64
_MOST_CHANGES = 16
"""Maximum number of changes of the captured state; beyond it, repeated captures are too expensive."""

_SIZE_MULTIPLE = 64
_SIZES_PER_OCTAVE = 16
"""Number of padded sizes per factor of two."""

_WARM_UP = 3
"""Number of warm-up passes before a capture; they load and select kernels."""
_LONGEST_REASON = 300
_PLAIN = frozenset((bool, int, float, str))

_replaced_generators = 0
"""Number of failed captures that replaced the state of torch's generator and invalidated graphs."""


class CaptureError(Exception):
    """Raised if a computation cannot be captured as a CUDA graph."""


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """Captured CUDA graph and its static memory."""

    replay: Callable[[], None]
    output: Any
    """Static output; each replay overwrites it."""
    read: list[torch.UntypedStorage]
    """External memory, kept alive because the graph refers to it by address."""


@dataclass(frozen=True, eq=False)
class BatchGraph:
    """Clipped sum of a padded batch as a captured graph."""

    captured: CapturedGraph
    inputs: Any
    targets: Any
    present: Tensor

    def fill(self, inputs: Any, targets: Any, present: Tensor | None) -> None:
        """Copy a batch into the graph's memory, padded with copies of its first record."""
        records = len(next(tree_leaves(inputs)))
        memories, given = tree_leaves((self.inputs, self.targets)), tree_leaves((inputs, targets))
        for memory, rows in zip(memories, given, strict=True):
            if records == len(memory):
                memory.copy_(rows)
            else:
                memory[:records] = rows
                memory[records:] = rows[0]
        self.present[:records] = True if present is None else present
        self.present[records:] = False


class Replay:
    """Clipped sums of padded batches, computed by replaying a captured CUDA graph if possible.

    **Guarantee.** The layout of a batch (positions and shapes) determines the rounding of kernels. It
    depends only on the number of slots. A batch that is computed without a graph (it cannot be captured,
    or a gradient is not finite) has the same padding. See docs/guarantees/tape.md, 8.

    Graphs are captured again if a parameter or buffer moves or is frozen or unfrozen, if autocast or an
    allowed precision changes, or if a module attribute that is a number, string or boolean changes
    (training mode, a dropout probability). Other changes to forward(), such as a global variable, are
    not detected. Each replay draws fresh random numbers on the GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        clipping: Clipping,
        views: Views | None = None,
        *,
        most_records: int | None = None,
        required: bool = True,
    ) -> None:
        """Create a replay without captured graphs.

        Args:
            model, loss, views: As in `record`.
            clipping: Clipping rule with one block.
            most_records: Physical batch size, which limits the padding.
            required: Whether to raise if a batch cannot be captured. If False, warn once and compute the
                batch without a graph.
        """
        self._model = model
        self._loss = loss
        self._clipping = clipping
        self._views = views
        # materialise each record that may be clamped, as graphs do, to round sums identically
        self._materialise = (lambda values: values) if isinstance(clipping, (Linf, L2Linf)) else None
        self._most_records = most_records
        self._required = required
        self._graphs: dict[Any, BatchGraph | None] = {}
        self._pool: Any = None  # shared by the graphs, which never run concurrently
        self._given: Any = None
        self._trained: set[tuple[int, int]] = set()
        """Addresses and sizes of the trained parameters when the graphs were captured."""
        self._unconfirmed = False
        """Whether graphs were replayed since the last comparison of the captured state."""
        self._stale = False
        """Whether a replay since the last call of `failed` used an outdated state."""
        self._changes = 0
        self._explained = False
        self._finite: Tensor | None = None
        """Whether all gradients were finite in the replays since the last call of `failed`."""

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        present: Tensor | None = None,
        *,
        randomness: Callable[..., AbstractContextManager[None]] = lambda **_: nullcontext(),
        verify: bool = True,
    ) -> ClippedSum:
        """The clipped sum of one batch.

        Args:
            inputs, targets: As in `record`.
            present: Mask of non-empty slots; None if no slot is empty.
            randomness: Context that seeds torch's generators; with `host=False`, only the generator of
                the GPU.
            verify: Whether to compare the captured state before the replay, wait for the GPU, and
                recompute the batch without a graph if the replay is invalid. If False,
                `fits(parameters)` must be true, and the caller must call `failed` before using the sum.

        Returns:
            The clipped sum, possibly in the graph's memory, which the next replay overwrites.
        """
        records = len(next(tree_leaves(inputs)))
        size = padded_size(records, self._most_records)
        key = size, signature(inputs), signature(targets)
        graph = None if verify else self._graphs.get(key)
        if graph is not None:
            self._unconfirmed = True
        else:
            self._forget_if_changed()
            if key not in self._graphs:
                self._graphs[key] = self._capture(inputs, targets, size)
            graph = self._graphs[key]
        if graph is None:
            rows, labels = tree_map((inputs, targets), lambda rows: pad(rows, size))
            slots = torch.zeros(size, dtype=torch.bool, device=next(tree_leaves(inputs)).device)
            slots[:records] = True if present is None else present
            with randomness():
                return self.clip_padded(rows, labels, slots)
        graph.fill(inputs, targets, present)
        with randomness(host=False):  # captured models do not draw on the CPU
            device = graph.present.device
            shared = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
            before = [source.get_state() for source in shared] if verify else []
            graph.captured.replay()
            if not verify or not self.failed():
                output: ClippedSum = graph.captured.output
                return output
            # recompute with the same positions, shapes and random numbers
            for source, state in zip(shared, before, strict=True):
                source.set_state(state)
            return self.clip_padded(graph.inputs, graph.targets, graph.present)

    @property
    def captured(self) -> bool:
        """Whether a graph was captured."""
        return any(graph is not None for graph in self._graphs.values())

    def fits(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the captured graphs train exactly these parameters."""
        return {(value.data_ptr(), value.numel()) for value in parameters} == self._trained

    def failed(self) -> bool:
        """Whether a replay since the last call is invalid; waits for the GPU.

        A replay is invalid if a gradient was not finite or the captured state had changed.
        """
        if self._unconfirmed:  # compare while the GPU is busy
            self._forget_if_changed()
        stale, self._stale = self._stale, False
        if self._finite is None or bool(self._finite):
            return stale
        self._finite.fill_(True)
        return True

    def clip_padded(self, inputs: Any, targets: Any, present: Tensor) -> ClippedSum:
        """Compute the clipped sum of a padded batch without a graph."""
        tape = record(self._model, self._loss, inputs, targets, self._views)
        return self._clipping.clip(MaskedTape(tape, present), self._materialise)

    def _capture(self, inputs: Any, targets: Any, size: int) -> BatchGraph | None:
        """Capture a graph for batches of this shape; None if they are computed without a graph."""
        if not self._required and self._changes > _MOST_CHANGES:
            self._explain("attributes of the model that forward() reads change in most steps")
            return None
        if not self._required and len(self._graphs) >= _MOST_GRAPHS:
            return None
        # static inputs of the graph
        rows, labels = tree_map((inputs, targets), lambda value: pad(value[:1], size).clone())
        device = next(tree_leaves(inputs)).device
        present = torch.ones(size, device=device, dtype=torch.bool)
        if self._finite is None:
            self._finite = torch.ones((), device=device, dtype=torch.bool)
        all_finite = self._finite
        before = all_finite.clone()  # result of earlier replays of this step

        def work() -> ClippedSum:
            """The clipped sum, or zero if a gradient or the content of an empty slot is not finite."""
            clipped = self.clip_padded(rows, labels, present)
            total = {name: part.contiguous() for name, part in clipped.total.items()}
            # empty slots have weight 0, but 0 times their gradient may not be finite
            lengths = torch.stack([norm.double() for norm in torch._foreach_norm(list(total.values()))])
            finite = lengths.isfinite().all() & (clipped.skipped == 0)
            all_finite.logical_and_(finite)
            for (
                part
            ) in total.values():  # in place, because the graph would keep a second copy of all sums
                part.masked_fill_(~finite, 0.0)
            return replace(clipped, total=total)

        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        try:
            captured = capture_graph(work, self._pool)
        except CaptureError as error:
            self._pool = None
            self._explain(str(error))
            return None
        finally:
            all_finite.copy_(before)
        return BatchGraph(captured, rows, labels, present)

    def _explain(self, reason: str) -> None:
        """Raise, or warn once, that a batch cannot be captured."""
        if self._required:
            raise Unsupported(
                f"replay=True needs a CUDA graph, and this model cannot be captured: {reason}. Leave "
                "replay out to compute steps without a graph."
            )
        if self._explained:
            return
        self._explained = True
        warnings.warn(
            f"steps of this model are limited by the host and cannot be captured as a CUDA graph: "
            f"{reason}. They are computed without a graph; replay=False silences this warning.",
            PerformanceWarning,
            stacklevel=2,
        )

    def _forget_if_changed(self) -> None:
        """Drop all graphs if the captured state has changed."""
        unconfirmed, self._unconfirmed = self._unconfirmed, False
        now = given(self._model, self._loss)
        if now == self._given:
            return
        if unconfirmed:
            self._stale = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # graphs may be running
        if self._graphs:
            self._changes += 1
        trained = [value for value in self._model.parameters() if value.requires_grad]
        self._trained = {(value.data_ptr(), value.numel()) for value in trained}
        self._graphs.clear()
        self._given = now
        self._pool = None  # earlier graphs may still use its memory


def padded_size(records: int, most: int | None = None) -> int:
    """Padded size of a batch, from its number of slots and the physical batch size."""
    multiple = max(_SIZE_MULTIPLE, (1 << records.bit_length() >> 1) // _SIZES_PER_OCTAVE)
    size: int = -(-records // multiple) * multiple
    return size if most is None else max(records, min(size, most))


def pad(rows: Tensor, size: int) -> Tensor:
    """Rows padded with copies of the first row."""
    return torch.cat([rows, rows[:1].expand(size - len(rows), *rows.shape[1:])])


def signature(value: Any) -> Any:
    """Structure, shapes and dtypes of a tree of tensors, without the number of records."""
    if isinstance(value, Tensor):
        return value.shape[1:], value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), *map(signature, value)
    if isinstance(value, dict):
        return tuple((key, signature(part)) for key, part in value.items())
    return repr(value)


def given(model: nn.Module, loss: Any) -> tuple[Any, ...]:
    """State of torch, the model and the loss that a captured graph depends on."""
    criterion = getattr(loss, "loss", loss)
    roots = [model, criterion] if isinstance(criterion, nn.Module) else [model]
    modules = [module for root in roots for module in root.modules()]
    own = [table for m in modules for table in (m._parameters, m._buffers)]
    values = [value for table in own for value in table.values() if value is not None]
    backends, products = torch.backends, torch.backends.cuda.matmul
    return (
        [(id(module), id(module.__dict__.get("forward"))) for module in modules],
        [value for module in modules for value in module.__dict__.values() if type(value) in _PLAIN],
        [(value.data_ptr(), value.requires_grad) for value in values],
        (_replaced_generators, torch.are_deterministic_algorithms_enabled()),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        (torch.get_float32_matmul_precision(), products.allow_tf32, backends.cudnn.allow_tf32),
        (products.allow_fp16_reduced_precision_reduction, backends.cuda.cudnn_sdp_enabled()),
        (products.allow_bf16_reduced_precision_reduction, backends.cuda.math_sdp_enabled()),
        (backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled()),
        (backends.cudnn.enabled, backends.cudnn.benchmark),
    )


def _cpu_states() -> tuple[Any, ...]:
    """States of the CPU generators, which graphs do not advance."""
    return *host_states(), torch.default_generator.get_state().numpy().tobytes()


def capture_graph(work: Callable[[], Any], pool: Any) -> CapturedGraph:
    """Capture a computation on the current device as a CUDA graph.

    The random states of torch, NumPy and Python are restored, so the capture does not affect later
    draws. After a `CaptureError` the pool is unusable.
    """
    device = torch.cuda.current_device()
    shared = torch.cuda.default_generators[device]
    generators = [torch.default_generator, shared]
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with _capturing(generators) as undraw:
        try:
            with torch.cuda.stream(side):
                before = _cpu_states()
                for _ in range(_WARM_UP - 1):
                    work()
                with _ExternalMemory() as memory:
                    work()
                if before != _cpu_states():
                    raise CaptureError(
                        "the model draws random numbers on the CPU, and a graph would repeat them"
                    )
                undraw()
                graph, output = _captured(work, pool, shared)
                return CapturedGraph(graph.replay, output, list(memory.external.values()))
        except CaptureError:
            raise
        except Exception as error:  # raised by the model, the driver or the allocator
            first = str(error).split("\n", maxsplit=1)[0]
            raise CaptureError(shorten(first, _LONGEST_REASON)) from error
        finally:
            torch.cuda.current_stream().wait_stream(side)


def _captured(
    work: Callable[[], Any], pool: Any, shared: torch.Generator
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a CUDA graph after a warm-up; return the graph and its static output."""
    global _replaced_generators
    graph = torch.cuda.CUDAGraph()
    fresh = shared.clone_state()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # release the memory of the warm-up, which the graph cannot use
    output, failed, waiting = None, None, torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns about undetected synchronisation and empty graphs
        warnings.simplefilter("ignore")
        # do not restrict other threads, such as data loaders
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            torch.cuda.set_sync_debug_mode("error")  # raises on synchronisation
            output = work()
        except BaseException as error:
            failed = error
        finally:
            torch.cuda.set_sync_debug_mode(waiting)
        try:
            graph.capture_end()
        except RuntimeError as error:  # the driver has stopped the capture
            # detach the allocator from the graph's pool, and replace the unusable state of the generator
            with suppress(RuntimeError):  # the allocator may already have left the pool
                torch._C._cuda_endAllocateToPool(shared.device.index, pool)
            shared.graphsafe_set_state(fresh)
            _replaced_generators += 1
            failed = failed or error
    if failed is not None:
        raise failed
    return graph, output


class _ExternalMemory(TorchDispatchMode):
    """Collects the external memory that a computation reads: weights, buffers, captured variables."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.external: dict[int, torch.UntypedStorage] = {}
        self._allocated: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self._allocated:
                self.external[storage.data_ptr()] = storage
        output = func(*args, **(kwargs or {}))
        self._allocated |= {part.data_ptr() for part in _storages(output)} - self.external.keys()
        return output


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if value.layout == torch.strided:
            yield value.untyped_storage()


@lru_cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Shared stream for all captures on a device; libraries allocate memory per stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _capturing(generators: list[torch.Generator]) -> Iterator[Callable[[], None]]:
    """Context that disables autocast's cache and garbage collection, and restores random states.

    A graph would keep the cached weights alive, and freeing another graph during a capture would break
    the capture. Yields a function that restores the generators.
    """
    cached, collecting = torch.is_autocast_cache_enabled(), gc.isenabled()
    states = [generator.get_state() for generator in generators]

    def undraw() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    torch.set_autocast_cache_enabled(False)
    gc.disable()
    try:
        with host_draws_restored():
            yield undraw
    finally:
        undraw()
        torch.set_autocast_cache_enabled(cached)
        if collecting:
            gc.enable()
