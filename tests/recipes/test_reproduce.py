"""`hush reproduce`: recipes are listed and run, and are not a part of the package."""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import hush
from hush.core.errors import InvalidValue
from hush_recipes.registry import all_recipes
from hush_recipes.reproduce import reproduce
from tests.cli.command import call


def test_reproduce_lists_its_recipes_and_refuses_others(tmp_path: Path) -> None:
    listed = call("reproduce").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(all_recipes())
    assert any(re.match(r"gg-dimension +\w.*\.$", line) for line in listed)
    wrong = call("reproduce", "gg-dimension", "nothing", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'nothing' is no recipe; choose from audit-mechanisms, bounded-fig1" in wrong.stderr
    assert not list(tmp_path.iterdir())


def test_reproduce_prints_a_table_and_leaves_its_files(tmp_path: Path) -> None:
    result = call("reproduce", "gg-fig10", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "| Laplace, order 2, epsilon 0.1" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"gg-fig10.csv", "gg-fig10.png"}


def test_a_folder_that_takes_no_files_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[str] = []
    monkeypatch.setattr(
        "hush_recipes.registry.all_recipes", lambda: {"gg-fig10": lambda: worked.append("")}
    )
    (tmp_path / "file").write_text("")
    result = call("reproduce", "gg-fig10", "--out", tmp_path / "file" / "out")
    assert result.returncode == 2
    assert re.search(r"--out=\S+/file/out must be .* \(Not a directory\): .*another one", result.stderr)
    monkeypatch.setenv("HUSH_RUNS", str(tmp_path / "file" / "runs"))
    result = call("reproduce", "gg-fig10", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert re.search(r"HUSH_RUNS=\S+/file/runs must be a folder", result.stderr)
    assert not worked


def test_a_table_is_printed_though_its_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "gg-fig10.csv").mkdir()
    result = call("reproduce", "gg-fig10", "--out", tmp_path)
    assert result.returncode == 2
    assert "| Laplace, order 2, epsilon 0.1" in result.stdout
    assert re.search(r"gg-fig10.csv cannot be written \(Is a directory\): the table", result.stderr)


@pytest.mark.parametrize("name", all_recipes())
def test_options_have_the_types_that_a_recipe_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = all_recipes()[name]
    given: dict[str, object] = {}

    def recorded(**options: object) -> None:
        given.update(options)

    recorded.__signature__ = signature(recipe)  # type: ignore[attr-defined]
    monkeypatch.setattr("hush_recipes.registry.all_recipes", lambda: {name: recorded})
    monkeypatch.setattr("hush_recipes.reproduce._show", lambda *_: None)
    options = {key: text for key, text in OPTIONS.items() if key in signature(recipe).parameters}
    arguments = [f"--{key.replace('_', '-')}={text}" for key, text in options.items()]
    result = call("reproduce", name, *arguments, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    types = get_type_hints(recipe.func if isinstance(recipe, partial) else recipe)
    assert given.keys() == options.keys()
    assert all(fits(value, types[key]) for key, value in given.items()), given


OPTIONS = {
    "model": "mnist-cnn",
    "device": "cpu",
    "betas": "1.5,2",
    "epsilons": "2,4",
    "seeds": "2",
    "epochs": "3",
    "steps": "5",
    "learning_rates": "0.1,1",
    "only": "plain",
    "processes": "1",
}


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type, one of several, or a sequence of one."""
    if isinstance(hint, UnionType):
        return any(fits(value, member) for member in get_args(hint))
    if get_origin(hint) is Sequence:
        (member,) = get_args(hint)
        return isinstance(value, Sequence) and all(fits(item, member) for item in value)
    return isinstance(value, hint)


def test_every_option_of_a_recipe_is_tried_above() -> None:
    own = {"names", "out", "quiet"}
    assert signature(reproduce).parameters.keys() - own == OPTIONS.keys()


def test_a_recipe_without_a_network_takes_no_model() -> None:
    with pytest.raises(InvalidValue, match="has no choice of model"):
        reproduce(["gg-fig2"], model="mlp")


@pytest.mark.parametrize("asked", [(), ("--device", "cuda")])
def test_a_device_that_is_not_there_is_refused_before_the_work(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_gpu(*, device: str = "cuda") -> None:
        pytest.fail(f"it began on {device}")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("hush_recipes.registry.all_recipes", lambda: {"on-a-gpu": on_a_gpu})
    result = call("reproduce", "on-a-gpu", *asked, cwd=tmp_path)
    assert result.returncode == 2
    assert "on-a-gpu: --device cuda: torch finds 0 CUDA device(s)" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "2,inf", "2,1e999"])
@pytest.mark.parametrize("option", ["--betas", "--epsilons", "--learning-rates"])
def test_numbers_without_a_meaning_are_refused_before_the_work(
    option: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(**_: object) -> None:
        pytest.fail("it began")

    monkeypatch.setattr("hush_recipes.registry.all_recipes", lambda: {"recipe": recipe})
    result = call("reproduce", "recipe", f"{option}={wrong}", cwd=tmp_path)
    assert result.returncode == 2
    refused = float(wrong.split(",")[-1])
    assert f"hush: {option}={refused} must be a finite number >" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cached", "folder", "said"),
    [
        (True, "", "recipe was stopped. Nothing of it is kept. Set the environment variable HUSH_RUNS"),
        (True, "runs", "recipe was stopped. Its runs that ended are kept in HUSH_RUNS=runs: the same"),
        (False, "runs", "recipe was stopped. Nothing of it is kept.\n"),
    ],
)
def test_a_recipe_that_is_stopped_says_what_is_kept(
    cached: bool, folder: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone() -> None:
        raise KeyboardInterrupt

    def in_processes(*, processes: int = 1) -> None:
        raise KeyboardInterrupt

    recipe = in_processes if cached else alone
    monkeypatch.setenv("HUSH_RUNS", folder)
    monkeypatch.setattr("hush_recipes.registry.all_recipes", lambda: {"recipe": recipe})
    result = call("reproduce", "recipe", cwd=tmp_path)
    assert result.returncode == 130
    assert said in result.stderr


def test_without_the_recipes_one_sentence_says_how_to_install_them() -> None:
    code = (
        "import importlib.metadata as metadata; metadata.entry_points = lambda **_: (); "
        "from hush.cli.main import main; main()"
    )
    for asked in (["reproduce", "gg-fig2", "--seeds", "2"], ["train", "--data", "mnist"]):
        result = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True)
        assert result.returncode == 2
        assert "run `pip install ./recipes` in a clone of hush." in result.stderr
    assert "--data mnist must be one of digits. " in result.stderr


def test_the_package_does_not_import_the_recipes() -> None:
    for path in Path(hush.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("hush_recipes"), path
