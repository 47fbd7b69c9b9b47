"""Random allocation: charges against Monte Carlo, quadrature and closed forms, and the draws."""

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import hush
from hush.accounting.epsilon import deltas
from hush.accounting.pld import accountant
from hush.accounting.pld.allocation import AllocationLaw
from hush.accounting.pld.privacy_loss import Direction
from hush.accounting.rdp import allocation
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import Bound
from hush.core.parts import Sampling
from hush.core.randomness import Stream
from hush_recipes.audit.draws import draws_independent

Floats = np.ndarray


def plan_of(sampling: Sampling, multiplier: float = 1.0) -> hush.Plan:
    return hush.Plan(sampling=sampling, clipping=hush.L2(1.0), noise=hush.Gaussian(multiplier))


def allocated(steps: int, multiplier: float = 1.0) -> hush.Plan:
    return plan_of(hush.RandomAllocation(steps=steps), multiplier)


def bounds_of(steps: int, multiplier: float, epochs: int, epsilons: Sequence[float]) -> list[Bound]:
    return deltas({allocated(steps, multiplier): epochs * steps}, list(epsilons))


# Monte Carlo


def log_ratios(
    steps: int, multiplier: float, epochs: int, draws: int, *, present: bool, spoiled: float = 1.0
) -> Floats:
    """Composed log-likelihood ratios of outcomes with or without the record.

    `spoiled` scales the noise of the first step of an epoch.
    """
    generator, total = np.random.default_rng(steps + 1000 * present), np.zeros(draws)
    for _ in range(epochs):
        ratio = np.zeros(draws)
        for step in range(steps):
            # the steps are exchangeable: the record is in the first one
            x = multiplier * generator.standard_normal(draws)
            if step == 0:
                x = spoiled * x + present
            ratio += np.exp((2 * x - 1) / (2 * multiplier**2)) / steps
        total += np.log(ratio)
    return total


def estimates(log_ratio: tuple[Floats, Floats], epsilon: float) -> list[tuple[float, float]]:
    """Hockey-stick divergence and its standard error, in the directions remove and add."""
    with_record, without = log_ratio
    found = []
    for losses in (with_record, -without):
        gains = np.maximum(-np.expm1(epsilon - losses), 0.0)
        # the standard error of rare outcomes is not zero
        error = math.sqrt(gains.var() / len(gains)) + 2 / len(gains)
        found.append((float(gains.mean()), error))
    return found


def sampled(
    steps: int, multiplier: float, epochs: int, draws: int, spoiled: float = 1.0
) -> tuple[Floats, Floats]:
    parts = (steps, multiplier, epochs, draws)
    present, absent = (log_ratios(*parts, present=each, spoiled=spoiled) for each in (True, False))
    return present, absent


CASES = [(10, 1.0, 1), (10, 0.5, 2), (30, 0.8, 3), (100, 0.6, 1)]


@pytest.mark.parametrize(("steps", "multiplier", "epochs"), CASES)
def test_monte_carlo_agrees(steps: int, multiplier: float, epochs: int) -> None:
    draws = 300_000
    ratios = sampled(steps, multiplier, epochs, draws)
    epsilons = [0.0, 0.5, 1.0, 2.0, 4.0]
    for epsilon, bound in zip(epsilons, bounds_of(steps, multiplier, epochs, epsilons), strict=True):
        found = estimates(ratios, epsilon)
        (largest, error) = max(found)
        assert bound.lower - 5 * error <= largest <= bound.upper + 5 * error
        assert bound.upper <= bound.lower * 1.01 + 1e-9
        # every direction is charged
        assert all(delta <= bound.upper + 5 * deviation for delta, deviation in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "multiplier", "epochs"), [(10, 1.0, 1), (100, 0.5, 1), (100, 1.0, 2), (200, 0.7, 1)]
)
def test_monte_carlo_with_many_draws_agrees(steps: int, multiplier: float, epochs: int) -> None:
    ratios = sampled(steps, multiplier, epochs, 4_000_000)
    epsilons = [0.25, 1.0, 3.0, 5.0]
    for epsilon, bound in zip(epsilons, bounds_of(steps, multiplier, epochs, epsilons), strict=True):
        largest, error = max(estimates(ratios, epsilon))
        assert bound.lower - 5 * error <= largest <= bound.upper + 5 * error


