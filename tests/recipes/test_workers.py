from pathlib import Path

import pytest

from recipes.workers import KEPT, _share, result_of, workers


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
    monkeypatch.setenv(KEPT, str(tmp_path / "runs"))
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
    assert not list((tmp_path / "runs").glob("*.*")), "nothing half written"


def test_results_are_kept_by_function_and_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert result_of(abs, -3) == 3
    assert not list(tmp_path.iterdir()), "only where it is asked for"
    monkeypatch.setenv(KEPT, str(tmp_path))
    assert [result_of(abs, -3), result_of(abs, -4), result_of(str, -3)] == [3, 4, "-3"]
    assert len(list(tmp_path.iterdir())) == 3
    assert [result_of(abs, -3), result_of(abs, -4), result_of(str, -3)] == [3, 4, "-3"]


def counted(run: tuple[Path, int]) -> float:
    """One over a number; a file of that name grows each time it is worked out."""
    folder, number = run
    with (folder / str(number)).open("a") as file:
        file.write(".")
    return 1 / number
