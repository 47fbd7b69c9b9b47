"""Neighbours that differ by one slot's record, run through the step itself: what one record can move."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import LedgerError
from hush.core.plan import Plan
from hush.core.randomness import Stream
from hush.data import flips_and_shifts
from hush.gradients.probe import Probed
from hush.gradients.recording import record
from hush.training.step import PrivateStep
from hush_recipes.audit.draws import trials_of
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent
from tests.training import helpers
from tests.training.helpers import all_but, randomness, run

LOSS = nn.CrossEntropyLoss()


def plan_of(clipping: Any = None, sampling: Any = None) -> Plan:
    noise: Any = 1.0
    if isinstance(clipping, hush.Lp):
        noise = hush.GeneralizedGaussian(beta=clipping.p, multiplier=1.0)
    return helpers.plan_of(sampling, clipping, noise)


def step_of(model: nn.Module, plan: Plan, records: int, physical: int = 16, **options: Any) -> Any:
    settings = {"randomness": randomness(1), "execution": hush.Execution(physical_batch=physical)}
    return helpers.step_of(model, plan, records=records, **{**settings, **options})


def vectors(records: int = 20) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(records, 6), torch.randint(0, 3, (records,))


def sum_of(step: PrivateStep, data: Any, present: Tensor | None = None) -> Tensor:
    return step.clipped_sum(next(step.batches(data, present=present))).clone()


class Dropping(nn.Module):
    """Dropout, a decision that each record takes for itself, and one that chance takes for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(x).relu(), 0.5, self.training)
        if (x[:, 0] > 0).all():
            hidden = hidden * 2
        if not self.training or torch.rand(()) < 0.7:
            hidden = nn.functional.dropout(hidden, 0.1, self.training)
        scores: Tensor = self.second(hidden)
        return scores


CLIPPINGS = [
    hush.L2(0.5),
    hush.Lp(p=1.5, norm=0.5),
    hush.Linf(0.05),
    hush.L2Linf(l2=0.5, linf=0.1),
    hush.Box(bounds=((40, 0.1), (43, 0.2))),
    hush.Subspaces(ranks=(40, 43), l2=(0.3, 0.4), linf=(0.1, 0.2)),
    hush.Importance(0.5),
    hush.Normalized(0.5),
    hush.Quantile(0.5, share=0.25),
]


@pytest.mark.parametrize("sampling", [hush.FullBatch(), hush.Poisson(0.6)], ids=str)
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=str)
def test_an_empty_slot_takes_away_its_own_share_alone(clipping: Any, sampling: Any) -> None:
    """The same coins, masks and noise for neighbours: releases differ by what one record may add."""
    inputs, targets = vectors(40)
    sums = []
    state = None
    for present in (None, all_but(40, 7)):
        torch.manual_seed(0)
        step = step_of(Dropping(), plan_of(clipping, sampling), 40)
        batch = next(step.batches((3 * inputs, targets), present=present))
        assert isinstance(step.generator, Stream)
        state = step.generator.get_state() if state is None else state
        step.generator.set_state(state)
        sums.append(step.clipped_sum(batch).clone())
        if 7 not in batch.indices:
            pytest.skip("the slot was not drawn")
    moved = sums[0] - sums[1]
    sets = clipping.sensitivity(83)
    for ball, part in zip(sets, moved.split([each.dimension or 83 for each in sets]), strict=True):
        assert float(torch.linalg.vector_norm(part, ball.p)) <= ball.norm * (1 + step.rounding)
        assert float(part.abs().max()) <= ball.max_entry * (1 + step.rounding)
    assert float(moved.norm()) > 1e-3, "the record adds something"


def test_what_an_empty_slot_holds_does_not_matter() -> None:
    inputs, targets = vectors()
    sums = []
    for content in (1.0, 1e30, torch.nan):
        inputs[3] = content
        torch.manual_seed(0)
        step = step_of(nn.Linear(6, 3), plan_of(), 20, 8)
        sums.append(sum_of(step, (inputs, targets), all_but(20, 3)))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def kinked(records: int) -> tuple[nn.Module, Tensor]:
    """A model and records at a kink of it, active or not by how a product of their place rounds."""
    torch.manual_seed(0)
    first, second = nn.Linear(10, 4), nn.Linear(4, 2)
    model = nn.Sequential(first, nn.ReLU(), second)
    with torch.no_grad():
        first.bias.zero_()
        second.bias.zero_()
        first.weight[1:].zero_()
        first.weight[1:, 0] = -1.0
    weight, seed = first.weight[0].double().detach(), torch.Generator().manual_seed(1)
    largest = int(weight.abs().argmax())
    for _ in range(3000):
        x = torch.randn(10, generator=seed)
        x[0] = x[0].abs() + 0.5
        x[largest] = 0.0
        x[largest] = float(-(x.double() @ weight) / weight[largest])
        active = first(x.repeat(8, 1)).detach()[:, 0] > 0
        if bool(active[0::2].all()) and not bool(active[1::2].any()):
            blank = torch.zeros(10)
            blank[0] = 1e-30
            rows = torch.stack([16 * x if i % 2 == 0 else blank for i in range(records)])
            return model, torch.cat([blank[None], rows])
    pytest.skip("products on this machine do not round by place")