def test_a_charge_with_the_wrong_noise_in_one_step_is_caught() -> None:
    ratios = sampled(4, 1.0, 1, 300_000, spoiled=1.2)
    epsilons = [0.5, 1.0, 2.0]
    outside = 0
    for epsilon, bound in zip(epsilons, bounds_of(4, 1.0, 1, epsilons), strict=True):
        largest, error = max(estimates(ratios, epsilon))
        outside += not bound.lower - 5 * error <= largest <= bound.upper + 5 * error
    assert outside


# quadrature


def option(strike: Floats, multiplier: float, *, above: bool) -> Floats:
    """E[(W - strike)+] or E[(strike - W)+] of one log-normal ratio W of mean 1."""
    sign, positive = (1 if above else -1), np.maximum(strike, 1e-300)
    first = -np.log(positive) * multiplier + 0.5 / multiplier
    price = norm.cdf(sign * first) - positive * norm.cdf(sign * (first - 1 / multiplier))
    return np.where(strike > 0, sign * price, 1 - strike if above else 0.0)


def exact_deltas(steps: int, multiplier: float, epsilon: float) -> tuple[float, float]:
    """Remove and add, one epoch of 2 or 3 steps: quadrature over all steps but one, then `option`."""
    z = np.linspace(-9, 10 + 1 / multiplier, 601)
    weight = norm.pdf(z) * (z[1] - z[0])
    ratio = np.exp(z / multiplier - 0.5 / multiplier**2)
    weights, sums = weight, ratio
    if steps == 3:
        weights = np.outer(weight, weight).ravel()
        sums = np.add.outer(ratio, ratio).ravel()
    found = []
    for above, strike, factor in (
        (True, math.exp(epsilon), 1.0),
        (False, math.exp(-epsilon), math.exp(epsilon)),
    ):
        values = option(steps * strike - sums, multiplier, above=above)
        found.append(factor * float((weights * values).sum()) / steps)
    return found[0], found[1]


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0])
def test_quadrature_of_two_and_three_steps_agrees(steps: int, multiplier: float) -> None:
    epsilons = [0.05, 0.3, 1.0, 2.0, 4.0]
    found = bounds_of(steps, multiplier, 1, epsilons)
    for epsilon, bound in zip(epsilons, found, strict=True):
        remove, add = exact_deltas(steps, multiplier, epsilon)
        delta = max(remove, add)
        assert bound.lower * (1 - 1e-9) - 1e-13 <= delta <= bound.upper * (1 + 1e-9) + 1e-13
        assert bound.upper <= 1.02 * bound.lower + 1e-12
        for direction, exact in ((Direction.REMOVE, remove), (Direction.ADD, add)):
            for pessimistic in (True, False):
                law = AllocationLaw(steps, multiplier, pessimistic)
                cuts = np.linspace(-3, 8, 40_001)
                cells = law.cell_masses(direction, cuts)
                # the smallest and the largest delta with this mass between the cuts
                low = np.maximum(-np.expm1(epsilon - np.append(-50.0, cuts)), 0.0)
                high = np.append(low[1:], 1.0)
                if pessimistic:
                    assert exact <= float(cells.first @ high) * (1 + 1e-9) + 1e-14
                else:
                    assert exact >= float(cells.first @ low) * (1 - 1e-9) - 1e-14


def test_a_charge_for_the_direction_add_alone_is_caught() -> None:
    remove, add = exact_deltas(3, 0.5, 2.0)
    bound = bounds_of(3, 0.5, 1, [2.0])[0]
    assert add < 0.9 * bound.lower < remove


def test_a_charge_for_poisson_sampling_is_caught() -> None:
    # a record surely takes part, so at a large epsilon an epoch costs more than Poisson steps
    remove, _ = exact_deltas(2, 0.5, 5.0)
    poisson = deltas({plan_of(hush.Poisson(0.5), 0.5): 1}, [5.0])[0]
    two = deltas({plan_of(hush.Poisson(0.5), 0.5): 2}, [5.0])[0]
    assert remove > 1.05 * poisson.upper
    assert bounds_of(2, 0.5, 1, [5.0])[0].upper < two.lower
    # with many epochs of a few steps as well
    many = hush.epsilon(allocated(2, 0.574), 600, 1e-7).epsilon
    assert many.lower > hush.epsilon(plan_of(hush.Poisson(0.5), 0.574), 600, 1e-7).epsilon.upper


