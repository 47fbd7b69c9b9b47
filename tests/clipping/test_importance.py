"""Importance sampling by norm: what a record adds, how often, and that it is charged as clipping is."""

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.core.errors import Unproved, Unsupported
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense

NORM = 2.0


def added(rows: Tensor) -> Tensor:
    """What one draw of coins makes of each row, one record at a time."""
    tapes = (GradientTape(terms={"w": Dense(row[None])}, device=row.device) for row in rows)
    return torch.stack([hush.Importance(norm=NORM).clip(tape).total["w"] for tape in tapes])


def test_a_record_adds_its_direction_or_nothing_and_its_clipped_gradient_on_average() -> None:
    torch.manual_seed(0)
    rows = torch.tensor([[0.3, 0.4], [0.0, -1.9], [30.0, 40.0], [0.0, 0.0]])
    draws = 3000
    tape = GradientTape(terms={"w": Dense(rows)}, device=rows.device)
    total = torch.zeros(2)
    squares = 0.0
    for _ in range(draws):
        clipped_sum = hush.Importance(norm=NORM).clip(tape).total["w"]
        total += clipped_sum
        squares += float(clipped_sum.square().sum())
    clipped = torch.stack([row / max(1.0, float(row.norm()) / NORM) for row in rows])
    # each coordinate's mean within five of its own deviations; a record's variance is r (norm - r)
    spread = [float(norm) * (NORM - float(norm)) for norm in clipped.norm(dim=1)]
    assert (total / draws - clipped.sum(0)).norm() < 5 * np.sqrt(sum(spread) / draws)
    expected = float(clipped.sum(0).square().sum()) + sum(spread)
    assert squares / draws == pytest.approx(expected, rel=0.05)


def test_no_record_adds_more_than_the_norm_whatever_its_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-12, 15, 200)[:, None]
    rows = torch.randn(200, 3, generator=generator) * scale
    lengths = added(rows).norm(dim=1)
    assert bool(((lengths < 1e-9) | ((lengths - NORM).abs() < 1e-5)).all())
    assert bool((lengths[rows.norm(dim=1) > NORM] > 1).all())


def test_weighing_unclipped_gradients_by_the_inverse_of_their_chance_is_caught() -> None:
    """The broken version: unbiased for the plain gradient, which has no bound."""
    torch.manual_seed(0)
    rows = torch.tensor([[6.0, 8.0], [0.3, 0.4]])
    chances = (rows.norm(dim=1, keepdim=True) / NORM).clamp(max=1.0)
    broken = rows / chances
    assert [round(float(row.norm()), 4) for row in broken] == [10.0, NORM]  # the bound holds by luck
    assert float(added(rows).norm(dim=1).max()) <= NORM + 1e-5


def test_a_coin_of_exactly_zero_does_not_scale_up_what_is_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    rows = torch.tensor([[1e-30, 1e-30], [1e-40, 0.0], [0.0, 0.0], [1e-3, 0.0]])
    assert added(rows).norm(dim=1).tolist() == pytest.approx([0.0, 0.0, 0.0, NORM])


def test_what_is_not_finite_adds_nothing() -> None:
    rows = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [3.0, 4.0]])
    tape = GradientTape(terms={"w": Dense(rows)}, device=rows.device)
    clipped = hush.Importance(norm=NORM).clip(tape)
    assert int(clipped.skipped) == 2
    assert torch.allclose(clipped.total["w"], torch.tensor([1.2, 1.6], dtype=torch.float64))


def plan(clipping: hush.L2 | hush.Importance) -> hush.Plan:
    return hush.Plan(
        sampling=hush.Poisson(rate=0.1), clipping=clipping, noise=hush.Gaussian(multiplier=1.0)
    )


def test_it_costs_what_clipping_costs_and_a_smaller_chance_costs_less() -> None:
    orders = [1.5, 2.0, 8.0, 32.0]
    ours = hush.rdp(plan(hush.Importance(norm=NORM)), orders)
    assert ours.tolist() == hush.rdp(plan(hush.L2(norm=NORM)), orders).tolist()
    # a record of norm r is a Poisson-sampled one of the full norm at a lower rate
    for share in (0.01, 0.5, 0.99):
        rare = hush.Plan(
            sampling=hush.Poisson(rate=0.1 * share),
            clipping=hush.L2(norm=NORM),
            noise=hush.Gaussian(multiplier=1.0),
        )
        assert (hush.rdp(rare, orders) < ours).all()


def test_coordinates_and_selection_are_not_proved() -> None:
    with pytest.raises(Unproved):
        hush.rdp(
            hush.Plan(
                sampling=hush.Twice(rate=0.1, coordinate_rate=0.5),
                clipping=hush.Importance(norm=1.0),
                noise=hush.Gaussian(multiplier=1.0),
            ),
            [2.0],
        )
    tape = GradientTape(terms={"w": Dense(torch.ones(1, 2))}, device=torch.device("cpu"))
    with pytest.raises(Unsupported, match="whole records"):
        hush.Importance(norm=1.0).clip(tape, mask=lambda values: values)


@pytest.mark.parametrize(("norm", "size"), [(1e-7, 1e38), (1e-10, 1e35), (1e-12, 1e33), (1.0, 3e38)])
def test_weights_too_small_for_single_precision_let_nobody_out(norm: float, size: float) -> None:
    rows = torch.tensor([[size / 2, size / 2]])
    tape = GradientTape(terms={"w": Dense(rows)}, device=rows.device)
    for _ in range(20):
        added = hush.Importance(norm=norm).clip(tape).total["w"]
        assert float(added.norm()) <= norm * (1 + 1e-6)
