"""DataLoader that the draws of a step drive: worker processes, prefetching and pinned memory."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hush.core.errors import DataError
from hush.training.sources.reader import Reader, Request, Unreadable

_AHEAD = 2
"""Requests that each worker has at hand: what is in memory are so many physical batches at most."""


class SlotLoader:
    """Physical batches of drawn slots, read ahead by worker processes that live as long as this does."""

    def __init__(self, reader: Reader, workers: int, *, pin_memory: bool) -> None:
        """A loader that has read nothing yet.

        Args:
            reader: of slots.
            workers: processes; 0: batches are read here, when they are asked for.
            pin_memory: copy batches to memory from which a GPU reads at once, where there is one.
        """
        self._reader = reader
        self._workers = workers
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._at_rest = False
        """Whether the loader has nothing left to read, and may be given more."""
        self._kept: list[DataLoader[Any]] = []
        """The loader. Whatever is collected in a cycle, it is not: torch waits 5 seconds for each worker
        of one whose queues may be gone already."""
        weakref.finalize(self, self._kept.clear).atexit = False  # torch ends them then

    def start(self) -> None:
        """Start the workers, if there are any and they are not at work.

        They are forks: of a process whose other threads are at work, as when noise is drawn beside
        gradients, a fork may inherit a lock that nobody will release.
        """
        if self._workers and not self._at_rest:
            self._kept[:] = [self._make()]
            next(iter(self._kept[0]), None)  # of no requests
            self._at_rest = True

    def stop(self) -> None:
        """End the workers now, not when Python collects cycles."""
        self._at_rest = False
        self._kept.clear()

    def read(self, parts: Sequence[Sequence[int]], key: bytes | None) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of the slots of each physical batch, one after another.

        Args:
            parts: slots of each physical batch, one at least.
            key: of the step, for the records' random numbers; None: those of the program.
        """
        pieces = -(-self._workers // len(parts))  # so that all workers have something to do
        requests = [[Request(list(piece), key) for piece in _split(part, pieces)] for part in parts]
        # one list of requests at a time: where an earlier one was left unfinished, others begin anew
        if not self._at_rest:
            self._kept[:] = [self._make()]
        self._at_rest = False
        (loader,) = self._kept
        loader.batch_sampler.requests = [request for part in requests for request in part]  # type: ignore
        batches = iter(loader)
        for part in requests:
            yield self._joined([_checked(_next(batches)) for _ in part])
        next(batches, None)  # the loader sees that the list is at its end, and its workers wait for more
        self._kept[:] = [loader]  # another list may have been begun meanwhile
        self._at_rest = True

    def _make(self) -> "DataLoader[Any]":
        return DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=_Drawn(),  # type: ignore[arg-type]
            collate_fn=_unchanged,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            prefetch_factor=_AHEAD if self._workers else None,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # so that the program's own does not move
        )

    def _joined(self, parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """The pieces of a physical batch, one below the other."""
        if len(parts) == 1:
            return parts[0]
        return _join(parts, self._pin_memory)  # type: ignore[no-any-return]


class _Drawn:
    """Requests of the step at hand: DataLoader iterates over it anew for each step."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _unchanged(rows: Any) -> Any:
    return rows


def _next(batches: Iterator[Any]) -> Any:
    """What the workers read next; raises where one of them is no more."""
    try:
        return next(batches)
    except RuntimeError as error:  # of the loader itself: what a data set raises comes as `Unreadable`
        raise DataError(
            f"records could not be read, as a worker process failed ({error}); the step was not "
            "charged. Workers are killed where memory runs out: pass fewer, or workers=0 to read in "
            "this process, which also shows a data set that ends its process."
        ) from None


def _split(slots: Sequence[int], pieces: int) -> list[Sequence[int]]:
    """Slots in runs of one length, of which there are no more than asked for."""
    length = max(1, -(-len(slots) // max(1, pieces)))
    return [slots[start : start + length] for start in range(0, len(slots), length)]


def _checked(rows: Any) -> tuple[Any, Any]:
    """Inputs and targets that were read; raises where they could not be."""
    if isinstance(rows, Unreadable):
        raise DataError(rows.reason)
    inputs, targets = rows  # a list of two once it was pinned
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


def _join(parts: list[Any], pinned: bool) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        rows = sum(len(part) for part in parts)
        whole = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, pin_memory=pinned)
        return torch.cat(parts, out=whole)
    if isinstance(first, dict):
        return {key: _join([part[key] for part in parts], pinned) for key in first}
    return type(first)(_join([part[place] for part in parts], pinned) for place in range(len(first)))
