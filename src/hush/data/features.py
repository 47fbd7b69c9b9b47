"""A data set seen through fixed features: the same records, other inputs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data.cache import cache_directory, kept
from hush.data.dataset import Dataset
from hush.data.scattering import CHANNELS, STEP, check_side, scatter

FEATURES = ("scattering",)
# Images at once: on the CPU few enough for its cache, elsewhere as many as keep it busy.
_AT_ONCE = {"cpu": 64}
_ELSEWHERE = 2048
# Goes into the name of the file: to be raised when the features change.
_VERSION = 1


def with_features(
    dataset: Dataset, features: str, *, device: str = "cpu", cache: Path | None = None
) -> Dataset:
    """The data set with inputs worked out on `device`, once: they are kept in a cache directory.

    **Guarantee.** Each record's features are a function of that record alone and of public constants:
    what is proved for the records holds with their features as inputs.

    `scattering` is for images: channels x side x side become 81 channels x side/4 x side/4. The files
    are as private as the records; the environment's HUSH_CACHE says where they go.
    """
    if features not in FEATURES:
        raise DataError(f"there are no features called {features!r}; there are {', '.join(FEATURES)}.")
    check_side(dataset.shape)
    folder = cache_directory() if cache is None else cache
    name = f"{dataset.name}-{features}-{_VERSION}"
    train, test = (
        _kept(folder, f"{name}-{part}", images, device)
        for part, images in (("train", dataset.x_train), ("test", dataset.x_test))
    )
    return replace(dataset, x_train=train, x_test=test)


def _kept(folder: Path, name: str, images: NDArray[Any], device: str) -> NDArray[np.float32]:
    records, colours, side, _ = images.shape
    shape = (records, CHANNELS * colours, side // STEP, side // STEP)
    return kept(folder, name, images, shape, lambda: _scattered(images, shape, device))


def _scattered(images: NDArray[Any], shape: tuple[int, ...], device: str) -> NDArray[np.float32]:
    import torch

    found = np.empty(shape, dtype=np.float32)
    many = max(1, math.ceil(_AT_ONCE.get(torch.device(device).type, _ELSEWHERE) / images.shape[1]))
    for begin in range(0, len(images), many):
        part = torch.from_numpy(images[begin : begin + many]).to(device)
        found[begin : begin + many] = scatter(part).cpu().numpy()
    return found
