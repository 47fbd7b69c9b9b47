import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import PerformanceWarning, Unsupported
from hush.core.parts import ClippedSum, Clipping
from hush.gradients import cuda_graph
from hush.gradients.cuda_graph import CapturedGraph, CaptureError, Replay, capture_graph, padded_size
from hush.gradients.losses import PerSampleLoss, per_sample_loss
from hush.gradients.recording import record

LOSS = nn.CrossEntropyLoss(reduction="none")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


def run_again(work: Callable[[], ClippedSum], pool: Any) -> Any:
    """A stand-in for a graph where there is no GPU: the same memory, filled by running the work."""
    clipped = work()

    def replay() -> None:
        fresh = work()
        for name, value in fresh.total.items():
            clipped.total[name].copy_(value)
        clipped.skipped.copy_(fresh.skipped)

    return CapturedGraph(replay, clipped, [])


def refuse(work: Callable[[], Any], pool: Any) -> Any:
    raise CaptureError("the driver is in a mood")


def flat(clipped: ClippedSum) -> Tensor:
    return torch.cat([value.flatten() for value in clipped.total.values()])


class Bag(nn.Module):
    """Weighted words; takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.scores = nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        summed = (self.words(ids) * weights[..., None]).sum(1)
        scores: Tensor = self.scores(self.dropout(summed))
        return scores


def bags(records: int, device: str = "cpu") -> tuple[dict[str, Tensor], Tensor]:
    inputs = {"ids": torch.randint(0, 50, (records, 6)), "weights": torch.rand(records, 6)}
    moved = {name: value.to(device) for name, value in inputs.items()}
    return moved, torch.randint(0, 3, (records,)).to(device)


@pytest.mark.parametrize(
    ("records", "most", "size"),
    [
        (1, None, 64),
        (64, None, 64),
        (65, None, 128),
        (2047, None, 2048),
        (2049, None, 2176),
        (5, 8, 8),
        (9, 8, 9),
        (100, 1000, 128),
    ],
)
def test_a_batch_is_padded_to_a_round_size_within_the_physical_batch(
    records: int, most: int | None, size: int
) -> None:
    assert padded_size(records, most) == size


@pytest.mark.parametrize("capture", [run_again, refuse])
def test_a_padded_sum_of_a_tree_is_the_sum_of_its_records(
    capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "capture_graph", capture)
    torch.manual_seed(0)
    model, clipping = Bag().eval(), hush.L2(0.1)
    replay = Replay(model, LOSS, clipping, most_records=80, required=False)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for records in (1, 64, 70, 80, 3):
            inputs, targets = bags(records)
            present = torch.rand(records) < 0.7
            inputs["weights"][~present] = torch.nan  # an empty slot counts for nothing
            ours = replay(inputs, targets, present=present)
            rows = {name: value[present] for name, value in inputs.items()}
            expected = clipping.clip(record(model, LOSS, rows, targets[present]))
            assert int(ours.skipped) == 0
            torch.testing.assert_close(flat(ours), flat(expected), rtol=1e-5, atol=1e-7)
    # said once, however many sizes there are
    assert [note.category for note in noted] == ([PerformanceWarning] if capture is refuse else [])
    assert all("the driver is in a mood" in str(note.message) for note in noted)


def test_a_record_that_is_not_finite_is_computed_again_without_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graph, "capture_graph", run_again)
    torch.manual_seed(0)
    model, clipping = Bag().eval(), hush.L2(0.1)
    replay = Replay(model, LOSS, clipping)
    inputs, targets = bags(70)
    replay(inputs, targets)
    inputs["weights"][0] = torch.inf  # the first, of which the padding is made
    ours = replay(inputs, targets)
    assert int(ours.skipped) == 1
    rest = {name: value[1:] for name, value in inputs.items()}
    torch.testing.assert_close(flat(ours), flat(clipping.clip(record(model, LOSS, rest, targets[1:]))))


def test_a_sum_that_cannot_be_used_is_zero_until_it_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that noise may be added before the GPU is waited for, and what is not finite never is."""
    monkeypatch.setattr(cuda_graph, "capture_graph", run_again)
    torch.manual_seed(0)
    model, clipping = Bag().eval(), hush.L2(0.1)
    replay = Replay(model, LOSS, clipping)
    inputs, targets = bags(70)
    good = flat(replay(inputs, targets, verify=False)).clone()
    assert not replay.failed()
    spoiled = {**inputs, "weights": inputs["weights"].clone()}
    spoiled["weights"][3] = torch.nan
    assert not flat(replay(spoiled, targets, verify=False)).any()
    assert torch.equal(flat(replay(inputs, targets, verify=False)), good)
    assert replay.failed()  # the one before the last
    assert not replay.failed()
    # a capture on the way, for a physical batch of a new size, does not hide it
    replay(spoiled, targets, verify=False)
    assert padded_size(10, None) != padded_size(70, None)
    replay(*bags(10), verify=False)
    assert replay.failed()


def test_graphs_are_captured_anew_for_what_they_took_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = mock.Mock(side_effect=run_again)
    monkeypatch.setattr(cuda_graph, "capture_graph", counted)
    layer = nn.Linear(4, 3)
    model, batch = nn.Sequential(layer), (torch.randn(5, 4), torch.zeros(5).long())
    clipping = hush.L2(0.1)
    weighed = nn.CrossEntropyLoss(torch.ones(3))
    loss = per_sample_loss(weighed)
    assert isinstance(loss, PerSampleLoss)
    weighed = loss.loss
    replay = Replay(model, loss, clipping)

    def captures() -> int:
        before = counted.call_count
        expected = flat(clipping.clip(record(model, loss, *batch)))
        torch.testing.assert_close(flat(replay(*batch)), expected, rtol=1e-5, atol=1e-7)
        return counted.call_count - before

    assert [captures(), captures()] == [1, 0]
    with torch.no_grad():
        layer.weight.add_(1)  # in the same memory, which the graph reads
    assert captures() == 0
    model.eval()
    assert captures() == 1
    layer.weight.data = layer.weight.data.clone()
    assert captures() == 1
    layer.bias.requires_grad_(False)
    assert captures() == 1
    layer.temperature = 2.0  # type: ignore[assignment]
    assert captures() == 1
    weighed.weight = torch.tensor([1.0, 2.0, 3.0])
    assert captures() == 1
    monkeypatch.setattr(cuda_graph, "_replaced_generators", 1)
    assert captures() == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert captures() == 0  # not the GPU's
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        assert [captures(), captures()] == [1, 0]


