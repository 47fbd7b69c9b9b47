"""What decides whether a step is replayed; graphs themselves are in tests/gradients/test_replay.py."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import LedgerError, PerformanceWarning, Unsupported
from hush.gradients.cuda_graph import CapturedGraph, CaptureError, Replay
from hush.gradients.recording import record
from hush.training import replay_choice
from hush.training.replay_choice import host_bound, worth

RECORDS = 100
BATCH = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


def plan(**parts: Any) -> hush.Plan:
    usual: dict[str, Any] = {
        "sampling": hush.Poisson(rate=0.5),
        "clipping": hush.L2(norm=1.0),
        "noise": hush.Gaussian(multiplier=1.0),
    }
    return hush.Plan(**usual | parts)


def private_step(model: nn.Module | None = None, **options: Any) -> hush.PrivateStep:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"plan": plan(), "records": RECORDS}
    return hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(7)),
        **settings | options,
    )


def run_again(work: Any, pool: Any, generator: torch.Generator | None) -> Any:
    """A stand-in for a graph where there is no GPU: the same memory, filled by running the work."""
    before = torch.get_rng_state()
    clipped = work()
    torch.set_rng_state(before)

    def replay() -> None:
        for name, value in work().total.items():
            clipped.total[name].copy_(value)

    return CapturedGraph(replay, clipped, [])


def refuse(work: Any, pool: Any, generator: torch.Generator | None) -> Any:
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
        monkeypatch.setattr(replay_choice, "Replay", partial(Replay, capture=capture))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 100))

    return pretend


@pytest.mark.parametrize(
    ("few", "every", "bound"),
    [(9.0, 10.0, True), (2.0, 10.0, True), (0.9, 10.0, False), (10.0, 9.0, True)],
)
def test_the_gpu_waits_where_two_records_take_much_of_the_time_of_all(
    few: float, every: float, bound: bool
) -> None:
    assert host_bound(few, every) is bound


def test_a_graph_is_worth_its_memory_if_it_is_faster_and_leaves_some() -> None:
    assert worth(0.3, 0.01)
    assert not worth(0.99, 0.01)
    assert not worth(0.3, 0.6)


@pytest.mark.parametrize(
    ("times", "replayed"),
    [([9.0, 10.0, 3.0], True), ([9.0, 10.0, 9.9], False), ([0.9, 10.0, 3.0], False)],
)
def test_what_pays_is_replayed(times: list[float], replayed: bool, as_if_on_a_gpu: Any) -> None:
    as_if_on_a_gpu(times)
    step = private_step()
    for batch in islice(step.batches(BATCH), 2):
        step(batch)
    assert step.gradients.replayed is replayed
    assert (step.gradients.replay is not None) is replayed


def test_a_few_steps_are_not_worth_a_measurement(as_if_on_a_gpu: Any) -> None:
    as_if_on_a_gpu([])
    step = private_step()
    for batch in step.batches(BATCH, steps=2):
        step(batch)
    assert step.gradients.replayed is None


def test_replayed_or_not_a_step_of_the_same_layout_releases_the_same(as_if_on_a_gpu: Any) -> None:
    """Noise, dropout and padding are the same; and measuring beforehand has drawn from none of them."""
    updates: list[Tensor] = []
    for capture in (run_again, refuse):
        as_if_on_a_gpu([], capture)
        step = private_step()
        step.gradients.replayed = True  # as from a checkpoint: what was decided is not measured again
        for batch in islice(step.batches(BATCH), 1):
            if capture is refuse:
                with pytest.warns(PerformanceWarning, match="the driver is in a mood"):
                    step(batch)
            else:
                step(batch)
        assert step.update is not None
        updates.append(step.update.clone())
    as_if_on_a_gpu([9.0, 10.0, 3.0])
    step = private_step()
    for batch in islice(step.batches(BATCH), 1):
        step(batch)
    assert step.update is not None
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], step.update)


def test_a_record_that_is_not_finite_is_left_out_of_a_replayed_step(as_if_on_a_gpu: Any) -> None:
    """The step is computed again, under noise of its own, and what came first is not released."""
    as_if_on_a_gpu([])
    spoiled = BATCH[0].clone()
    spoiled[5] = torch.inf
    exact = plan(sampling=hush.FullBatch(), noise=hush.Gaussian(multiplier=1e-9))
    step = private_step(plan=exact)
    step.gradients.replayed = True
    for batch in islice(step.batches((spoiled, BATCH[1])), 2):
        before = step.skipped
        step.model.eval()  # so that the sum is known
        others = torch.arange(RECORDS) != 5
        tape = record(step.model, step.gradients.loss, BATCH[0][others], BATCH[1][others])
        expected = torch.cat([part.flatten() for part in exact.clipping.clip(tape).total.values()])
        step(batch)
        assert step.update is not None
        torch.testing.assert_close(step.update * RECORDS, expected, rtol=1e-4, atol=1e-6)
        assert step.skipped == before + 1


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

    def capture(work: Any, pool: Any, generator: torch.Generator | None) -> Any:
        taken, captured = model.scale, run_again(work, pool, generator)

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
    exact = plan(sampling=hush.FullBatch(), noise=hush.Gaussian(multiplier=1e-9))
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
    monkeypatch.setattr(Replay, "confirm", lambda replay: None)
    with pytest.raises(AssertionError, match="not close"):
        test_a_replay_of_what_was_given_before_is_never_released(change_scale, as_if_on_a_gpu)


def test_a_model_that_may_not_be_trained_is_refused_after_a_replay_too(as_if_on_a_gpu: Any) -> None:
    as_if_on_a_gpu([])
    layer = nn.Linear(4, 3)
    step = private_step(layer)
    step.gradients.replayed = True
    batches = step.batches(BATCH)
    step(next(batches))
    batch = next(batches)
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(LedgerError, match="outside of the private step"):
        step(batch)
    assert step.steps == 1


def test_a_capture_that_fails_is_noted_once_and_runs_without(as_if_on_a_gpu: Any) -> None:
    as_if_on_a_gpu([9.0, 10.0, 3.0], refuse)  # that it is fast by chance is no reason
    step = private_step()
    with pytest.warns(
        PerformanceWarning, match="cannot be replayed as a CUDA graph: the driver"
    ) as notes:
        batches = islice(step.batches(BATCH), 3)
    assert len(notes) == 1
    for batch in batches:
        step(batch)  # warnings are errors here
    assert step.gradients.replayed is False
    assert step.steps == 3


def test_what_was_decided_goes_into_the_checkpoint(as_if_on_a_gpu: Any) -> None:
    as_if_on_a_gpu([9.0, 10.0, 3.0])
    step = private_step()
    for batch in islice(step.batches(BATCH), 1):
        step(batch)
    state = step.state_dict()
    resumed = private_step(ledger=step.ledger)
    resumed.load_state_dict(state)
    next(resumed.batches(BATCH))  # no time is told for another measurement
    assert resumed.gradients.replayed
    state.pop("replayed")  # of a version that replayed on request alone
    resumed = private_step(ledger=step.ledger)
    resumed.load_state_dict(state)
    assert resumed.gradients.replayed is None


def test_what_python_does_in_forward_is_not_left_out(as_if_on_a_gpu: Any) -> None:
    hooked, heard = nn.Linear(4, 3), []
    hooked.register_forward_hook(lambda *_: heard.append(1))
    for model in (hooked,):
        as_if_on_a_gpu([9.0, 10.0, 3.0])
        step = private_step(model)
        for batch in islice(step.batches(BATCH), 2):
            step(batch)
        assert step.gradients.replayed is False
    assert len(heard) >= 2


def test_an_attribute_set_between_steps_is_seen(as_if_on_a_gpu: Any) -> None:
    """A graph would go on with the old one; the ordinary way is what it is to be."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.temperature = 1.0

        def forward(self, rows: Tensor) -> Any:
            return self.layer(rows) / self.temperature

    captured = []

    def counted(*arguments: Any) -> Any:
        captured.append(arguments)
        return run_again(*arguments)

    as_if_on_a_gpu([9.0, 10.0, 3.0], counted)
    model = Scaled()
    step = private_step(model, plan=plan(sampling=hush.FullBatch()))
    for number, batch in enumerate(islice(step.batches(BATCH), 4)):
        model.temperature = 1.0 if number < 2 else 2.0
        step(batch)
    assert len(captured) == 2  # of the measurement, and of the new temperature


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
    step = private_step(**options)
    for batch in islice(step.batches(BATCH), 1):
        step(batch)
    assert step.gradients.replayed is False
    with pytest.raises(Unsupported, match=r"Leave (out replay|replay out)|leave replay out"):
        private_step(**options, execution=hush.Execution(replay=True))


def test_passes_that_change_buffers_are_not_replayed(as_if_on_a_gpu: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))

    as_if_on_a_gpu([9.0, 10.0, 3.0])
    step = private_step(model())
    step.batches(BATCH)
    assert step.gradients.replayed is False
    with pytest.raises(
        Unsupported, match=r"forward passes change 0\.parametrizations.* Leave out replay"
    ):
        private_step(model(), execution=hush.Execution(replay=True)).batches(BATCH)


@needs_cuda
@pytest.mark.parametrize("clipping", [hush.L2(norm=1.0), hush.Linf(norm=0.1)])
def test_on_a_gpu_a_small_model_is_replayed_by_itself(clipping: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)).cuda()
    step = private_step(model, plan=plan(clipping=clipping))
    for batch in step.batches((BATCH[0].cuda(), BATCH[1].cuda()), steps=40):
        step(batch)
    assert step.gradients.replayed
