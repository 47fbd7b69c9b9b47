"""Noise that is drawn while gradients are computed, and fingerprints of what is released."""

import time
from concurrent.futures import Future, wait
from threading import Thread, current_thread
from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.parts import Noise
from hush.core.randomness import Stream
from hush.training.fingerprint import _hash, _place_weights, fingerprint
from hush.training.noisy_mean import run_in_background, spare_core
from tests.training.test_step import LOSS

RECORDS = 20


def update(
    noise: Noise, monkeypatch: pytest.MonkeyPatch, many: int, rate: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one step releases, and the state of its generator then."""
    monkeypatch.setattr("hush.training.noisy_mean._BACKGROUND_SIZE", many)
    torch.manual_seed(0)
    model = nn.Linear(60, 30)
    inputs, targets = torch.randn(RECORDS, 60), torch.randint(0, 30, (RECORDS,))
    clipping = hush.Lp(p=1.0, norm=1.0) if isinstance(noise, hush.Laplace) else hush.L2(norm=1.0)
    plan = hush.Plan(sampling=hush.Poisson(rate=rate), clipping=clipping, noise=noise)
    step = hush.PrivateStep(
        model,
        LOSS,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        records=RECORDS,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(1)),
        execution=hush.Execution(physical_batch=3),
    )
    for batch in step.batches((inputs, targets), steps=1):
        step(batch)
    assert step.update is not None
    assert isinstance(step.generator, Stream)
    return step.update, step.generator.get_state()


@pytest.mark.parametrize(
    "noise",
    [
        hush.Gaussian(multiplier=1.0),
        hush.Laplace(multiplier=1.0),
        hush.GeneralizedGaussian(beta=2.0, multiplier=1.0),
        hush.Rectified(scale=1.0, bound=2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("rate", [1e-9, 0.5])
@pytest.mark.parametrize("spare", [False, True])
def test_early_noise_is_the_same_noise(
    noise: Noise, rate: float, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hush.training.noisy_mean.spare_core", lambda: spare)
    late, late_state = update(noise, monkeypatch, 10**9, rate)
    early, early_state = update(noise, monkeypatch, 1, rate)
    assert torch.equal(early, late)
    assert torch.equal(early_state, late_state)
    assert late.std() > 0


def test_only_noise_that_does_not_depend_on_the_sum_comes_before_it() -> None:
    kinds = {name: kind for name, kind in Noise.kinds.items() if issubclass(kind, Noise)}
    names = {name for name, kind in kinds.items() if kind.additive}
    assert names == {"Gaussian", "Laplace", "GeneralizedGaussian", "BlockGaussian"}

    class Rounded(hush.Gaussian):
        pass

    assert not Rounded.additive
    del Noise.kinds["Rounded"]


def test_coordinates_and_noise_are_not_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from one generator, which two threads must not share."""
    early: list[bool] = []
    monkeypatch.setattr("hush.training.noisy_mean._BACKGROUND_SIZE", 1)
    model = nn.Linear(3, 2)
    for sampling in (hush.Poisson(rate=0.5), hush.Twice(rate=0.5, coordinate_rate=0.5)):
        noise = hush.Gaussian(multiplier=1.0)
        plan = hush.Plan(sampling=sampling, clipping=hush.L2(norm=1.0), noise=noise)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = hush.PrivateStep(model, LOSS, optimizer, plan, records=9)
        with step._mean(None).early() as drawn:
            early.append(drawn() is not None)
    assert early == [True, False]


def test_a_thread_is_not_added_to_as_many_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done = torch.get_num_threads(), list[Thread]()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(threads + 1)))
    assert spare_core()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(threads)))
    assert not spare_core()
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert not spare_core()
    with run_in_background(lambda: done.append(current_thread())) as ready:
        ready()
        assert done == [current_thread()]


@pytest.mark.parametrize("spare", [False, True])
def test_what_the_work_raises_is_raised(spare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.training.noisy_mean.spare_core", lambda: spare)

    def work() -> None:
        raise ValueError("no noise")

    with pytest.raises(ValueError, match="no noise"), run_in_background(work) as result:
        result()


def test_the_work_is_over_when_the_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.training.noisy_mean.spare_core", lambda: True)
    done: list[int] = []

    def work() -> None:
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(KeyError), run_in_background(work):
        raise KeyError
    assert done == [1]


def test_an_interrupt_waits_for_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.training.noisy_mean.spare_core", lambda: True)
    done: list[int] = []
    waits: list[int] = []

    def work() -> None:
        time.sleep(0.05)
        done.append(1)

    def impatient(works: list[Future[None]]) -> None:
        waits.append(1)
        if len(waits) == 1:
            raise KeyboardInterrupt
        wait(works)

    monkeypatch.setattr("hush.training.noisy_mean.wait", impatient)
    with pytest.raises(KeyboardInterrupt), run_in_background(work):
        pass
    assert done == [1]
    assert len(waits) == 2


def test_equal_bits_have_equal_names_and_any_change_shows() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.randn(3, 50).to(dtype)
        name = fingerprint([tensor])
        assert name == fingerprint([tensor.clone()])
        names = {name}
        for i in range(tensor.numel()):
            changed = tensor.clone()
            changed.view(-1)[i] = (
                torch.nextafter(changed.view(-1)[i].float(), torch.tensor(torch.inf)).to(dtype)
                if dtype == torch.float32
                else changed.view(-1)[i] * 1.5
            )
            names.add(fingerprint([changed]))
        assert len(names) == tensor.numel() + 1


def test_order_and_arrangement_show() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    names = {
        fingerprint(each)
        for each in ([a, b], [b, a], [a.flip(0), b], [torch.cat([a, b])], [a], [torch.zeros(2)], [])
    }
    assert len(names) == 7


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 10_000])
def test_weights_of_places_give_the_number_that_blocks_give(size: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (size,))
    kept = _place_weights(words.device, size)
    assert (words * kept).sum() == _hash(words)
    assert (words.roll(1) * kept).sum() != _hash(words) or size == 1


@pytest.mark.parametrize("phase", ["clipped_sum", "privatize"])
def test_a_phase_that_is_overridden_is_the_one_that_runs(phase: str) -> None:
    calls: list[str] = []

    def counted(step: Any, argument: Any) -> Any:
        calls.append(phase)
        return getattr(hush.PrivateStep, phase)(step, argument)

    kind = type("Counting", (hush.PrivateStep,), {phase: counted})
    updates = []
    for each in (hush.PrivateStep, kind):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        plan = hush.Plan(
            sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = each(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            plan,
            records=6,
            randomness=hush.Randomness(generator=seeded()),
        )
        for batch in step.batches((torch.ones(6, 3), torch.arange(6) % 2), steps=2):
            step(batch)
        updates.append(step.update)
    assert calls == [phase, phase]
    assert torch.equal(updates[0], updates[1])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)