@needs_cuda
@pytest.mark.parametrize("clipping", [hush.L2(0.1), hush.Linf(0.01), hush.L2Linf(l2=0.1, linf=0.02)])
def test_a_replayed_sum_is_the_sum(clipping: Clipping) -> None:
    first, last = nn.Linear(4, 8), nn.Linear(8, 3)
    model = nn.Sequential(first, nn.Tanh(), last).cuda()
    replay = Replay(model, LOSS, clipping)
    for records in (1, 63, 64, 65, 200, 3):
        inputs, targets = torch.randn(records, 4).cuda(), torch.randint(0, 3, (records,)).cuda()
        inputs[0] = torch.nan if records == 65 else inputs[0]
        ours = replay(inputs, targets)
        expected = clipping.clip(record(model, LOSS, inputs, targets))
        assert int(ours.skipped) == int(expected.skipped) == (records == 65)
        for name, part in expected.total.items():
            torch.testing.assert_close(ours.total[name], part, rtol=1e-4, atol=1e-6)
        first.weight.data.add_(0.01)
    last.requires_grad_(False)
    assert set(replay(inputs, targets).total) == {"0.weight", "0.bias"}


@needs_cuda
def test_dropout_is_drawn_anew_and_follows_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replays differ; from the same state they, a fresh graph and the ordinary way draw the same."""
    torch.manual_seed(0)
    model, clipping = (
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)).cuda(),
        hush.L2(1.0),
    )
    batch = torch.randn(70, 4).cuda(), torch.randint(0, 3, (70,)).cuda()
    replay = Replay(model, LOSS, clipping)

    def seeded(way: Replay) -> Tensor:
        torch.cuda.manual_seed(0)
        return flat(way(*batch)).clone()

    first = seeded(replay)
    assert not torch.equal(first, flat(replay(*batch)))
    assert torch.equal(first, seeded(replay))
    assert torch.equal(first, seeded(Replay(model, LOSS, clipping)))
    monkeypatch.setattr(cuda_graph, "capture_graph", refuse)
    with pytest.warns(PerformanceWarning):
        ordinary = seeded(Replay(model, LOSS, clipping, required=False))
    torch.testing.assert_close(first, ordinary, rtol=1e-5, atol=1e-7)


@needs_cuda
def test_a_captured_model_that_reads_a_value_is_refused_in_order() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, rows: Tensor) -> Any:
            return self.layer(rows if bool((self.layer.weight < 9).all()) else -rows)

    model, batch = Reads().cuda(), (torch.randn(5, 4).cuda(), torch.zeros(5).long().cuda())
    with pytest.raises(Unsupported, match="cannot be captured"):
        Replay(model, LOSS, hush.L2(0.1))(*batch)
    record(model, LOSS, *batch)  # torch is as it was


@needs_cuda
def test_what_an_empty_slot_holds_does_not_matter_in_a_replay() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    inputs, targets = torch.randn(100, 4).cuda(), torch.randint(0, 3, (100,)).cuda()
    present = torch.rand(100).cuda() < 0.5
    replay = Replay(model, LOSS, hush.L2(0.1))
    before = flat(replay(inputs, targets, present=present)).clone()
    inputs[~present] = torch.nan
    assert torch.equal(before, flat(replay(inputs, targets, present=present)))


@needs_cuda
@pytest.mark.parametrize("clipping", [hush.L2(0.1), hush.Linf(0.01), hush.L2Linf(l2=0.1, linf=0.02)])
def test_a_record_that_is_not_finite_moves_no_other(clipping: Clipping) -> None:
    """The others' sum is computed without the graph then, and is the same to the last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)).cuda()
    inputs, targets = torch.randn(300, 30).cuda(), torch.randint(0, 3, (300,)).cuda()
    present = torch.ones(300, dtype=torch.bool, device="cuda")
    replay = Replay(model, LOSS, clipping)
    present[17] = False
    without = flat(replay(inputs, targets, present=present)).clone()
    present[17], inputs[17] = True, torch.inf
    assert torch.equal(without, flat(replay(inputs, targets, present=present)))


@needs_cuda
def test_under_autocast_a_replay_uses_the_weights_of_now() -> None:
    first, last, clipping = nn.Linear(32, 64), nn.Linear(64, 3), hush.L2(1.0)
    model = nn.Sequential(first, nn.Tanh(), last).cuda()
    batch = torch.randn(64, 32).cuda(), torch.randint(0, 3, (64,)).cuda()
    replay = Replay(model, LOSS, clipping)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ours = flat(replay(*batch)).clone()
            expected = flat(clipping.clip(record(model, LOSS, *batch)))
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            first.weight.add_(0.1)
            last.weight.mul_(-1)


@needs_cuda
def test_what_python_draws_is_not_captured() -> None:
    def work() -> Tensor:
        return torch.ones(3, device="cuda") * random.random()

    with pytest.raises(CaptureError, match="on the CPU"):
        capture_graph(work, torch.cuda.graph_pool_handle())
