"""Clipped sums of physical batches on a GPU, captured once as CUDA graphs and replayed.

Launching the kernels of a small model's private step takes longer than running them; a graph launches
them at once. A batch is padded to a round size with copies of its first record at weight 0, so that few
graphs serve batches of random size. Work that makes the host wait for the GPU cannot be captured: torch
is asked to raise before it waits, so that the capture ends in order and torch is left as it was.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hush.clipping.norms import L2Linf, Linf
from hush.core.errors import PerformanceWarning, Unsupported, shorten
from hush.core.parts import ClippedSum, Clipping, CoordinateMask
from hush.gradients.recording import record
from hush.gradients.tape import MaskedTape
from hush.gradients.tree import Loss, Views, submodules, tree_leaves, tree_map

T = TypeVar("T")

_MOST_GRAPHS = 64
_MOST_CHANGES = 16
"""Changes of what the graphs take as given after which capturing them costs more than they save."""

_SIZE_MULTIPLE = 64
_SIZES_PER_OCTAVE = 16
"""Padded sizes between one and twice as many records."""

_WARM_UP = 3
"""Passes before a capture, in which kernels are loaded and libraries choose theirs."""
_LONGEST_REASON = 300
_PLAIN = frozenset((bool, int, float, str))

_replaced_generators = 0
"""How often a failed capture took torch's generator along: graphs of before would draw from the old."""


class CaptureError(Exception):
    """Work that cannot be captured as a graph; the message says why."""


@dataclass(frozen=True, eq=False)
class CapturedGraph(Generic[T]):
    """Work that was captured, to be replayed on the memory that it read and wrote."""

    replay: Callable[[], None]
    output: T
    """Overwritten by each replay."""
    read: list[torch.UntypedStorage]
    """Memory from before that the work reads: a graph knows addresses, and must not outlive it."""


@dataclass(frozen=True, eq=False)
class BatchGraph:
    """Clipped sum of a padded batch as a captured graph."""

    captured: CapturedGraph[ClippedSum]
    inputs: Any
    targets: Any
    present: Tensor
    occupied: list[int]
    """How many slots from the first on hold a record, if `present` says so now."""

    def fill(self, inputs: Any, targets: Any, present: Tensor | None) -> None:
        """Write a batch into the graph's memory, padded with copies of its first record.

        Args:
            inputs: of the batch, records first.
            targets: of the batch.
            present: whether each slot holds a record; None: all do.
        """
        records = records_of(inputs)
        memories, given = tree_leaves((self.inputs, self.targets)), tree_leaves((inputs, targets))
        for memory, rows in zip(memories, given, strict=True):
            if records == len(memory):
                memory.copy_(rows)
            else:
                memory[:records] = rows
                memory[records:] = rows[0]
        if present is not None or self.occupied != [records]:
            self.present[:records] = True if present is None else present
            self.present[records:] = False
            self.occupied[:] = [records] if present is None else []


