"""Training runs side by side, and a cache of their results for a recipe that is started again."""

import hashlib
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch

import hush
from hush.core.atomic_files import check_folder
from hush.core.errors import PerformanceWarning, ProcessFailed

CACHE = "HUSH_RUNS"
"""Environment variable: directory of cached results; without it, none are cached."""
_CODE = (Path(hush.__file__).parent, Path(__file__).parent)
_CHECKSUM_BYTES = 32
_SHARED = 0.9
"""Of a GPU's memory; the rest is what each process needs to be there at all."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def workers(processes: int | None, device: str) -> Iterator[Map]:
    """A map over so many processes; by default a core each, or four that share a GPU. One works here."""
    check_cache()
    count = processes or (os.cpu_count() or 1 if device == "cpu" else 4)
    if processes == 1:
        yield _cached(map)
        return
    context = get_context("spawn")
    try:
        with ProcessPoolExecutor(count, context, initializer=_prepare, initargs=(count, device)) as pool:
            yield _cached(pool.map)
    except BrokenProcessPool:
        raise ProcessFailed(
            f"one of {count} processes ended, as happens if memory runs out or somebody ends it. Pass "
            f"fewer (--processes 1); with {CACHE}=FOLDER, finished runs are not run again."
        ) from None


def _cached(over: Map) -> Map:
    return lambda function, items: over(partial(cached_result, function), items)


def check_cache() -> None:
    """Raise if the environment names a cache that cannot be written to."""
    if folder := os.environ.get(CACHE):
        check_folder(CACHE, Path(folder))


def cached_result(function: Callable[[Any], Any], item: Any) -> Any:
    """The function's result, from the cache that the environment names, if it is there and intact.

    The key is the code of hush and its recipes as it was imported, torch's version, the function's name
    and its argument. A function that is defined within another one is not cached: its name does not tell
    what it refers to. The cache is trusted as code is.
    """
    folder = os.environ.get(CACHE)
    if not folder or "<locals>" in function.__qualname__:
        return function(item)
    key = pickle.dumps((_IMPORTED, function.__module__, function.__qualname__, item))
    path = Path(folder) / hashlib.sha256(key).hexdigest()
    stored = _read(path)
    if stored is not None:
        return pickle.loads(stored)
    result = function(item)
    if problem := _store(path, pickle.dumps(result)):
        warnings.warn(
            f"a result is not kept for another start: {problem}.", PerformanceWarning, stacklevel=2
        )
    return result


def _read(path: Path) -> bytes | None:
    """The file's content without its checksum; None if it is missing or damaged."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    return content if checksum == hashlib.sha256(content).digest() else None


def _store(path: Path, content: bytes) -> str | None:
    """Write the content behind its checksum; return the reason if it cannot be: no run is lost by that.

    The file is there whole or not at all: a run may be killed at any time.
    """
    try:
        if code_digest() != _IMPORTED:  # a module that was imported late may be of either version
            return "the code of hush or of its recipes was edited since it was imported"
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)  # on a full disk it would keep the room that is missing
                raise
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}); make room or permit it"
    return None


def code_digest() -> str:
    """Digest of what results follow from: modules of hush and of its recipes, and torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in _CODE:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            # With its path and length, so that a line that moves to another file changes the digest.
            digest.update(f"\n{path.relative_to(folder.parent)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


_IMPORTED = code_digest()
"""Taken here and not at the first job: code that is edited in between is not what runs."""


def _prepare(processes: int, device: str) -> None:
    """End at Ctrl-C, which Python would take for an error of one run, and begin the next."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _share(processes, device)


def _share(processes: int, device: str) -> None:
    """Take no more than a share of the GPU's memory, so that there is enough for all."""
    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(_SHARED / processes, torch.device(device).index)
