"""What decides whether a step is replayed; graphs themselves are in tests/gradients/test_replay.py."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import PerformanceWarning, Unsupported
from hush.gradients import cuda_graph
from hush.gradients.cuda_graph import CapturedGraph, CaptureError
from hush.gradients.recording import record
from hush.training import replay_choice
from tests.training.helpers import plan_of, step_of

RECORDS = 100
BATCH = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


def plan(**parts: Any) -> hush.Plan:
    return plan_of(**{"sampling": hush.Poisson(0.5), **parts})


def private_step(model: nn.Module | None = None, **options: Any) -> hush.PrivateStep:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    return step_of(model, seed=7, **{"plan": plan(), "records": RECORDS, **options})


def taken(step: hush.PrivateStep, steps: int = 1, data: Any = BATCH) -> hush.PrivateStep:
    """A run whose length is not told, for which a graph may pay."""
    for batch in islice(step.batches(data), steps):
        step(batch)
    return step


def run_again(work: Any, pool: Any) -> Any:
    """A stand-in for a graph where there is no GPU: the same memory, filled by running the work."""
    before = torch.get_rng_state()
    clipped = work()
    torch.set_rng_state(before)

    def replay() -> None:
        for name, value in work().total.items():
            clipped.total[name].copy_(value)

    return CapturedGraph(replay, clipped, [])


def refuse(work: Any, pool: Any) -> Any:
    raise CaptureError("the driver is in a mood")


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replay on the CPU, where times are as they are told: of two records, of all, and of a replay."""

    def pretend(times: list[float], capture: Any = run_again) -> None:
        told: Iterator[float] = iter(times)

        def seconds(work: Any) -> float:
            work()
            return next(told)

        monkeypatch.setattr(replay_choice, "seconds", seconds)
        monkeypatch.setattr(replay_choice, "why_not", lambda step: None)
        monkeypatch.setattr(cuda_graph, "capture_graph", capture)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 100))

    return pretend


@pytest.mark.parametrize(
    ("times", "replayed"),
    [([9.0, 10.0, 3.0], True), ([9.0, 10.0, 9.9], False), ([0.9, 10.0, 3.0], False)],
)
def test_what_pays_is_replayed(times: list[float], replayed: bool, as_if_on_a_gpu: Any) -> None:
    as_if_on_a_gpu(times)
    step = taken(private_step(), 2)
    assert step.gradients.replayed is replayed
    assert (step.gradients.replay is not None) is replayed


def test_replayed_or_not_a_step_of_the_same_layout_releases_the_same(as_if_on_a_gpu: Any) -> None:
    """Noise, dropout and padding are the same; and measuring beforehand has drawn from none of them."""
    updates: list[Tensor] = []
    for capture in (run_again, refuse):
        as_if_on_a_gpu([], capture)
        step = private_step()
        step.gradients.replayed = True  # as from a checkpoint: what was decided is not measured again
        if capture is refuse:
            with pytest.warns(PerformanceWarning, match="the driver is in a mood"):
                taken(step)
        else:
            taken(step)
        assert step.update is not None
        updates.append(step.update.clone())
    as_if_on_a_gpu([9.0, 10.0, 3.0])
    step = taken(private_step())
    assert step.update is not None
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], step.update)


class Scaled(nn.Module):
    """Scores times a number that is an attribute, which a graph takes as given."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.scale = nn.Linear(4, 3), 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.scores(inputs)
        return scores * self.scale


def frozen_graph(model: Scaled) -> Any:
    """A stand-in for a graph that, as a real one, goes on with the attribute of the capture."""

    def capture(work: Any, pool: Any) -> Any:
        taken, captured = model.scale, run_again(work, pool)

        def replay() -> None:
            now, model.scale = model.scale, taken
            captured.replay()
            model.scale = now

        return CapturedGraph(replay, captured.output, [])

    return capture


def change_scale(model: Scaled) -> None:
    model.scale = 3.0


def freeze_bias(model: Scaled) -> None:
    model.scores.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [change_scale, freeze_bias])
def test_a_replay_of_what_was_given_before_is_never_released(change: Any, as_if_on_a_gpu: Any) -> None:
    """It is on its way before anything is compared, so that the GPU does not wait; and discarded."""
    model = Scaled()
    as_if_on_a_gpu([], frozen_graph(model))
    exact = plan(sampling=hush.FullBatch(), noise=1e-9)
    step = private_step(model, plan=exact)
    step.gradients.replayed = True
    for number, batch in enumerate(islice(step.batches(BATCH), 4)):
        if number == 2:
            change(model)
        tape = record(model, step.gradients.loss, *BATCH)
        expected = torch.cat([part.flatten() for part in exact.clipping.clip(tape).total.values()])
        step(batch)
        assert step.update is not None
        torch.testing.assert_close(step.update * RECORDS, expected, rtol=1e-4, atol=1e-6)


def test_a_stale_replay_is_discarded_by_the_comparison_alone(
    as_if_on_a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the sum of the old attribute would be released: the test above can fail."""
    monkeypatch.setattr(cuda_graph, "given", lambda *_: ())
    with pytest.raises(AssertionError, match="not close"):
        test_a_replay_of_what_was_given_before_is_never_released(change_scale, as_if_on_a_gpu)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plan": plan(clipping=hush.Subspaces(ranks=(40, 27), l2=(1.0, 1.0)))},
        {"units": hush.Units(owners=torch.arange(RECORDS) // 2, per_unit=2), "records": None},
        {"plan": plan(sampling=hush.Twice(rate=0.5, coordinate_rate=0.25))},
    ],
)
def test_what_cannot_be_replayed_is_quietly_computed_without(options: dict[str, Any]) -> None:
    assert taken(private_step(**options)).gradients.replayed is False
    with pytest.raises(Unsupported, match=r"[Ll]eave out replay"):
        private_step(**options, execution=hush.Execution(replay=True))


@needs_cuda
@pytest.mark.parametrize("clipping", [hush.L2(1.0), hush.Linf(0.1)])
def test_on_a_gpu_a_small_model_is_replayed_by_itself(clipping: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)).cuda()
    data = tuple(part.cuda() for part in BATCH)
    step = taken(private_step(model, plan=plan(clipping=clipping)), 40, data)
    assert step.gradients.replayed
