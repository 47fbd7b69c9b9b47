"""CUDA graphs of work that may turn out impossible to capture: failing leaves torch as it was.

Work that makes the host wait for the GPU cannot be captured. torch is asked to raise before it waits, so
that the driver never sees it and the capture ends in order.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hush.core.errors import shorten
from hush.gradients.tree import tree_leaves

T = TypeVar("T")

_WARM_UP = 3
"""Passes before a capture, in which kernels are loaded and libraries choose theirs."""
_LONGEST_REASON = 300

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
    with _undrawn(generators) as undraw, _without_weight_cache(), _without_collection():
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
def _without_weight_cache() -> Iterator[None]:
    """Context in which autocast converts weights anew each time: a graph would use old ones for ever."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Context without garbage collection: a graph of another step that is freed would spoil this one."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
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
