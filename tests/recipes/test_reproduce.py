"""`hush reproduce`: recipes are listed and run, and are not a part of the package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush_recipes.registry import all_recipes
from tests.cli.command import call


def test_reproduce_lists_its_recipes_and_refuses_others(tmp_path: Path) -> None:
    listed = call("reproduce").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(all_recipes())
    assert any(re.match(r"gg-dimension +\w.*\.$", line) for line in listed)
    wrong = call("reproduce", "gg-dimension", "nothing", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'nothing' is no recipe; choose from audit-mechanisms, bounded-fig1" in wrong.stderr
    near = call("reproduce", "dpsur-tabel2")
    assert "choose from dpsur-table2" in near.stderr
    none = call("reproduce", "gg-dimension", "--seeds", "0", cwd=tmp_path)
    assert none.returncode == 2
    assert none.stderr.startswith("hush: --seeds=0 must be a whole number >= 1")
    assert not list(tmp_path.iterdir())


def test_reproduce_prints_a_table_and_leaves_its_files(tmp_path: Path) -> None:
    result = call("reproduce", "gg-fig10", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "| Laplace, order 2, epsilon 0.1" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"gg-fig10.csv", "gg-fig10.png"}


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