class Replay:
    """Clipped sums of batches in padded layout, by replaying a captured CUDA graph where there is one.

    **Guarantee.** The layout, places and shapes by which kernels round, follows from the number of slots
    alone: a batch that is computed without a graph is padded like any other. That is one with a record
    whose gradient is not finite, or whose ghost norm would be recomputed, and one of a shape that could
    not be captured. See docs/guarantees/tape.md, 8.

    Graphs are captured anew when a parameter or buffer moves, is frozen or unfrozen, when autocast or an
    allowed precision changes, or when a number, string or truth value in an attribute of a module does
    (training mode, a dropout probability). Other changes to what forward() does, such as a global,
    are not seen. Random numbers that the model draws on the GPU, and sampled coordinates, are
    fresh in every replay.
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
        capture: Callable[..., CapturedGraph[Any]] | None = None,
    ) -> None:
        """Replay of a model's clipped sums, before anything is captured.

        Args:
            model: the trained one.
            loss: one value per record.
            clipping: in one block.
            views: of each record, whose mean gradient is clipped.
            most_records: physical batch: no batch is padded beyond it.
            required: raise where a batch cannot be captured; otherwise warn once and do without.
            capture: makes graphs; None: `capture_graph`.
        """
        self._model = model
        self._loss = loss
        self._clipping = clipping
        self._views = views
        # graphs materialise every record that may be clamped, and the others' sums must not round
        # otherwise for one that makes a graph's result useless
        self._materialise = (lambda values: values) if isinstance(clipping, (Linf, L2Linf)) else None
        self._most_records = most_records
        self._required = required
        self._capture_graph = capture or capture_graph
        self._graphs: dict[Any, BatchGraph | None] = {}
        # one after the other, the graphs share their memory
        self._pool: Any = None
        self._given: Any = None
        self._trained: set[tuple[int, int]] = set()
        """Address and size of the parameters that the graphs give sums for."""
        self._unconfirmed = False
        """Whether graphs were replayed since what they take as given was last compared."""
        self._stale = False
        """Whether such a replay turned out to be of what is no longer given."""
        self._generator: torch.Generator | None = None
        self._changes = 0
        self._explained = False
        self._finite: Tensor | None = None
        """Whether all sums replayed since the last question were of finite gradients."""

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
            inputs: of the batch, records first: a tensor or a tree of them.
            targets: of the batch.
            mask: zeroes coordinates at random, for plans that sample them.
            generator: the one that `mask` draws from.
            present: whether each slot holds a record; all of them if left out.
            randomness: context that seeds torch's generators; with `host=False` only the GPU's.
            verify: see that what a graph takes as given has not changed before it is replayed, wait for
                the GPU to say that the replay can be used, and compute the batch without one if not.
                Otherwise `failed` says so later, and the sum must not be used then; only for parameters
                that `fits`.

        Returns:
            The clipped sum; it may be the graph's own memory, overwritten by the next replay.
        """
        mask = mask or self._materialise
        self._generator = generator
        size = padded_size(records_of(inputs), self._most_records)
        key = size, signature(inputs), signature(targets)
        graph = None if verify else self._graphs.get(key)
        if graph is not None:
            self._unconfirmed = True
        else:
            self._forget_if_changed()
            if key not in self._graphs:
                self._graphs[key] = self._capture(inputs, targets, size, mask, generator)
            graph = self._graphs[key]
        if graph is None:
            rows, labels = (tree_map(part, lambda rows: pad(rows, size)) for part in (inputs, targets))
            slots = torch.zeros(size, dtype=torch.bool, device=next(tree_leaves(inputs)).device)
            slots[: records_of(inputs)] = True if present is None else present
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
                return graph.captured.output
            # in the same places and shapes, by which kernels round, and with the same random numbers
            for source, state in zip(sources, before, strict=True):
                source.set_state(state)
            return self.clip_padded(graph.inputs, graph.targets, graph.present, mask)

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return any(graph is not None for graph in self._graphs.values())

    def fits(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the graphs, if there are any, give sums for these parameters and no others."""
        return {(value.data_ptr(), value.numel()) for value in parameters} == self._trained

    def confirm(self) -> None:
        """Compare what replays without `verify` took as given, for `failed`; the GPU works meanwhile."""
        if self._unconfirmed:
            self._forget_if_changed()

    def failed(self) -> bool:
        """Whether a replay since the last question cannot be used; waits for the GPU.

        It met what is not finite, or something that it takes as given had changed.
        """
        self.confirm()
        stale, self._stale = self._stale, False
        if self._finite is None or bool(self._finite):
            return stale
        self._finite.fill_(True)
        return True

    def clip_padded(
        self, inputs: Any, targets: Any, present: Tensor, mask: CoordinateMask | None
    ) -> ClippedSum:
        """The clipped sum without a graph, of a batch that is padded already."""
        tape = record(self._model, self._loss, inputs, targets, self._views)
        return self._clipping.clip(MaskedTape(tape, present), mask)

    def _capture(
        self,
        inputs: Any,
        targets: Any,
        size: int,
        mask: CoordinateMask | None,
        generator: torch.Generator | None,
    ) -> BatchGraph | None:
        """Graph of batches of this shape; None where there is to be none."""
        if not self._required and self._changes > _MOST_CHANGES:
            self._explain("what forward() reads from the model's attributes changes again and again")
            return None
        if not self._required and len(self._graphs) >= _MOST_GRAPHS:
            return None
        # memory of the graph's own, which is not to be the batch's
        rows, labels = (
            tree_map(part, lambda value: pad(value[:1], size).clone()) for part in (inputs, targets)
        )
        device = next(tree_leaves(inputs)).device
        present = torch.ones(size, device=device, dtype=torch.bool)
        if self._finite is None:
            self._finite = torch.ones((), device=device, dtype=torch.bool)
        all_finite = self._finite
        before = all_finite.clone()  # of replays of this step that nobody has asked about yet

        def work() -> ClippedSum:
            """The clipped sum, zero where a gradient or what an empty slot holds is not finite."""
            tape = record(self._model, self._loss, rows, labels, self._views)
            clipped = self._clipping.clip(MaskedTape(tape, present), mask)
            total = {name: part.contiguous() for name, part in clipped.total.items()}
            # an empty slot is not skipped, and what it holds times a weight of 0 may not be finite
            lengths = torch.stack([norm.double() for norm in torch._foreach_norm(list(total.values()))])
            finite = lengths.isfinite().all() & (clipped.skipped == 0)
            all_finite.logical_and_(finite)
            for part in total.values():  # in place: a second copy of all sums would stay in the graph
                part.masked_fill_(~finite, 0.0)
            return replace(clipped, total=total)

        try:
            captured = self._capture_graph(work, self._memory(), generator)
        except CaptureError as error:
            self._pool = None
            self._explain(str(error))
            return None
        finally:
            all_finite.copy_(before)
        return BatchGraph(captured, rows, labels, present, [size])

    def _explain(self, reason: str) -> None:
        """Raise, or warn the first time, that a batch cannot be replayed."""
        if self._required:
            raise Unsupported(
                f"replay=True records the work of a batch as a CUDA graph, and this model's cannot be "
                f"recorded: {reason}. Leave replay out, and steps are computed without."
            )
        if self._explained:
            return
        self._explained = True
        warnings.warn(
            f"the GPU waits for Python in this model's steps, and they cannot be replayed as a CUDA "
            f"graph: {reason}. They are computed without one; replay=False says that this is meant.",
            PerformanceWarning,
            stacklevel=2,
        )

    def _memory(self) -> Any:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _forget_if_changed(self) -> None:
        """Drop all graphs if something that they take as given has changed."""
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
        # memory of its own, in case something of the old graphs is still in use
        self._pool = None


def padded_size(records: int, most: int | None = None) -> int:
    """Round size that a batch is padded to, a function of its number of slots.

    Args:
        records: slots of the batch.
        most: the physical batch, beyond which none is padded.
    """
    multiple = max(_SIZE_MULTIPLE, (1 << records.bit_length() >> 1) // _SIZES_PER_OCTAVE)
    size: int = -(-records // multiple) * multiple
    return size if most is None else max(records, min(size, most))


def pad(rows: Tensor, size: int) -> Tensor:
    """The rows, and copies of the first up to a number of them."""
    return torch.cat([rows, rows[:1].expand(size - len(rows), *rows.shape[1:])])


def records_of(inputs: Any) -> int:
    """Number of slots of a batch."""
    return len(next(tree_leaves(inputs)))


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
    """What a captured graph takes as given."""
    criterion = getattr(loss, "loss", loss)
    modules = submodules(model) + (submodules(criterion) if isinstance(criterion, nn.Module) else [])
    own = [table for m in modules for table in (m._parameters, m._buffers) if table]
    values = [value for table in own for value in table.values() if value is not None]
    backends = torch.backends
    return (
        [(id(module), id(module.__dict__.get("forward"))) for module in modules],
        [value for module in modules for value in module.__dict__.values() if type(value) in _PLAIN],
        [(value.data_ptr(), value.requires_grad) for value in values],
        replaced_generators(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


def capture_graph(
    work: Callable[[], T], pool: Any, generator: torch.Generator | None = None
) -> CapturedGraph[T]:
    """Captured CUDA graph of work on the current device.

    The random states of torch, numpy and Python are left as they were: a replay, or work that is done
    without a graph in its place, draws what it would have drawn.

    Args:
        work: launches kernels that read and write the same memory every time.
        pool: handle of the graphs' memory; of no use any more if this raises.
        generator: one that the work draws from, besides torch's own.

    Returns:
        The graph; raises `CaptureError` where the work cannot be replayed.
    """
    device = torch.cuda.current_device()
    shared = torch.cuda.default_generators[device]
    generators = [torch.default_generator, shared, *([] if generator is None else [generator])]
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with _undrawn(generators) as undraw, _capturable():
        try:
            with torch.cuda.stream(side):
                before = _host_states()
                for _ in range(_WARM_UP - 1):
                    work()
                read = external_memory(work)
                if before != _host_states():
                    raise CaptureError(
                        "the model draws random numbers on the CPU, which a graph would repeat"
                    )
                undraw()
                graph, output = _captured(work, pool, generator, shared)
                return CapturedGraph(graph.replay, output, read)
        except CaptureError:
            raise
        except Exception as error:  # of the model, the driver or the allocator: the graph is what fails
            first = str(error).split("\n", maxsplit=1)[0]
            raise CaptureError(shorten(first, _LONGEST_REASON)) from error
        finally:
            torch.cuda.current_stream().wait_stream(side)


def _captured(
    work: Callable[[], T], pool: Any, generator: torch.Generator | None, shared: torch.Generator
) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph and the output of work on the current stream, which has done it before."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    fresh = shared.clone_state()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # memory that the warm-up left is of no use to the graph
    # other threads may do what they like meanwhile, such as loading data
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        with _no_waiting():
            output = work()
    except BaseException:
        _abandon(graph, pool, shared, fresh)
        raise
    try:
        graph.capture_end()
    except RuntimeError:
        _restore_torch(pool, shared, fresh)
        raise
    return graph, output


def external_memory(work: Callable[[], object]) -> list[torch.UntypedStorage]:
    """Memory that work reads and did not itself allocate: weights, buffers, what a loss closes over."""
    with _ExternalMemory() as memory:
        work()
    return list(memory.external.values())


class _ExternalMemory(TorchDispatchMode):
    """Notes arguments of all operations that are not results of others."""

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
        self._allocated.update(
            storage.data_ptr()
            for storage in _storages(output)
            if storage.data_ptr() not in self.external
        )
        return output


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if value.layout == torch.strided:
            yield value.untyped_storage()


def _abandon(
    graph: torch.cuda.CUDAGraph, pool: Any, shared: torch.Generator, fresh: torch.Generator
) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a graph without kernels is of no use
            graph.capture_end()
    except RuntimeError:  # the driver has given the capture up
        _restore_torch(pool, shared, fresh)


def _restore_torch(pool: Any, shared: torch.Generator, fresh: torch.Generator) -> None:
    """Undo what torch keeps of a capture that the driver gave up.

    Its allocator would go on taking memory from the graph's pool, and its generator would refuse to draw
    outside of a capture: it gets a state of its own, and all graphs that know the old one are void.
    """
    global _replaced_generators
    with suppress(RuntimeError):  # it may have ended
        torch._C._cuda_endAllocateToPool(shared.device.index, pool)
    shared.graphsafe_set_state(fresh)
    _replaced_generators += 1


def replaced_generators() -> int:
    """Number that changes when graphs captured before no longer draw from torch's generator."""
    return _replaced_generators


@lru_cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Stream on which graphs are captured: one, as libraries keep memory for each."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Context in which torch raises before the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not know every way to wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _capturable() -> Iterator[None]:
    """Context without autocast's cache of weights and without garbage collection.

    A graph would use old weights forever, and a freed graph of another step would spoil this one.
    """
    cached, collecting = torch.is_autocast_cache_enabled(), gc.isenabled()
    torch.set_autocast_cache_enabled(False)
    gc.disable()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        if collecting:
            gc.enable()


@contextmanager
def _undrawn(generators: list[torch.Generator]) -> Iterator[Callable[[], None]]:
    """Give the block a function that sets generators back; they are as before at the end as well."""
    states = [generator.get_state() for generator in generators]

    def undraw() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    host = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield undraw
    finally:
        undraw()
        random.setstate(host[0])
        np.random.set_state(host[1])  # noqa: NPY002


def _host_states() -> tuple[Any, bytes]:
    """States of the generators on the CPU, which no graph advances."""
    _, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return (random.getstate(), rest), np.asarray(words).tobytes() + torch_state