# closed forms and other accountants


def test_one_step_is_the_gaussian_mechanism() -> None:
    full = plan_of(hush.FullBatch(), 1.3)
    assert hush.epsilon(allocated(1, 1.3), 4, 1e-5) == hush.epsilon(full, 4, 1e-5)
    # also without this case, the law of one ratio is that of the Gaussian mechanism
    exact = hush.epsilon(full, 1, 1e-5).epsilon
    lower = accountant.epsilon({AllocationLaw(1, 1.3, pessimistic=False): 1}, 1e-5).lower
    upper = accountant.epsilon({AllocationLaw(1, 1.3, pessimistic=True): 1}, 1e-5).upper
    assert lower <= exact.upper
    assert exact.lower <= upper <= lower * 1.001


def test_an_epoch_costs_less_than_its_poisson_steps() -> None:
    for steps, multiplier, least in [(100, 0.5, 0.05), (100, 1.0, 0.05), (1000, 0.7, 0.01)]:
        ours = hush.epsilon(allocated(steps, multiplier), 10 * steps, 1e-5).epsilon
        poisson = plan_of(hush.Poisson(1 / steps), multiplier)
        theirs = hush.epsilon(poisson, 10 * steps, 1e-5).epsilon
        assert ours.upper < (1 - least) * theirs.lower
        assert ours.upper <= 1.002 * ours.lower


@pytest.mark.parametrize("steps", [2, 7, 40])
@pytest.mark.parametrize("multiplier", [0.1, 0.5, 2.0, 20.0])
def test_a_part_of_a_run_costs_its_epochs(steps: int, multiplier: float) -> None:
    plan = allocated(steps, multiplier)
    one = hush.epsilon(plan, steps, 1e-6).epsilon
    # an epoch that has not ended is charged, and has no lower bound
    assert hush.epsilon(plan, 1, 1e-6).epsilon == Bound(lower=0.0, upper=one.upper)
    two = hush.epsilon(plan, steps + 1, 1e-6).epsilon
    assert one.upper < two.upper
    assert hush.epsilon(plan, 2 * steps, 1e-6).epsilon.upper == two.upper
    assert one.lower <= one.upper <= 1.003 * one.lower
    # several parts of an epoch are epochs
    parts = plan_of(hush.RandomAllocation(steps=3 * steps, times=3), multiplier)
    assert hush.epsilon(parts, steps + 1, 1e-6).epsilon == two


@pytest.mark.parametrize("multiplier", [60.0, 1e4, 1e8])
def test_more_noise_than_a_grid_holds_costs_its_renyi_divergences(multiplier: float) -> None:
    found = hush.epsilon(allocated(100, multiplier), 1000, 1e-5).epsilon
    assert found.lower == 0
    assert found.upper <= 1.5 * hush.epsilon(allocated(100, 50.0), 1000, 1e-5).epsilon.upper


def test_less_noise_than_a_grid_holds_costs_what_one_full_step_costs() -> None:
    found = hush.epsilon(allocated(10, 0.01), 10, 1e-5).epsilon
    full = hush.epsilon(plan_of(hush.FullBatch(), 0.01), 1, 1e-5).epsilon
    assert found.lower < found.upper <= full.upper


# Rényi divergence


def moments(steps: int, multiplier: float, order: float) -> tuple[float, float]:
    """log E[R^order] and log E[R^(1 - order)] of two or three steps, by quadrature."""
    z = np.linspace(-10, 10 + order / multiplier, 151 if steps == 3 else 1001)
    log_weight = norm.logpdf(z) + math.log(z[1] - z[0])
    log_ratio = z / multiplier - 0.5 / multiplier**2
    weights, sums = log_weight, log_ratio
    for _ in range(steps - 1):
        weights = np.add.outer(weights, log_weight).ravel()
        sums = np.logaddexp.outer(sums, log_ratio).ravel()
    sums = sums - math.log(steps)
    first, second = (np.logaddexp.reduce(weights + power * sums) for power in (order, 1 - order))
    return float(first), float(second)


