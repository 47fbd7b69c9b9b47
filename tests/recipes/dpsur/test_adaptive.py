"""DPAGD: what one record can change, what is charged, and when it ends."""

import math
import os

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import LedgerError
from hush.core.guarantee import Adjacency
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent, clip_loss_changes
from tests.gradients.oracle import one_at_a_time
from tests.training.helpers import plan_of

BUDGET = hush.Budget(epsilon=2.0, delta=1e-5)
SETTINGS = Adaptive(clip=0.5, loss_clip=1.0, sizes=4, splits=6)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(records: int = 60) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(records, 4, generator=seeded(1))
    return inputs, (inputs[:, 0] > 0).long()


def descent(
    inputs: Tensor, targets: Tensor, settings: Adaptive = SETTINGS, ledger: hush.Ledger | None = None
) -> AdaptiveDescent:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    return AdaptiveDescent(
        nn.Linear(4, 2), loss, (inputs, targets), BUDGET, settings, ledger=ledger, generator=seeded()
    )


class Watched(AdaptiveDescent):
    """Keeps what was summed, the noise it was given, and the precision that was asked for."""

    def _privatize(self, total: Tensor, norm: float, precision: float) -> Tensor:
        noisy = super()._privatize(total, norm, precision)
        self.seen = [*getattr(self, "seen", []), (total.clone(), norm, precision, noisy.clone())]
        return noisy

    def _choose_length(self, noisy: Tensor, longest: float) -> float | None:
        self.directions = [*getattr(self, "directions", []), noisy.clone()]
        return super()._choose_length(noisy, longest)


def watched(inputs: Tensor, targets: Tensor, settings: Adaptive = SETTINGS, seed: int = 0) -> Watched:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    model = nn.Linear(4, 2)
    return Watched(model, loss, (inputs, targets), BUDGET, settings, generator=seeded(seed))


def test_it_learns_and_ends_within_the_budget() -> None:
    inputs, targets = data(600)
    run = descent(inputs, targets)
    lengths = list(run.run())
    assert 2 <= len(lengths) <= 6
    right = (run.step.model(inputs).argmax(1) == targets).float().mean()
    assert float(right) > 0.85
    assert run.spent(1e-5).epsilon.upper <= BUDGET.epsilon
    assert run.spent() == run.spent(BUDGET.delta), "the ledger keeps the budget's"


def test_every_noisy_quantity_was_admitted_and_together_they_stay_within_the_budget() -> None:
    for seed in range(5):
        run = watched(*data(), seed=seed)
        list(run.run())
        total = sum(precision for _, _, precision, _ in run.seen)
        assert total <= run.filter.precision
        assert total == pytest.approx(run.filter.precision - run.filter.remaining)


def test_the_noise_is_that_of_the_precision_asked_for() -> None:
    """Pooled over runs: the noise of each release, in units of what was charged, is standard normal."""
    noises = []
    for seed in range(40):
        run = watched(*data(), seed=seed)
        list(run.run())
        noises += [
            ((noisy - total) * math.sqrt(precision) / norm).double().flatten()
            for total, norm, precision, noisy in run.seen
        ]
    pooled = torch.cat(noises)
    assert len(pooled) > 2000
    # five deviations of the mean square of so many standard normal numbers
    assert float(pooled.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(pooled)))


def test_a_fork_draws_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole budget is charged before the first draw: no charge would stop a fork later."""
    run = watched(*data())
    moves = run.run()
    next(moves)
    drawn = len(run.seen)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(LedgerError, match="is a fork of it"):
        next(moves)
    assert len(run.seen) == drawn


def test_the_first_sum_against_one_record_at_a_time() -> None:
    inputs, targets = data()
    run = watched(inputs, targets)
    next(run.run())
    torch.manual_seed(0)
    rows = one_at_a_time(nn.Linear(4, 2), nn.CrossEntropyLoss(), inputs, targets, len(targets)).double()
    expected = (SETTINGS.clip / rows.norm(dim=1)).clamp(max=1) @ rows
    assert torch.allclose(run.seen[0][0], expected, atol=1e-4)


@pytest.mark.parametrize("strange", [0.0, 1e4, math.nan])
def test_one_record_moves_each_first_sum_by_its_norm_at_most(strange: float) -> None:
    inputs, targets = data()
    more = torch.cat([inputs, torch.full((1, 4), strange)]), torch.cat([targets, targets[:1]])
    without, present = watched(inputs, targets), watched(*more)
    # given what was released before, the sums are what differs: the same direction for both
    direction = torch.randn(10, generator=seeded(2))
    gradients = [run.gradient_sum() for run in (without, present)]
    assert (gradients[1] - gradients[0]).norm() <= SETTINGS.clip + 1e-4
    lengths = [0.0, 0.5, 1.0, 5.0]
    changes = [run.loss_changes(direction, lengths) for run in (without, present)]
    assert (changes[1] - changes[0]).norm() <= SETTINGS.loss_clip + 1e-6


def test_entry_by_entry_bounds_alone_would_be_caught() -> None:
    losses = torch.tensor([[0.0, 9.0, -9.0, 9.0]], dtype=torch.float64)
    assert float(clip_loss_changes(losses, 1.0).norm()) == pytest.approx(1.0)
    broken = (losses - losses[:, :1]).clamp(-1, 1)  # what is charged for is the norm of the row
    assert float(broken.norm()) > 1.7
    assert clip_loss_changes(torch.tensor([[0.0, 0.1]]), 1.0).tolist() == [[0.0, pytest.approx(0.1)]]
    worst = clip_loss_changes(torch.tensor([[0.0, math.inf, math.nan]]), 1.0)
    assert worst[0, 1] == worst[0, 2] > 0.5


def test_the_whole_budget_is_on_the_ledger_before_anything_is_drawn() -> None:
    ledger = hush.Ledger()
    run = descent(*data(), ledger=ledger)
    next(run.run())
    assert ledger.epsilon(1e-5).epsilon.upper == pytest.approx(2.0, rel=2e-3)
    closed = hush.Ledger()
    refused = descent(*data(), ledger=closed)
    closed.close()
    before = [value.clone() for value in refused.step.model.parameters()]
    with pytest.raises(LedgerError):
        next(refused.run())
    assert all(map(torch.equal, before, refused.step.model.parameters()))


def test_a_ledger_of_users_is_refused() -> None:
    ledger = hush.Ledger()
    adjacency = Adjacency(per_unit=2)
    ledger.charge(plan_of(), run="a", step=1, release="x", adjacency=adjacency)
    with pytest.raises(LedgerError, match="do not add up"):
        next(descent(*data(), ledger=ledger).run())
    assert sum(ledger.counts.values()) == 1