def test_rounding_by_place_tells_nothing_of_who_is_there() -> None:
    """Records are at a kink that rounding decides: moved by one place, all change at once."""
    records = 100
    model, inputs = kinked(records)
    targets = torch.zeros(records + 1, dtype=torch.long)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "0.weight")

    def total(rows: Tensor, present: Tensor | None) -> Tensor:
        step = step_of(model, plan_of(), len(rows), 1000)
        return sum_of(step, (rows, targets[: len(rows)]), present)

    whole = total(inputs, None)
    assert float((whole - total(inputs, all_but(records + 1, 0))).norm()) <= 1e-6
    # with its row taken out, everybody moves by a place
    assert float((whole - total(inputs[1:], None)).norm()) > 10


def test_sums_of_many_physical_batches_do_not_lose_a_record() -> None:
    records, width = 20_000, 4
    seed = torch.Generator().manual_seed(0)
    inputs = (torch.rand(records, width, generator=seed) * 0.2 + 0.9) * 0.45
    model = nn.Linear(width, 1, bias=False)
    step = step_of(model, plan_of(), records, 20, loss=lambda out, _: out[:, 0])
    actual = sum_of(step, (inputs, torch.zeros(records)))
    exact = inputs.double().sum(0)
    assert float((actual - exact).norm()) < 1e-3
    single = torch.zeros(width)
    for part in inputs.split(20):
        single += part.sum(0)
    assert float((single.double() - exact).norm()) > 3e-3, "added up in single precision"


def test_views_follow_the_slot() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 1, 6, 6), torch.randint(0, 3, (12,))
    sums = []
    for present in (None, all_but(12, 5)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        step = step_of(model, plan_of(), 12, 4, views=flips_and_shifts(3))
        sums.append(sum_of(step, (inputs, targets), present))
    assert 1e-3 < float((sums[0] - sums[1]).norm()) <= 1 + step.rounding


class Range(nn.Module):
    """Divided by the largest number of the whole batch, as dynamic quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x / x.abs().amax().clamp(min=3.0))
        return scores


class Guarded(nn.Module):
    """Inputs out of range take another path."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x * 0 + 1 if x.abs().max() > 10 else x)
        return scores


def outlier(records: int) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(0)
    inputs = torch.randn(records, 3, generator=seed).clamp(-3, 3)
    targets = (inputs[:, 0] > -1).long()
    inputs[-1] = torch.tensor([1000.0, 0.0, 0.0])
    return inputs, targets


@pytest.mark.parametrize("kind", [Range, Guarded])
def test_one_record_moves_the_choice_of_a_step_by_its_clip(kind: type[nn.Module]) -> None:
    data = outlier(300)
    changes = []
    for present in (None, all_but(300, 299)):
        torch.manual_seed(1)
        descent = AdaptiveDescent(
            kind(),
            LOSS,
            data,
            hush.Budget(epsilon=1.0, delta=1e-5),
            Adaptive(clip=1.0, loss_clip=0.5, sizes=5),
            physical_batch=100,
            present=present,
        )
        direction = torch.randn(8, generator=torch.Generator().manual_seed(5)).double()
        changes.append(descent.loss_changes(direction, torch.linspace(0, 5, 6).tolist()))
    assert float((changes[0] - changes[1]).norm()) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("kind", [Range, Guarded])
def test_one_record_moves_a_selective_test_by_its_clip(kind: type[nn.Module]) -> None:
    inputs, targets = outlier(300)
    release = hush.Selective(rate=0.25, clip=0.05, multiplier=8.0, threshold=0.0, test="summed")
    plan = helpers.plan_of(hush.Poisson(0.25), noise=4.0, release=release)
    numbers = []
    for present in (None, all_but(300, 299)):
        torch.manual_seed(3)
        step = step_of(kind(), plan, 300)
        step.gradients.probed = Probed(one_by_one=kind is Guarded)
        trials = trials_of(step)
        assert trials is not None
        parts = [(inputs, targets, present, None)]
        old = trials.losses(parts)
        with torch.no_grad():
            step.model.linear.weight.add_(torch.tensor([[-5.0, 0, 0], [5.0, 0, 0]]))
        numbers.append(float(trials.bounded_rise(trials.losses(parts), old)))
    assert abs(numbers[0] - numbers[1]) <= 0.05 * (1 + 1e-6)


def test_weights_moved_outside_of_the_step_void_the_guarantee() -> None:
    inputs, targets = vectors()
    model = nn.Linear(6, 3)
    step = run(step_of(model, plan_of(), 20), (inputs, targets))
    assert step.spent(1e-5).epsilon.upper > 0
    assert all(value.grad is None for value in model.parameters()), "nothing is left to be applied"
    step.optimizer.step()
    assert step.spent(1e-5).epsilon.upper > 0, "without a gradient nothing moved"
    nn.functional.cross_entropy(model(inputs), targets).backward()
    step.optimizer.step()
    for spent in (step.spent, step.ledger.epsilon):
        with pytest.raises(LedgerError, match="outside of the private step"):
            spent(1e-5)


def test_weights_that_are_loaded_may_be_adopted() -> None:
    inputs, targets = vectors()
    model = nn.Linear(6, 3)
    step = run(step_of(model, plan_of(), 20), (inputs, targets))
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)
    step.adopt_weights()
    run(step, (inputs, targets))
    assert step.spent(1e-5).epsilon.upper > 0


