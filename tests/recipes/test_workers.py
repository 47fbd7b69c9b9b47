import pytest

from recipes.workers import _share, workers


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
