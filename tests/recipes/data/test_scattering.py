"""The transform against kymatio's, and against what any scattering transform must satisfy."""

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hush_recipes.data import scattering
from hush_recipes.data.scattering import scatter


@pytest.fixture(scope="module")
def kymatio() -> Iterator[Any]:
    """The 2-D transform of kymatio alone: the package as a whole needs what SciPy no longer has."""
    spec = importlib.util.find_spec("kymatio")
    assert spec is not None
    package = ModuleType("kymatio")
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules["kymatio"] = package
    try:
        yield importlib.import_module("kymatio.scattering2d.frontend.torch_frontend")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "kymatio"]:
            del sys.modules[name]


def images(records: int, colours: int, side: int) -> Tensor:
    return torch.rand(records, colours, side, side, generator=torch.Generator().manual_seed(side))


@pytest.mark.parametrize(("colours", "side"), [(1, 28), (3, 32), (2, 8)])
def test_features_are_kymatio_s(kymatio: Any, colours: int, side: int) -> None:
    inputs = images(3, colours, side)
    theirs = kymatio.ScatteringTorch2D(J=2, shape=(side, side))(inputs).flatten(1, 2)
    ours = scatter(inputs)
    assert ours.shape == (3, 81 * colours, side // 4, side // 4)
    assert ours.dtype == torch.float32
    # Its filters are worked out in single precision.
    torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("setting", "wrong"), [("_SLANT", 0.55), ("_FREQUENCY", 2.3), ("_WIDTH", 0.82)])
def test_another_wavelet_is_seen(
    kymatio: Any, monkeypatch: pytest.MonkeyPatch, setting: str, wrong: float
) -> None:
    monkeypatch.setattr(scattering, setting, wrong)
    scattering._filters.cache_clear()
    inputs = images(3, 1, 28)
    theirs = kymatio.ScatteringTorch2D(J=2, shape=(28, 28))(inputs).flatten(1, 2)
    assert (scatter(inputs) - theirs).abs().max() > 1e-3
    monkeypatch.undo()
    scattering._filters.cache_clear()
