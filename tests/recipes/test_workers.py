import os
from pathlib import Path

import pytest

from hush.core.errors import PerformanceWarning, ProcessFailed
from hush_recipes import workers as module
from hush_recipes.workers import CACHE, cached_result, code_digest, workers


@pytest.mark.parametrize("processes", [1, 2])
def test_a_map_over_processes_is_a_map(processes: int) -> None:
    with workers(processes, "cpu") as over:
        assert list(over(abs, [-1, 2, -3])) == [1, 2, 3]


def test_a_process_that_is_killed_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ProcessFailed, match="--processes 1"), workers(2, "cpu") as over:
        list(over(os._exit, [1]))


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_that_ended_are_not_run_again(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "runs"))
    ran = tmp_path / "ran"
    ran.mkdir()
    for _ in range(2):  # the first is stopped by its third run
        with workers(processes, "cpu") as over:
            results = over(counted, [(ran, 1), (ran, 2), (ran, 0)])
            assert [next(results), next(results)] == [1.0, 0.5]
            with pytest.raises(ZeroDivisionError):
                next(results)
    assert sorted(path.name for path in ran.iterdir()) == ["0", "1", "2"]
    assert [len((ran / name).read_text()) for name in "012"] == [2, 1, 1]
    assert len(list((tmp_path / "runs").iterdir())) == 2, "nothing half written"


def test_results_are_cached_by_code_function_and_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def local(number: int) -> int:
        return number + len(list(tmp_path.iterdir()))

    assert cached_result(abs, -3) == 3
    assert not list(tmp_path.iterdir()), "only where it is asked for"
    monkeypatch.setenv(CACHE, str(tmp_path))
    for _ in range(2):
        assert [cached_result(abs, -3), cached_result(abs, -4), cached_result(str, -3)] == [3, 4, "-3"]
        assert len(list(tmp_path.iterdir())) == 3
        assert cached_result(local, 1) == 4, "what it refers to is not in its name"
    monkeypatch.setattr(module, "_IMPORTED", "another version")
    monkeypatch.setattr(module, "code_digest", lambda: "another version")
    assert cached_result(abs, -3) == 3
    assert len(list(tmp_path.iterdir())) == 4


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the code that results follow from."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("one\ntwo\n")
    (folder / "b.py").write_text("three\n")
    monkeypatch.setattr(module, "_CODE", (folder,))
    return folder


def test_results_of_code_that_has_changed_since_its_import_are_not_kept(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setenv(CACHE, str(runs))
    monkeypatch.setattr(module, "_IMPORTED", code_digest())
    with pytest.warns(PerformanceWarning, match="was edited since it was imported"):
        assert cached_result(edited, code / "a.py") == 8
    assert not list(runs.iterdir()), "edited while it ran"
    with pytest.warns(PerformanceWarning, match="was edited since it was imported"):
        assert cached_result(abs, -3) == 3
    assert not list(runs.iterdir()), "edited before it ran"


def edited(path: Path) -> int:
    """The length of a file before a line is added to it."""
    before = path.read_text()
    path.write_text(before + "more\n")
    return len(before)


def counted(run: tuple[Path, int]) -> float:
    """One over a number; a file of that name grows each time it is worked out."""
    folder, number = run
    with (folder / str(number)).open("a") as file:
        file.write(".")
    return 1 / number
