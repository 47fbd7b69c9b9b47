"""Data sets with fixed features as inputs, computed once and cached on disk."""

import hashlib
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data import Dataset
from hush_recipes.data.efficientnet import FEATURES as NUMBERS
from hush_recipes.data.efficientnet import NAME as EFFICIENTNET
from hush_recipes.data.efficientnet import check_images, embed, network
from hush_recipes.data.scattering import CHANNELS, STEP, check_side, scatter

# Images in a batch: on the CPU few enough for its cache, elsewhere as many as keep it busy.
_BATCH = {"scattering": {"cpu": 64, "cuda": 2048}, EFFICIENTNET: {"cpu": 16, "cuda": 512}}
# Goes into the name of the file: to be raised when the features change.
_VERSION = 1
_SUM_BYTES = 32
_BLOCK = 1 << 26

Make = Callable[[NDArray[Any], tuple[int, ...]], NDArray[np.float32]]


def scattering_features(
    dataset: Dataset, *, device: str = "cpu", cache: Path | None = None, directory: object = None
) -> Dataset:
    """Scattering transforms as inputs: 81 channels x side/4 x side/4 for each colour.

    Args:
        dataset: Images, channels x side x side.
        device: Device that computes them.
        cache: Directory of the cached files. None: `cache_directory()`.
        directory: Not used.
    """
    check_side(dataset.shape)

    def shape(images: NDArray[Any]) -> tuple[int, ...]:
        records, colours, side, _ = images.shape
        return (records, CHANNELS * colours, side // STEP, side // STEP)

    return _with_inputs(dataset, "scattering", cache, shape, partial(_scattering, device=device))


def efficientnet_features(
    dataset: Dataset,
    *,
    device: str = "cpu",
    cache: Path | None = None,
    directory: str | Path | None = None,
) -> Dataset:
    """1,280 numbers by a network trained on ImageNet as inputs.

    Args:
        dataset: Square images in one or three colours.
        device: Device that computes them.
        cache: Directory of the cached files. None: `cache_directory()`.
        directory: Directory of the published weights. None: the environment's HUSH_DATA.
    """
    check_images(dataset.shape)
    make = partial(_embedded, device=device, directory=directory)
    return _with_inputs(dataset, EFFICIENTNET, cache, lambda images: (len(images), NUMBERS), make)


def _with_inputs(
    dataset: Dataset,
    features: str,
    cache: Path | None,
    shape_of: Callable[[NDArray[Any]], tuple[int, ...]],
    make: Make,
) -> Dataset:
    folder = cache_directory() if cache is None else cache
    parts: dict[str, Any] = {}
    for part, images in (("train", dataset.x_train), ("test", dataset.x_test)):
        name, shape = f"{dataset.name}-{features}-{_VERSION}-{part}", shape_of(images)
        parts[f"x_{part}"] = cached(folder, name, images, shape, partial(make, images, shape))
    return replace(dataset, **parts)


def _scattering(images: NDArray[Any], shape: tuple[int, ...], device: str) -> NDArray[np.float32]:
    batch = math.ceil(_batch_size("scattering", device) / images.shape[1])
    return _in_batches(scatter, images, shape, device, batch)


def _embedded(
    images: NDArray[Any], shape: tuple[int, ...], device: str, directory: str | Path | None
) -> NDArray[np.float32]:
    embedding = partial(embed, network(directory).to(device))
    return _in_batches(embedding, images, shape, device, _batch_size(EFFICIENTNET, device))


def _batch_size(features: str, device: str) -> int:
    import torch

    sizes = _BATCH[features]
    return sizes.get(torch.device(device).type, sizes["cuda"])


def _in_batches(
    transform: Callable[[Any], Any],
    images: NDArray[Any],
    shape: tuple[int, ...],
    device: str,
    batch: int,
) -> NDArray[np.float32]:
    import torch

    output = np.empty(shape, dtype=np.float32)
    for begin in range(0, len(images), batch):
        part = torch.from_numpy(images[begin : begin + batch]).to(device)
        output[begin : begin + batch] = transform(part).cpu().numpy()
    return output


def cache_directory() -> Path:
    """Directory of cached features: HUSH_CACHE, else hush below the user's cache directory."""
    configured = os.environ.get("HUSH_CACHE")
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hush"


def cached(
    folder: Path,
    name: str,
    source: NDArray[Any],
    shape: tuple[int, ...],
    make: Callable[[], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """The array that `make` computes from `source`, from its file in `folder` if that is intact.

    `name` identifies every setting of the computation: another name or another source is another file.
    A file of the wrong length, or whose last 32 bytes are not the sha256 of the others, is replaced.
    Files are readable by their owner alone: features are as private as the records.
    """
    content = _digest(f"{source.dtype} {source.shape} ".encode(), source)
    path = folder / f"{name}-{content.hex()[:32]}.f32"
    stored = _read(path, shape)
    if stored is not None:
        return stored
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    print(f"{name}: worked out once for {len(source):,} records, kept in {folder}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Opened before the work starts, so that a full disk is noticed first.
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            values = np.ascontiguousarray(make(), dtype="<f4")
            values.tofile(file)
            file.write(_digest(b"", values))
        draft.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. Features are worked out once and kept; point "
            "the environment variable HUSH_CACHE at a folder with room for "
            f"{4 * np.prod(shape) / 1e9:.1f} GB."
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink()
    return values


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """The array in the file; None if it is missing or damaged."""
    count = int(np.prod(shape))
    try:
        if path.stat().st_size != 4 * count + _SUM_BYTES:
            return None
        with path.open("rb") as file:
            values = np.fromfile(file, dtype="<f4", count=count)
            return values.reshape(shape) if file.read() == _digest(b"", values) else None
    except OSError:
        return None


def _digest(kind: bytes, values: NDArray[Any]) -> bytes:
    """The sha256 of `kind` followed by the array's bytes."""
    digest = hashlib.sha256(kind)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for begin in range(0, len(flat), _BLOCK):
        digest.update(flat[begin : begin + _BLOCK].data)
    return digest.digest()