@pytest.mark.parametrize(("steps", "multiplier"), [(2, 0.5), (2, 1.0), (2, 4.0), (3, 1.0)])
def test_renyi_divergences_are_those_of_quadrature(steps: int, multiplier: float) -> None:
    orders = [2.0, 3.0, 8.0]
    for order, cost in zip(orders, hush.rdp(allocated(steps, multiplier), orders), strict=True):
        remove, add = moments(steps, multiplier, order)
        assert cost * (order - 1) == pytest.approx(max(remove, add), rel=1e-6)
        negative = allocation._log_negative_moments(steps, multiplier)[int(order) - 1]
        assert add * (1 - 1e-9) - 1e-11 <= negative <= add * 1.01 + 1e-9
    between = hush.rdp(allocated(steps, multiplier), [2.5, 1.3])
    for order, cost in zip((2.5, 1.3), between, strict=True):
        assert cost * (order - 1) >= max(moments(steps, multiplier, order)) * (1 - 1e-9)


def test_renyi_divergences_never_exceed_those_of_a_full_step() -> None:
    orders = np.array([1.1, 2.0, 30.0, 256.0, 257.0, 1e5])
    for multiplier in (0.2, 1.0, 30.0):
        cost = allocation.renyi_divergence(50, multiplier, orders)
        assert np.all(cost <= orders / 2 / multiplier**2 * (1 + 1e-9))
        assert np.all(np.diff(cost) >= -1e-9 * cost[1:])


# draws


def batches(sampling: Sampling, records: int, steps: int, key: int = 0) -> list[list[int]]:
    source = Stream(torch.device("cpu"), bytes([key] * 32))
    return [sampling.draw(records, source, step).tolist() for step in range(steps)]


def test_every_record_takes_part_once_in_each_part_of_an_epoch() -> None:
    sampling = hush.RandomAllocation(steps=6, times=2)
    drawn = batches(sampling, 50, 12)
    parts = [sorted(chain(*drawn[start : start + 3])) for start in range(0, 12, 3)]
    assert all(part == list(range(50)) for part in parts)
    assert all(each == sorted(set(each)) for each in drawn)
    assert drawn[:3] != drawn[3:6], "every part has its own draw"
    assert sampling.expected(50) == pytest.approx(50 / 3)


def test_the_step_of_a_record_is_uniform_and_independent_of_other_records() -> None:
    sampling, records, epochs = hush.RandomAllocation(steps=4), 40, 2000
    drawn = batches(sampling, records, 4 * epochs)
    place = np.empty((epochs, records), int)
    for step, batch in enumerate(drawn):
        place[step // 4, batch] = step % 4
    counts = np.stack([(place == step).sum(0) for step in range(4)])
    deviation = math.sqrt(epochs * 3 / 16)
    assert np.abs(counts - epochs / 4).max() < 5 * deviation
    same = (place[:, :1] == place[:, 1:]).sum(0)
    assert np.abs(same - epochs / 4).max() < 5 * deviation
    again = (place[1:] == place[:-1]).sum(0)
    assert np.abs(again - epochs / 4).max() < 5 * deviation
    # sizes vary as sums of independent coins, not as those of a shuffled partition
    sizes = np.array([len(batch) for batch in drawn])
    assert 0.9 < sizes.var() / (records * 3 / 16) < 1.1


def test_draws_depend_on_key_slot_and_epoch_alone() -> None:
    sampling = hush.RandomAllocation(steps=5)
    assert batches(sampling, 30, 10, key=1) == batches(sampling, 30, 10, key=1)
    assert batches(sampling, 30, 10, key=1) != batches(sampling, 30, 10, key=2)
    # more slots do not move a record, and other draws of the stream do not either
    longer = batches(sampling, 40, 10, key=1)
    assert [[slot for slot in each if slot < 30] for each in longer] == batches(sampling, 30, 10, key=1)
    source = Stream(torch.device("cpu"), bytes([1] * 32))
    source.skip(100)
    assert sampling.draw(30, source, 7).tolist() == batches(sampling, 30, 10, key=1)[7]
    generator = torch.Generator().manual_seed(3)
    first = [sampling.draw(30, generator, step).tolist() for step in range(5)]
    torch.rand(8, generator=generator)
    assert first == [sampling.draw(30, generator, step).tolist() for step in range(5)]
    assert sorted(chain(*first)) == list(range(30))


# training

DATA = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def step_of(plan: hush.Plan, ledger: Path | None = None, **options: object) -> hush.PrivateStep:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        plan,
        records=40,
        ledger=ledger,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(5)),
        **options,  # type: ignore[arg-type]
    )


