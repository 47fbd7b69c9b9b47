"""Ports of a script to a private step: all versions run, learn, and differ by as much as is said."""

import difflib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.reviews import write_reviews

FOLDER = Path(__file__).parents[2] / "examples" / "own_loop"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"own_loop_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where worker processes that are not forks look for the data set
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    write_reviews(folder)
    return folder


PORTS = ["after", "after_lightning", "after_trainer"]


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*:Warning:lightning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:Warning")
@pytest.mark.parametrize("name", ["before", *PORTS])
def test_all_versions_learn(
    name: str, reviews: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = script(name)
    monkeypatch.setattr(module, "EPOCHS", 5)  # half of them will do
    assert module.main(reviews) > 0.8
    assert ("epsilon <= 7.99" in capsys.readouterr().out) == (name in PORTS)


def changed_lines(name: str) -> tuple[int, int]:
    """Lines that a port takes out, and lines that it puts in."""
    before, after = ((FOLDER / f"{each}.py").read_text().splitlines() for each in ("before", name))
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    return sum(line[0] == "-" for line in lines), sum(line[0] == "+" for line in lines)


@pytest.mark.parametrize("name", PORTS)
def test_the_page_counts_the_lines_that_change(name: str) -> None:
    page = (FOLDER / "README.md").read_text()
    counted = re.search(rf"`{name}.py` \| (\d+) \| (\d+) \|", page)
    assert counted is not None
    assert (int(counted[1]), int(counted[2])) == changed_lines(name)
