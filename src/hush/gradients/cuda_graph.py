"""Clipped sums of physical batches on a GPU, captured once as CUDA graphs and replayed.

Launching the kernels of a small model's private step takes longer than running them. A graph launches
them at once. A batch is padded to a round size with copies of its first record at weight 0, so a few
graphs serve batches of random size. Work that makes the host wait for the GPU cannot be captured: torch
raises before it waits, and the capture ends in order.
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
from hush.core.parts import ClippedSum, Clipping, CoordinateMask
from hush.gradients.recording import host_draws_restored, host_states, record
from hush.gradients.tape import MaskedTape
from hush.gradients.tree import Loss, Views, tree_leaves, tree_map

_MOST_GRAPHS = 64
_MOST_CHANGES = 16
"""Changes of the captured state after which capturing costs more than it saves."""

_SIZE_MULTIPLE = 64
_SIZES_PER_OCTAVE = 16
"""Padded sizes between one and twice as many records."""

_WARM_UP = 3
"""Passes before a capture, in which kernels are loaded and libraries choose theirs."""
_LONGEST_REASON = 300
_PLAIN = frozenset((bool, int, float, str))

_replaced_generators = 0
"""Number of failed captures that replaced the state of torch's generator; it voids earlier graphs."""


class CaptureError(Exception):
    """Work that cannot be captured as a graph, with the reason."""


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """Captured work, replayed on the memory that it read and wrote."""

    replay: Callable[[], None]
    output: Any
    """Overwritten by each replay."""
    read: list[torch.UntypedStorage]
    """Memory that the work did not allocate. A graph holds addresses, so this keeps it alive."""