def weights(step: hush.PrivateStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.model.parameters()])


def test_a_run_uses_each_record_once_per_epoch_and_is_charged_per_epoch() -> None:
    step, used = step_of(allocated(4)), []
    for batch in step.batches(DATA, steps=6):
        used.append(batch.indices.tolist())
        step(batch)
    assert sorted(chain(*used[:4])) == list(range(40))
    # the second epoch has not ended
    whole = hush.epsilon(allocated(4), 8, 1e-3).epsilon
    assert step.spent(1e-3).epsilon == Bound(lower=0.0, upper=whole.upper)


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, stop: int) -> None:
    whole = step_of(allocated(4), tmp_path / "whole.jsonl")
    for batch in whole.batches(DATA, steps=7):
        whole(batch)
    first = step_of(allocated(4), tmp_path / "ledger.jsonl")
    for batch in first.batches(DATA, steps=stop):
        first(batch)
    state = first.state_dict()
    first.ledger.close()
    second = step_of(allocated(4), tmp_path / "ledger.jsonl")
    second.load_state_dict(state)
    for batch in second.batches(DATA, steps=7 - stop):
        second(batch)
    assert torch.equal(weights(second), weights(whole))
    assert second.spent(1e-3) == whole.spent(1e-3)


def test_one_allocation_for_all_epochs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(allocated(4))
    data = next(iter(step.batches(DATA, steps=1))).data
    step.pending_batch = None
    assert draws_independent(step, data, 200).passed
    draw = hush.RandomAllocation.draw

    def repeated(
        self: hush.RandomAllocation, records: int, generator: Stream, step: int = 0
    ) -> torch.Tensor:
        return draw(self, records, generator, step % self.period)

    monkeypatch.setattr(hush.RandomAllocation, "draw", repeated)
    assert not draws_independent(step, data, 200).passed


def test_a_budget_ends_a_run_after_a_whole_epoch() -> None:
    step = step_of(allocated(4))
    most = hush.epsilon(allocated(4), 12, 1e-5).epsilon.upper
    for batch in step.batches(DATA, budget=hush.Budget(epsilon=most * 1.001, delta=1e-5)):
        step(batch)
    assert step.steps == 12


def test_adjacency_relations() -> None:
    plan = allocated(20)
    one = hush.epsilon(plan, 40, 1e-5).epsilon
    added = hush.epsilon(plan, 40, 1e-5, neighbours=hush.Neighbours.ADD_REMOVE).epsilon
    assert added == one
    for options in ({"group": 2}, {"neighbours": hush.Neighbours.REPLACE}):
        assert hush.epsilon(plan, 40, 1e-5, **options).epsilon.upper > one.upper
    step_of(plan, neighbours=hush.Neighbours.ADD_REMOVE)


def test_parts_without_a_proof_are_refused() -> None:
    with pytest.raises(Unproved):
        hush.epsilon(
            hush.Plan(
                sampling=hush.RandomAllocation(steps=4),
                clipping=hush.Lp(p=1.0, norm=1.0),
                noise=hush.Laplace(1.0),
            ),
            4,
            1e-5,
        )
    with pytest.raises(InvalidValue, match="steps=10, times=3"):
        hush.RandomAllocation(steps=10, times=3)


def test_calibrated_noise_meets_the_budget() -> None:
    budget = hush.Budget(epsilon=2.0, delta=1e-5)
    plan = hush.calibrate(allocated(100), budget, steps=1000)
    assert 1.99 < hush.epsilon(plan, 1000, 1e-5).epsilon.upper <= 2.0
    poisson = hush.calibrate(plan_of(hush.Poisson(0.01)), budget, steps=1000)
    assert plan.noise.multiplier < 0.97 * poisson.noise.multiplier  # type: ignore[attr-defined]
