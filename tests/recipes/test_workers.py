from pathlib import Path

import pytest

from recipes import workers as module
from recipes.workers import CACHE, _share, cached_result, workers


def test_processes_take_a_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[float, int | None]] = []
    monkeypatch.setattr(
        "torch.cuda.set_per_process_memory_fraction",
        lambda share, device: taken.append((share, device)),
    )
    for device in ("cpu", "cuda", "cuda:1"):
        _share(9, device)
    assert [share for share, _ in taken] == pytest.approx([0.1, 0.1])
    assert [device for _, device in taken] == [None, 1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_map_over_processes_is_a_map(processes: int) -> None:
    with workers(processes, "cpu") as over:
        assert list(over(abs, [-1, 2, -3])) == [1, 2, 3]


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
    monkeypatch.setattr(module, "_code", lambda: "another version")
    assert cached_result(abs, -3) == 3
    assert len(list(tmp_path.iterdir())) == 4


def counted(run: tuple[Path, int]) -> float:
    """One over a number; a file of that name grows each time it is worked out."""
    folder, number = run
    with (folder / str(number)).open("a") as file:
        file.write(".")
    return 1 / number