def test_steps_on_one_ledger_train_a_model_in_turns() -> None:
    """Each move is charged on the ledger that both share; one that is not still voids it."""
    inputs, targets = vectors()
    model = nn.Linear(6, 3)
    first = step_of(model, plan_of(), 20)
    second = step_of(model, plan_of(), 20, ledger=first.ledger)
    elsewhere = step_of(model, plan_of(), 20)
    for _ in range(2):
        for step in (first, second):
            run(step, (inputs, targets))
    assert first.spent(1e-5) == second.spent(1e-5)
    assert first.spent(1e-5).epsilon == hush.epsilon(plan_of(), steps=4, delta=1e-5).epsilon
    with pytest.raises(LedgerError, match="outside of the private step"):
        elsewhere.spent(1e-5)
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0))  # of the same norm
    second.adopt_weights()
    assert first.spent(1e-5).epsilon.upper > 0, "declared for the ledger"
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0))
    with pytest.raises(LedgerError, match="outside of the private step"):
        first(next(first.batches((inputs, targets))))
    with pytest.raises(LedgerError, match=r"the ledger in memory is void"):
        second.ledger.epsilon(1e-5)


def test_the_guarantee_says_what_is_assumed() -> None:
    inputs, targets = vectors()
    guarantee = str(run(step_of(nn.Linear(6, 3), plan_of(), 20), (inputs, targets)).spent(1e-5))
    assert "zero-out one record" in guarantee
    assert "assumed" not in guarantee
    # many positions, of which a sum in single precision may cancel: norms count that
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Flatten(), nn.Linear(64 * 4, 3))
    step = run(step_of(model, plan_of(), 20), (torch.randn(20, 4, 64), targets))
    assert step.spent(1e-5).arithmetic == "proved"
    # lookups are added up one by one
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(8 * 4, 3))
    tape = record(model, LOSS_EACH, torch.randint(0, 9, (2, 4)), targets[:2])
    assert tape.rounding_bounded(2**13)
    assert not tape.rounding_bounded(2**13 + 1)


LOSS_EACH = nn.CrossEntropyLoss(reduction="none")


def test_a_batch_is_drawn_by_slot() -> None:
    """Coin i is of slot i: whether a slot is empty changes nobody's draw."""
    drawn = []
    for present in (None, all_but(50, 0, 20)):
        step = step_of(nn.Linear(6, 3), plan_of(sampling=hush.Poisson(0.4)), 50)
        drawn.append(next(step.batches(vectors(50), present=present)).indices.tolist())
    assert drawn[0] == drawn[1]


class OddDraws(nn.Module):
    """Dropout in one way of two, so that how much is drawn depends on a record."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] > 50).all():
            return cast(Tensor, self.linear(x))
        return cast(Tensor, self.linear(nn.functional.dropout(x, 0.5, self.training)))


def test_what_one_record_draws_moves_nobody_else_s_draws() -> None:
    """A record that goes its own way leaves the masks of later batches and all coins as they were."""
    inputs, targets = vectors(48)
    for clipping in (hush.L2(1.0), hush.Importance(1.0)):
        sums = []
        for first in (0.0, 100.0):
            inputs[5, 0] = first
            torch.manual_seed(0)
            step = step_of(OddDraws(), plan_of(clipping), 48)
            sums.append(sum_of(step, (inputs, targets), all_but(48, 5)))
        # the slot is empty: whichever way what lies in it goes, the sum is of the others
        assert float((sums[0] - sums[1]).norm()) < 1e-5


def test_what_is_said_of_rounding_does_not_depend_on_the_records() -> None:
    """A record that goes a way of several positions must not show in what the ledger says."""

    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.last = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            if (x[:, 0, 0] > 50).all():
                return cast(Tensor, self.last(self.linear(x).mean(1)))
            return cast(Tensor, self.last(self.linear(x.mean(1))))

    statements = []
    for first in (0.0, 100.0):
        torch.manual_seed(0)
        inputs, targets = torch.randn(20, 4, 64), torch.randint(0, 3, (20,))
        inputs[5, 0, 0] = first
        step = run(step_of(Ways(), plan_of(), 20), (inputs, targets))
        statements.append(step.spent(1e-5).arithmetic)
    assert statements == ["assumed", "assumed"]
