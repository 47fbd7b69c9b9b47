"""Noise that is drawn while gradients are computed, and fingerprints of what is released."""

import pytest
import torch
from torch import nn

import hush
from hush.core.parts import Noise
from hush.core.randomness import Stream
from hush.training.fingerprint import fingerprint
from tests.training.helpers import plan_of, run, step_of

RECORDS = 20


def update(
    noise: Noise, monkeypatch: pytest.MonkeyPatch, many: int, rate: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one step releases, and the state of its generator then."""
    monkeypatch.setattr("hush.training.noisy_mean._BACKGROUND_SIZE", many)
    torch.manual_seed(0)
    model = nn.Linear(60, 30)
    inputs, targets = torch.randn(RECORDS, 60), torch.randint(0, 30, (RECORDS,))
    clipping = hush.Lp(p=1.0, norm=1.0) if isinstance(noise, hush.Laplace) else hush.L2(1.0)
    plan = plan_of(hush.Poisson(rate), clipping, noise)
    step = step_of(model, plan, seed=1, records=RECORDS, execution=hush.Execution(physical_batch=3))
    run(step, (inputs, targets))
    assert step.update is not None
    assert isinstance(step.generator, Stream)
    return step.update, step.generator.get_state()


@pytest.mark.parametrize(
    "noise", [hush.Gaussian(1.0), hush.Laplace(1.0), hush.Rectified(scale=1.0, bound=2.0)], ids=str
)
@pytest.mark.parametrize(("rate", "spare"), [(1e-9, True), (0.5, True), (0.5, False)])
def test_early_noise_is_the_same_noise(
    noise: Noise, rate: float, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hush.training.noisy_mean.spare_core", lambda: spare)
    late, late_state = update(noise, monkeypatch, 10**9, rate)
    early, early_state = update(noise, monkeypatch, 1, rate)
    assert torch.equal(early, late)
    assert torch.equal(early_state, late_state)
    assert late.std() > 0


def test_coordinates_and_noise_are_not_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from one generator, which two threads must not share."""
    early: list[bool] = []
    monkeypatch.setattr("hush.training.noisy_mean._BACKGROUND_SIZE", 1)
    model = nn.Linear(3, 2)
    for sampling in (hush.Poisson(0.5), hush.Twice(rate=0.5, coordinate_rate=0.5)):
        step = step_of(model, plan_of(sampling), records=9)
        with step._mean().early() as drawn:
            early.append(drawn() is not None)
    assert early == [True, False]


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