@dataclass(frozen=True, eq=False)
class BatchGraph:
    """Clipped sum of a padded batch as a captured graph."""

    captured: CapturedGraph
    inputs: Any
    targets: Any
    present: Tensor

    def fill(self, inputs: Any, targets: Any, present: Tensor | None) -> None:
        """Write a batch into the graph's memory, padded with copies of its first record."""
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
    """Clipped sums of batches in padded layout, by replaying a captured CUDA graph if there is one.

    **Guarantee.** The layout of a batch (places and shapes) determines the rounding of kernels, and is a
    function of the number of slots. A batch that is computed without a graph is padded alike: its shape
    could not be captured, or a gradient is not finite. See docs/guarantees/tape.md, 8.

    Graphs are captured anew when a parameter or buffer moves, is frozen or unfrozen, when autocast or an
    allowed precision changes, or when a number, string or truth value in an attribute of a module does
    (training mode, a dropout probability). Other changes of forward(), such as a global variable, are
    not noticed. Random numbers that the model draws on the GPU, and sampled coordinates, are fresh in
    every replay.
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
        """Replay of a model's clipped sums, before the first capture.

        Args:
            model, loss, views: As for `record`.
            clipping: Clipping in one block.
            most_records: Physical batch; no batch is padded beyond it.
            required: Raise if a batch cannot be captured; otherwise warn once and compute it.
        """
        self._model = model
        self._loss = loss
        self._clipping = clipping
        self._views = views
        # graphs materialise each record that may be clamped: sums without a graph must round alike
        self._materialise = (lambda values: values) if isinstance(clipping, (Linf, L2Linf)) else None
        self._most_records = most_records
        self._required = required
        self._graphs: dict[Any, BatchGraph | None] = {}
        self._pool: Any = None  # shared by the graphs: they never run at the same time
        self._given: Any = None
        self._trained: set[tuple[int, int]] = set()
        """Address and size of the parameters whose gradients the graphs sum."""
        self._unconfirmed = False
        """Whether graphs were replayed since the captured state was last compared."""
        self._stale = False
        """Whether such a replay was of an outdated state."""
        self._generator: torch.Generator | None = None
        self._changes = 0
        self._explained = False
        self._finite: Tensor | None = None
        """Whether all sums replayed since the last `failed` were of finite gradients."""

    def __call__(
        self,
        inputs: Any,
        targets: Any,
        mask: CoordinateMask | None = None,
        generator: torch.Generator | None = None,
        present: Tensor | None = None,
        *,
        randomness: Callable[..., AbstractContextManager[None]] = lambda **_: nullcontext(),
        verify: bool = True,
    ) -> ClippedSum:
        """The clipped sum of one batch.

        Args:
            inputs, targets: As for `record`.
            mask: Zeroes coordinates at random, for plans that sample them, by `generator`.
            present: Whether each slot holds a record; None: all do.
            randomness: Context that seeds torch's generators; with `host=False` only the GPU's.
            verify: Compare the captured state before the replay, wait for the GPU, and compute the batch
                without a graph if the replay is invalid. If False, `failed` reports it later and the sum
                must not be used then; only for parameters that `fits`.

        Returns:
            The clipped sum. It may be the memory of the graph, which the next replay overwrites.
        """
        mask = mask or self._materialise
        self._generator = generator
        records = len(next(tree_leaves(inputs)))
        size = padded_size(records, self._most_records)
        key = size, signature(inputs), signature(targets)
        graph = None if verify else self._graphs.get(key)
        if graph is not None:
            self._unconfirmed = True
        else:
            self._forget_if_changed()
            if key not in self._graphs:
                self._graphs[key] = self._capture(inputs, targets, size, mask)
            graph = self._graphs[key]
        if graph is None:
            rows, labels = tree_map((inputs, targets), lambda rows: pad(rows, size))
            slots = torch.zeros(size, dtype=torch.bool, device=next(tree_leaves(inputs)).device)
            slots[:records] = True if present is None else present
            with randomness():
                return self.clip_padded(rows, labels, slots, mask)
        graph.fill(inputs, targets, present)
        with randomness(host=False):  # a model that draws on the CPU is not captured
            device = graph.present.device
            shared = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
            sources = [*shared, *([] if generator is None else [generator])]
            before = [source.get_state() for source in sources] if verify else []
            graph.captured.replay()
            if not verify or not self.failed():
                output: ClippedSum = graph.captured.output
                return output
            # the same places and shapes, so kernels round alike, and the same random numbers
            for source, state in zip(sources, before, strict=True):
                source.set_state(state)
            return self.clip_padded(graph.inputs, graph.targets, graph.present, mask)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return any(graph is not None for graph in self._graphs.values())

    def fits(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the graphs, if there are any, sum the gradients of exactly these parameters."""
        return {(value.data_ptr(), value.numel()) for value in parameters} == self._trained

    def failed(self) -> bool:
        """Whether a replay since the last call is invalid; waits for the GPU.

        A replay is invalid if a gradient was not finite, or if the captured state had changed.
        """
        if self._unconfirmed:  # compared while the GPU works
            self._forget_if_changed()
        stale, self._stale = self._stale, False
        if self._finite is None or bool(self._finite):
            return stale
        self._finite.fill_(True)
        return True

    def clip_padded(
        self, inputs: Any, targets: Any, present: Tensor, mask: CoordinateMask | None
    ) -> ClippedSum:
        """The clipped sum of a padded batch, without a graph."""
        tape = record(self._model, self._loss, inputs, targets, self._views)
        return self._clipping.clip(MaskedTape(tape, present), mask)

    def _capture(
        self, inputs: Any, targets: Any, size: int, mask: CoordinateMask | None
    ) -> BatchGraph | None:
        """Graph of batches of this shape; None if they are computed without one."""
        if not self._required and self._changes > _MOST_CHANGES:
            self._explain("attributes of the model that forward() reads change in most steps")
            return None
        if not self._required and len(self._graphs) >= _MOST_GRAPHS:
            return None
        # memory of the graph alone
        rows, labels = tree_map((inputs, targets), lambda value: pad(value[:1], size).clone())
        device = next(tree_leaves(inputs)).device
        present = torch.ones(size, device=device, dtype=torch.bool)
        if self._finite is None:
            self._finite = torch.ones((), device=device, dtype=torch.bool)
        all_finite = self._finite
        before = all_finite.clone()  # of earlier replays of this step

        def work() -> ClippedSum:
            """The clipped sum, zero if a gradient or the content of an empty slot is not finite."""
            clipped = self.clip_padded(rows, labels, present, mask)
            total = {name: part.contiguous() for name, part in clipped.total.items()}
            # an empty slot is not skipped, and its content times a weight of 0 may not be finite
            lengths = torch.stack([norm.double() for norm in torch._foreach_norm(list(total.values()))])
            finite = lengths.isfinite().all() & (clipped.skipped == 0)
            all_finite.logical_and_(finite)
            for part in total.values():  # in place: a second copy of all sums would stay in the graph
                part.masked_fill_(~finite, 0.0)
            return replace(clipped, total=total)

        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        try:
            captured = capture_graph(work, self._pool, self._generator)
        except CaptureError as error:
            self._pool = None
            self._explain(str(error))
            return None
        finally:
            all_finite.copy_(before)
        return BatchGraph(captured, rows, labels, present)

    def _explain(self, reason: str) -> None:
        """Raise an error, or warn the first time, that a batch cannot be replayed."""
        if self._required:
            raise Unsupported(
                f"replay=True records the work of a batch as a CUDA graph, and this model's cannot be "
                f"recorded: {reason}. Leave replay out to compute steps without a graph."
            )
        if self._explained:
            return
        self._explained = True
        warnings.warn(
            f"the GPU waits for Python in this model's steps, and they cannot be replayed as a CUDA "
            f"graph: {reason}. They are computed without one; replay=False silences this warning.",
            PerformanceWarning,
            stacklevel=2,
        )

    def _forget_if_changed(self) -> None:
        """Drop all graphs if the state that they were captured in has changed."""
        unconfirmed, self._unconfirmed = self._unconfirmed, False
        now = (*given(self._model, self._loss), self._generator)
        if now == self._given:
            return
        if unconfirmed:
            self._stale = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the graphs may be at work
        if self._graphs:
            self._changes += 1
        trained = [value for value in self._model.parameters() if value.requires_grad]
        self._trained = {(value.data_ptr(), value.numel()) for value in trained}
        self._graphs.clear()
        self._given = now
        self._pool = None  # memory of the old graphs may still be in use


