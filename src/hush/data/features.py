"""A data set seen through fixed features: the same records, other inputs."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data.cache import cache_directory, kept
from hush.data.dataset import Dataset
from hush.data.efficientnet import FEATURES as NUMBERS
from hush.data.efficientnet import NAME as EFFICIENTNET
from hush.data.efficientnet import check_images, embed, network
from hush.data.scattering import CHANNELS, STEP, check_side, scatter

FEATURES = ("scattering", EFFICIENTNET)
# Images at once: on the CPU few enough for its cache, elsewhere as many as keep it busy.
_AT_ONCE = {"scattering": {"cpu": 64, "cuda": 2048}, EFFICIENTNET: {"cpu": 16, "cuda": 512}}
# Goes into the name of the file: to be raised when the features change.
_VERSION = 1

Make = Callable[[NDArray[Any], tuple[int, ...], str], NDArray[np.float32]]


def with_features(
    dataset: Dataset,
    features: str,
    *,
    device: str = "cpu",
    cache: Path | None = None,
    directory: str | Path | None = None,
) -> Dataset:
    """The data set with inputs worked out on `device`, once: they are kept in a cache directory.

    **Guarantee.** Each record's features are a function of that record alone and of public constants:
    what is proved for the records holds with their features as inputs.

    `scattering` is for images: channels x side x side become 81 channels x side/4 x side/4.
    `efficientnet-lite0` makes 1280 numbers of an image, by a network trained on ImageNet, which is
    looked for in `directory` or HUSH_DATA. The files kept are as private as the records; the
    environment's HUSH_CACHE says where they go.
    """
    if features not in FEATURES:
        raise DataError(f"there are no features called {features!r}; there are {', '.join(FEATURES)}.")
    (check_side if features == "scattering" else check_images)(dataset.shape)
    folder = cache_directory() if cache is None else cache
    name = f"{dataset.name}-{features}-{_VERSION}"
    make = _scattered if features == "scattering" else partial(_embedded, directory=directory)
    train, test = (
        _kept(folder, f"{name}-{part}", images, features, make, device)
        for part, images in (("train", dataset.x_train), ("test", dataset.x_test))
    )
    return replace(dataset, x_train=train, x_test=test)


def _kept(
    folder: Path, name: str, images: NDArray[Any], features: str, make: Make, device: str
) -> NDArray[np.float32]:
    records, colours, side, _ = images.shape
    shape: tuple[int, ...] = (records, CHANNELS * colours, side // STEP, side // STEP)
    if features == EFFICIENTNET:
        shape = (records, NUMBERS)
    return kept(folder, name, images, shape, lambda: make(images, shape, device))


def _scattered(images: NDArray[Any], shape: tuple[int, ...], device: str) -> NDArray[np.float32]:
    many = max(1, math.ceil(_at_once("scattering", device) / images.shape[1]))
    return _in_parts(scatter, images, shape, device, many)


def _embedded(
    images: NDArray[Any], shape: tuple[int, ...], device: str, directory: str | Path | None
) -> NDArray[np.float32]:
    embedding = partial(embed, network(directory).to(device))
    return _in_parts(embedding, images, shape, device, _at_once(EFFICIENTNET, device))


def _at_once(features: str, device: str) -> int:
    import torch

    known = _AT_ONCE[features]
    return known.get(torch.device(device).type, known["cuda"])


def _in_parts(
    transform: Callable[[Any], Any],
    images: NDArray[Any],
    shape: tuple[int, ...],
    device: str,
    many: int,
) -> NDArray[np.float32]:
    import torch

    found = np.empty(shape, dtype=np.float32)
    for begin in range(0, len(images), many):
        part = torch.from_numpy(images[begin : begin + many]).to(device)
        found[begin : begin + many] = transform(part).cpu().numpy()
    return found
