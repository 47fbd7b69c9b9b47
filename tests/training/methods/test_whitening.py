"""Noisy whitening: what one record can change, the noise that is charged, and what is made of it."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.core.errors import DataError, InvalidValue, LedgerError
from hush.training.methods.moments import finite_records
from hush.training.methods.whitening import FrozenWhitening, NoisyWhitening

MIXING = torch.tensor([[2.0, 0.0, 0.0], [1.9, 0.3, 0.0], [-1.0, 0.5, 0.7]])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(records: int) -> Tensor:
    """Of three channels that go together, around a mean of every place's own."""
    drawn = torch.randn(records, 3, 2, 2, generator=seeded(7))
    return torch.einsum("dc,ncij->ndij", MIXING, drawn) + torch.arange(12.0).view(3, 2, 2)


def released(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What goes out, as it goes."""
    means: list[Tensor] = []

    def fingerprint(values: list[Tensor]) -> str:
        means.extend(value.clone() for value in values)
        return f"released {len(means)}"

    monkeypatch.setattr("hush.training.methods.moments.fingerprint", fingerprint)
    return means


def test_without_much_noise_channels_are_unrelated_and_alike() -> None:
    inputs = images(400)
    whitening = NoisyWhitening(multiplier=1e-6, norm=1e2, square_norm=1e3)
    white = whitening(inputs, hush.Ledger(), generator=seeded())(inputs).double().numpy()
    assert white.mean(0) == pytest.approx(np.zeros((3, 2, 2)), abs=1e-3)
    values = white.transpose(1, 0, 2, 3).reshape(3, -1)
    assert values @ values.T / values.shape[1] == pytest.approx(np.eye(3), abs=1e-2)


def test_the_matrix_is_the_inverse_root_by_scipy() -> None:
    from scipy.linalg import fractional_matrix_power

    inputs = images(400)
    layer = NoisyWhitening(multiplier=1e-6, norm=1e2, square_norm=1e3)(inputs, hush.Ledger())
    centred = (inputs - inputs.mean(0)).double().numpy().transpose(1, 0, 2, 3).reshape(3, -1)
    root = fractional_matrix_power(centred @ centred.T / centred.shape[1], -0.5)
    assert layer.matrix.numpy() == pytest.approx(root, rel=1e-3, abs=1e-3)


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


@pytest.mark.parametrize("strange", [1e30, -5.0, math.nan, math.inf])
def test_one_record_moves_either_sum_by_its_norm_at_most(
    strange: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releases of neighbours under the same noise differ by what the record added."""
    means = released(monkeypatch)
    present, record = images(9), torch.full((1, 3, 2, 2), strange)
    noisy = NoisyWhitening(multiplier=1.0, norm=0.5, square_norm=0.25)

    def sums() -> list[Tensor]:
        means.clear()
        for inputs in (present, torch.cat([present, record])):
            noisy(inputs, hush.Ledger(), generator=seeded(3))
        return [(10 * means[2 + k] - 9 * means[k]).norm() for k in (0, 1)]

    # up to the grid that noisy sums are rounded to
    for moved, norm in zip(sums(), (0.5, 0.25), strict=True):
        assert moved <= norm * (1 + 1e-3)
    # a version that takes the products of what was not held is caught
    if math.isfinite(strange):
        _, products = noisy.vectors(next(finite_records(record)))
        assert float(products.norms(2)) > 0.25


def test_the_noise_is_the_noise_that_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    means, ledger = released(monkeypatch), hush.Ledger()
    NoisyWhitening(multiplier=8.0, norm=3.0, square_norm=0.5)(
        torch.zeros(10, 100, 200), ledger, generator=seeded()
    )
    ((plan, releases),) = ledger.counts.items()
    assert releases == 2
    charged = float(plan.noise.to_plain()["multiplier"])
    for value, norm, numbers in zip(means, (3.0, 0.5), (20000, 10000), strict=True):
        assert value.numel() == numbers
        assert float(value.std()) * 10 == pytest.approx(charged * norm, rel=5 / math.sqrt(2 * numbers))


def test_all_that_is_made_is_made_of_what_was_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the noisy means and the inputs' shape alone: the layer is what they give again."""
    means, noisy = released(monkeypatch), NoisyWhitening(multiplier=1.0)
    inputs = images(20)
    layer = noisy(inputs, hush.Ledger())
    repeated = noisy.statistics(means, inputs.shape)
    assert torch.equal(layer.mean, repeated.mean)
    assert torch.equal(layer.matrix, repeated.matrix)
    assert not torch.equal(layer.matrix, noisy(inputs, hush.Ledger()).matrix), "fresh noise shows"


def test_nothing_is_released_that_cannot_be_charged() -> None:
    ledger = hush.Ledger()
    ledger.close()
    with pytest.raises(LedgerError):
        NoisyWhitening(multiplier=8.0)(images(5), ledger)


@pytest.mark.parametrize("inputs", [torch.ones(3), torch.ones(0, 2), torch.ones(3, 2).long()])
def test_what_has_no_channels_is_refused(inputs: Tensor) -> None:
    with pytest.raises(DataError, match="records x channels"):
        NoisyWhitening(multiplier=1.0)(inputs, hush.Ledger())


def test_what_is_no_tensor_and_no_ledger_is_refused() -> None:
    wrong: Any = np.ones((3, 2))
    with pytest.raises(InvalidValue, match="inputs"):
        NoisyWhitening(multiplier=1.0)(wrong, hush.Ledger())
    with pytest.raises(InvalidValue, match="ledger"):
        NoisyWhitening(multiplier=1.0)(images(3), cast("Any", "ledger.jsonl"))


@pytest.mark.parametrize("name", ["multiplier", "norm", "square_norm"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        NoisyWhitening(**{"multiplier": 1.0, name: value})


def test_inputs_without_places_and_a_private_step_behind_it() -> None:
    inputs = images(30).flatten(1)
    layer = NoisyWhitening(multiplier=1e-6, norm=1e2, square_norm=1e3)(inputs, hush.Ledger())
    white = layer(inputs).double()
    assert layer(inputs.double()).numpy() == pytest.approx(white.numpy(), abs=1e-4)
    assert (white.T @ white / 30).numpy() == pytest.approx(np.eye(12), abs=2e-2)
    model = torch.nn.Sequential(layer, torch.nn.Linear(12, 2))
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, torch.nn.CrossEntropyLoss(), optimizer, plan, records=30)
    before = layer.matrix.clone()
    for batch in step.batches((inputs, torch.zeros(30).long()), steps=1):
        assert step(batch)
    assert isinstance(layer, FrozenWhitening)
    assert torch.equal(layer.matrix, before)


def test_one_record_more_does_not_make_others_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of factored products may depend in their last bit on a record's place; no edge is there."""
    many = (torch.randn(1, 200, 3, generator=seeded()) * 2.0**50).repeat(60, 1, 1)
    more = torch.cat([torch.zeros(1, 200, 3), many])

    def products_norms(inputs: Tensor) -> Tensor:
        return NoisyWhitening(multiplier=1.0).vectors(next(finite_records(inputs)))[1].norms(2)

    edge = float(products_norms(many)[0]) * 2.0**-126
    steps = [edge * (1 + k * 2.0**-52) for k in range(-4, 5)]

    def moved() -> float:
        def total(inputs: Tensor, square_norm: float) -> Tensor:
            noisy = NoisyWhitening(multiplier=1.0, square_norm=square_norm)
            return list(noisy.clipped_sums(inputs))[1][1]

        return max(float((total(more, step) - total(many, step)).norm()) / step for step in steps)

    assert moved() <= 1e-6

    def cut(norm: float, norms: Tensor) -> Tensor:
        weights = (norm / norms).clamp(max=1.0)
        return weights.where(weights >= torch.finfo(torch.float32).tiny, 0.0)

    # weights that end in a jump are caught, here where the norms differ at all
    monkeypatch.setattr("hush.clipping.norms.clipping_weights", cut)
    first, second = (products_norms(inputs)[-60:] for inputs in (many, more))
    assert moved() >= 1 or torch.equal(first, second)