def padded_size(records: int, most: int | None = None) -> int:
    """Padded size of a batch, from its number of slots and the physical batch."""
    multiple = max(_SIZE_MULTIPLE, (1 << records.bit_length() >> 1) // _SIZES_PER_OCTAVE)
    size: int = -(-records // multiple) * multiple
    return size if most is None else max(records, min(size, most))


def pad(rows: Tensor, size: int) -> Tensor:
    """The rows, padded with copies of the first."""
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
    """States of the generators on the CPU, which no graph advances."""
    return *host_states(), torch.default_generator.get_state().numpy().tobytes()


def capture_graph(
    work: Callable[[], Any], pool: Any, generator: torch.Generator | None = None
) -> CapturedGraph:
    """Captured CUDA graph of work on the current device.

    The random states of torch, NumPy and Python are restored: a replay, or a computation without the
    graph, draws the same numbers as without the capture. `generator` is a generator that the work draws
    from, besides torch's own. After a `CaptureError` the pool is unusable.
    """
    device = torch.cuda.current_device()
    shared = torch.cuda.default_generators[device]
    generators = [torch.default_generator, shared, *([] if generator is None else [generator])]
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
                        "the model draws random numbers on the CPU, which a graph would repeat"
                    )
                undraw()
                graph, output = _captured(work, pool, generator, shared)
                return CapturedGraph(graph.replay, output, list(memory.external.values()))
        except CaptureError:
            raise
        except Exception as error:  # of the model, the driver or the allocator
            first = str(error).split("\n", maxsplit=1)[0]
            raise CaptureError(shorten(first, _LONGEST_REASON)) from error
        finally:
            torch.cuda.current_stream().wait_stream(side)


def _captured(
    work: Callable[[], Any], pool: Any, generator: torch.Generator | None, shared: torch.Generator
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph and the output of work that has run before on the current stream."""
    global _replaced_generators
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    fresh = shared.clone_state()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the graph cannot use memory of the warm-up
    output, failed, waiting = None, None, torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that it misses some ways to wait, and that a graph has no kernels
        warnings.simplefilter("ignore")
        # other threads, such as those that load data, are not restricted
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            torch.cuda.set_sync_debug_mode("error")  # torch raises before the host waits for the GPU
            output = work()
        except BaseException as error:
            failed = error
        finally:
            torch.cuda.set_sync_debug_mode(waiting)
        try:
            graph.capture_end()
        except RuntimeError as error:  # the driver has ended the capture
            # torch's allocator would still use the graph's pool, and its generator would not draw
            with suppress(RuntimeError):  # the allocator may have left the pool
                torch._C._cuda_endAllocateToPool(shared.device.index, pool)
            shared.graphsafe_set_state(fresh)
            _replaced_generators += 1
            failed = failed or error
    if failed is not None:
        raise failed
    return graph, output


class _ExternalMemory(TorchDispatchMode):
    """Memory that work reads and did not allocate: weights, buffers, tensors in a closure."""

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
    """Stream of all captures on a device: libraries keep memory for each stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _capturing(generators: list[torch.Generator]) -> Iterator[Callable[[], None]]:
    """Context without autocast's cache and without garbage collection, which restores random states.

    A graph would keep cached weights, and freeing the graph of another step spoils a capture. The
    context's value is a function that restores the generators.
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
