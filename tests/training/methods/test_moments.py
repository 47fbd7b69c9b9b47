"""Noisy moments: what one record can change, the noise that is charged, and the charge on the ledger."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.core.errors import DataError, LedgerError
from hush.training.methods.moments import NoisyMoments, finite_records
from recipes.dpsur.inputs import FrozenNorm


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(records: int, channels: int = 3) -> Tensor:
    return (
        torch.rand(records, channels, 4, 4, generator=seeded(7))
        * torch.arange(1.0, channels + 1)[:, None, None]
    )


def test_without_much_noise_they_are_the_moments() -> None:
    inputs = images(40)
    actual = NoisyMoments(multiplier=1e-3, norm=10.0, square_norm=100.0)(
        inputs, hush.Ledger(), generator=seeded()
    )
    values = inputs.double().numpy().transpose(1, 0, 2, 3).reshape(3, -1)
    assert actual.mean.numpy() == pytest.approx(values.mean(1), abs=2e-3)
    assert actual.variance.numpy() == pytest.approx(values.var(1), abs=3e-2)


@pytest.mark.parametrize("strange", [1e30, -5.0, math.nan, math.inf])
def test_one_record_moves_either_sum_by_its_norm_at_most(strange: float) -> None:
    """The releases of neighbours under the same noise differ by what the record added."""
    moments = NoisyMoments(multiplier=1.0, norm=0.5, square_norm=0.25, floor=1e-9)
    others = images(9)
    one = torch.full((1, 3, 4, 4), strange)
    sums = []
    for inputs in (others, torch.cat([others, one])):
        actual = moments(inputs, hush.Ledger(), generator=seeded(3))
        sums.append((actual.mean * len(inputs), len(inputs)))
    moved = torch.linalg.vector_norm(sums[1][0] - sums[0][0])
    assert moved <= 0.5 + 1e-9
    # a version without the clip is caught
    (values,) = finite_records(torch.cat([others, one]))
    first = values.mean(2)
    if math.isfinite(strange):
        assert torch.linalg.vector_norm(first[-1]) > 0.5


def test_rounding_that_depends_on_the_others_is_not_seen() -> None:
    """Places that cancel, in memory whose order of summation changes with the number of records."""
    huge = 2.0**60
    one = torch.tensor([9.0, 9.0, -huge, 0.0, 0.0, 0.0, huge, -9.0]).view(1, 1, 8)
    others = one.repeat(15, 1, 1)

    def summed(inputs: Tensor) -> Tensor:
        last = inputs.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        actual = NoisyMoments(multiplier=1.0)(last, hush.Ledger(), generator=seeded(3))
        return actual.mean * len(inputs)

    more = torch.cat([others, torch.full((1, 1, 8), -5.0)])
    assert float((summed(more) - summed(others)).norm()) <= 1 + 1e-9
    # what is within a thousand norms is as it was
    assert float(summed(torch.full((9, 1, 8), 900.0)) - summed(torch.zeros(9, 1, 8))) == pytest.approx(9)


def test_the_noise_is_the_noise_that_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Tensor] = []

    def observed(values: list[Tensor]) -> str:
        released.extend(value.clone() for value in values)
        return f"seen {len(released)}"

    monkeypatch.setattr("hush.training.methods.moments.fingerprint", observed)
    ledger = hush.Ledger()
    inputs = torch.zeros(10, 20000)
    NoisyMoments(multiplier=8.0, norm=3.0, square_norm=0.5)(inputs, ledger, generator=seeded())
    ((plan, releases),) = ledger.counts.items()
    assert releases == 2
    charged = float(plan.noise.to_plain()["multiplier"])
    for value, norm in zip(released, (3.0, 0.5), strict=True):
        # 20,000 draws: five deviations of their standard deviation are 2.5%
        assert float(value.std()) * 10 == pytest.approx(charged * norm, rel=0.025)


def test_the_sums_are_of_all_records_however_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, inputs = NoisyMoments(multiplier=1.0, norm=0.9, square_norm=0.8), images(23)
    whole = moments(inputs, hush.Ledger(), generator=seeded())
    monkeypatch.setattr("hush.training.methods.moments._AT_ONCE", 5)
    parts = moments(inputs, hush.Ledger(), generator=seeded())
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.variance, whole.variance, rtol=1e-10, atol=1e-12)


def test_two_releases_are_on_the_ledger() -> None:
    ledger, moments = hush.Ledger(), NoisyMoments(multiplier=8.0)
    moments(images(5), ledger, generator=seeded())
    paid = ledger.epsilon(1e-5).epsilon.upper
    assert paid == pytest.approx(moments.guarantee(1e-5).epsilon.upper)
    # the closed form of two Gaussian releases, and one release alone is less
    mu = math.sqrt(2) / 8
    from scipy.stats import norm

    delta = norm.cdf(mu / 2 - paid / mu) - math.exp(paid) * norm.cdf(-mu / 2 - paid / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert hush.epsilon(moments.plan, 1, 1e-5).epsilon.upper < 0.7 * paid


def test_nothing_is_released_that_cannot_be_charged() -> None:
    ledger = hush.Ledger()
    ledger.close()
    with pytest.raises(LedgerError):
        NoisyMoments(multiplier=8.0)(images(5), ledger)


def test_variances_that_noise_took_below_zero_are_the_floor() -> None:
    actual = NoisyMoments(multiplier=50.0, floor=0.01)(images(3, 50), hush.Ledger(), generator=seeded())
    assert float(actual.variance.min()) == pytest.approx(0.01)


@pytest.mark.parametrize("inputs", [torch.ones(3), torch.ones(0, 2), torch.ones(3, 2).long()])
def test_what_has_no_channels_is_refused(inputs: Tensor) -> None:
    with pytest.raises(DataError, match="records x channels"):
        NoisyMoments(multiplier=1.0)(inputs, hush.Ledger())


def test_frozen_normalisation_against_numpy_and_under_a_private_step() -> None:
    inputs = images(6)
    mean, variance = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 4.0, 0.25])
    shown = FrozenNorm(mean, variance)(inputs).numpy()
    expected = (inputs.numpy() - mean.numpy()[:, None, None]) / np.sqrt(variance.numpy())[:, None, None]
    assert shown == pytest.approx(expected, rel=1e-5)
    each = torch.rand(3, 4, 4, generator=seeded(1))
    everywhere = FrozenNorm(each, each + 1)(inputs).numpy()
    assert everywhere == pytest.approx((inputs - each).numpy() / np.sqrt(each.numpy() + 1), rel=1e-4)
    model = torch.nn.Sequential(
        FrozenNorm(mean, variance), torch.nn.Flatten(), torch.nn.Linear(3 * 16, 2)
    )
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, torch.nn.CrossEntropyLoss(), optimizer, plan, records=6)
    for batch in step.batches((inputs, torch.zeros(6).long()), steps=1):
        assert step(batch)
    assert torch.equal(model.state_dict()["0.mean"], mean)
