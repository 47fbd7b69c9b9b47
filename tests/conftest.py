"""The same examples every time, none without its data: a red build means that the code changed."""

import gc
import os
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from hush.noise import Gaussian
from hush_recipes.data.published import FILES

RECIPES = Path(__file__).parents[1] / "recipes"


def _install_recipes(folder: Path) -> None:
    """Put the entry points of `recipes/` on the path of this process and of those that tests start."""
    project = tomllib.loads((RECIPES / "pyproject.toml").read_text())["project"]
    metadata = folder / f"hush_recipes-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: hush-recipes\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    added = [str(folder), str(RECIPES)]
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, os.environ.get("PYTHONPATH", "")]).rstrip(":")


_metadata = TemporaryDirectory(prefix="hush-recipes-")
_install_recipes(Path(_metadata.name))

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# `torch.manual_seed` keeps the text of its callers' lines for each device that may be used later, which
# takes longer than many a test; no device comes while tests run.
for absent in (torch.cuda, torch.xpu, torch.mtia):
    if not absent.is_available():
        setattr(absent, "manual_seed_all", lambda seed: None)  # noqa: B010


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "real_data(*names): reads published files; skipped where HUSH_DATA does not hold them"
    )
    config.addinivalue_line(
        "markers", "few(number): so many of the test's cases, evenly spread, are not slow"
    )


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but a few cases of a test with many as slow."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault((str(item.path), item.name.partition("[")[0]), []).append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("few")
        assert mark is not None
        kept = {round(k * (len(group) - 1) / max(1, mark.args[0] - 1)) for k in range(mark.args[0])}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what importing has made, which stays, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("real_data"):
        absent = [name for name in mark.args if not is_available(name)]
        if absent:
            pytest.skip(f"not below HUSH_DATA: {', '.join(absent)}")


def is_available(name: str) -> bool:
    """Whether the published files of a data set are below HUSH_DATA, packed or not."""
    if "HUSH_DATA" not in os.environ:
        return False
    folder = Path(os.environ["HUSH_DATA"])
    if name == "cifar10" and (folder / "cifar10" / "cifar10.npz").is_file():
        return True
    paths = [(folder / file.path, bool(file.unpacked)) for file in FILES[name]]
    return all(path.is_file() or (packed and path.with_suffix("").is_file()) for path, packed in paths)


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian noise of exactly zero, which no multiplier gives: what is left is the records' part."""

    def location_itself(self: Gaussian, location: Tensor, **_: object) -> Tensor:
        return location

    monkeypatch.setattr(Gaussian, "privatize", location_itself)
