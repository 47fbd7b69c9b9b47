"""Noisy moments: what one record can change, the noise that is charged, and the charge on the ledger."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush_recipes.statistics.moments import NoisyMoments, NoisyWhitening
from tests.training.helpers import released, seeded

MIXING = torch.tensor([[2.0, 0.0, 0.0], [1.9, 0.3, 0.0], [-1.0, 0.5, 0.7]])


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


def mixed_images(records: int) -> Tensor:
    """Of three channels that go together, around a mean of every place's own."""
    drawn = torch.randn(records, 3, 2, 2, generator=seeded(7))
    return torch.einsum("dc,ncij->ndij", MIXING, drawn) + torch.arange(12.0).view(3, 2, 2)


def test_the_matrix_is_the_inverse_root_by_scipy() -> None:
    from scipy.linalg import fractional_matrix_power

    inputs = mixed_images(400)
    layer = NoisyWhitening(multiplier=1e-6, norm=1e2, square_norm=1e3)(inputs, hush.Ledger())
    centred = (inputs - inputs.mean(0)).double().numpy().transpose(1, 0, 2, 3).reshape(3, -1)
    root = fractional_matrix_power(centred @ centred.T / centred.shape[1], -0.5)
    assert layer.matrix.numpy() == pytest.approx(root, rel=1e-3, abs=1e-3)
    assert layer(inputs).double().numpy().mean(0) == pytest.approx(np.zeros((3, 2, 2)), abs=1e-3)


def test_directions_that_noise_hides_are_not_blown_up() -> None:
    """Nothing but noise: no direction is scaled by more than its largest variance allows."""
    channels, records = 60, 50
    layer = NoisyWhitening(multiplier=2.0)(
        torch.zeros(records, channels, 3), hush.Ledger(), generator=seeded()
    )
    deviation = math.sqrt(math.sqrt(2 * channels) * 2.0 / records)
    scales = torch.linalg.eigvalsh(layer.matrix)
    # noise rarely shows a variance far above the largest that it has in the limit
    assert float(scales.max()) == pytest.approx(1 / deviation, rel=1e-4)
    assert float(scales.min()) > 0.9 / deviation


@pytest.mark.parametrize("kind", [NoisyMoments, NoisyWhitening])
@pytest.mark.parametrize("strange", [1e30, -5.0, math.nan, math.inf])
def test_one_record_moves_either_sum_by_its_norm_at_most(
    kind: Any, strange: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releases of neighbours under the same noise differ by what the record added."""
    means = released(monkeypatch)
    present, record = mixed_images(9), torch.full((1, 3, 2, 2), strange)
    noisy = kind(multiplier=1.0, norm=0.5, square_norm=0.25)
    for inputs in (present, torch.cat([present, record])):
        noisy(inputs, hush.Ledger(), generator=seeded(3))
    moved = [(10 * means[2 + k] - 9 * means[k]).norm() for k in (0, 1)]
    # up to the grid that noisy sums are rounded to
    for distance, norm in zip(moved, (0.5, 0.25), strict=True):
        assert distance <= norm * (1 + 1e-3)
    # a version without the clip is caught
    if math.isfinite(strange):
        _, squares = noisy._vectors(record.double().flatten(2))
        assert float(squares.norms(2)) > 0.25


@pytest.mark.parametrize(
    ("kind", "shape", "sizes"),
    [(NoisyMoments, (10, 20000), (20000, 20000)), (NoisyWhitening, (10, 100, 200), (20000, 10000))],
)
def test_the_noise_is_the_noise_that_is_charged(
    kind: Any, shape: tuple[int, ...], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    means, ledger = released(monkeypatch), hush.Ledger()
    kind(multiplier=8.0, norm=3.0, square_norm=0.5)(torch.zeros(shape), ledger, generator=seeded())
    ((plan, releases),) = ledger.counts.items()
    assert releases == 2
    charged = float(plan.noise.to_plain()["multiplier"])
    for value, norm, numbers in zip(means, (3.0, 0.5), sizes, strict=True):
        assert value.numel() == numbers
        assert float(value.std()) * 10 == pytest.approx(charged * norm, rel=5 / math.sqrt(2 * numbers))


def test_one_record_more_does_not_make_others_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of factored products may depend in their last bit on a record's place; no edge is there."""
    many = (torch.randn(1, 200, 3, generator=seeded()) * 2.0**50).repeat(60, 1, 1)
    more = torch.cat([torch.zeros(1, 200, 3), many])

    def products_norms(inputs: Tensor) -> Tensor:
        return NoisyWhitening(multiplier=1.0)._vectors(inputs.double())[1].norms(2)

    edge = float(products_norms(many)[0]) * 2.0**-126
    steps = [edge * (1 + k * 2.0**-52) for k in range(-4, 5)]

    def moved() -> float:
        def total(inputs: Tensor, square_norm: float) -> Tensor:
            noisy = NoisyWhitening(multiplier=1.0, square_norm=square_norm)
            return list(noisy._clipped_sums(inputs))[1][1]

        return max(float((total(more, step) - total(many, step)).norm()) / step for step in steps)

    assert moved() <= 1e-6

    def cut(norm: float, norms: Tensor, *_: object, **__: bool) -> Tensor:
        weights = (norm / norms).clamp(max=1.0)
        return weights.where(weights >= torch.finfo(torch.float32).tiny, 0.0)

    # weights that end in a jump are caught, here where the norms differ at all
    monkeypatch.setattr("hush.clipping.norms.clipping_weights", cut)
    first, second = (products_norms(inputs)[-60:] for inputs in (many, more))
    assert moved() >= 1 or torch.equal(first, second)
