"""Every sabotage is found out by a check that passes on the step as it is.

A check fails at p < 1e-6, so that one in 40,000 suites would fail by chance if seeds were not fixed.
The power of each is worked out below, or is 1; `..on_every_seed` (slow) repeats all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.audit.checks.draws import draws_independent, masks_independent
from hush.audit.checks.noise import (
    LEVEL,
    Check,
    ObservedNoise,
    noise_at_any_size,
    noise_fresh,
    noise_law,
    noise_scale,
    observe,
)
from hush.audit.checks.selective import (
    fresh_test_batches,
    no_change_measured,
    noisy_verdicts,
    rollback_complete,
)
from hush.audit.checks.step import charged, influence, nothing_kept
from hush.core.errors import InvalidValue, Unsupported
from hush.core.parts import Always, Clipping, Noise, Release, Sampling
from hush.core.randomness import Stream
from hush.training.step import PrivateStep
from tests.audit import sabotage

RECORDS, RATE, STEPS, NUMBERS = 40, 0.25, 16, 45
SEEDS = 300
"""All caught on so many seeds: the power is above .99, or it was a chance of .05."""


def problem(
    release: Release | None = None,
    noise: Noise | None = None,
    clipping: Clipping | None = None,
    seed: int = 0,
    numbers: tuple[int, int] = (8, 5),
    sampling: Sampling | None = None,
    model: nn.Module | None = None,
) -> tuple[PrivateStep, tuple[Tensor, Tensor]]:
    """A step on gradients that are mostly longer than the norm, in physical batches of five."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model or nn.Linear(*numbers)
        dtype = next(model.parameters()).dtype
        data = (
            3 * torch.randn(RECORDS, numbers[0], dtype=dtype),
            torch.randint(0, numbers[1], (RECORDS,)),
        )
    plan = hush.Plan(
        sampling=sampling or hush.Poisson(rate=RATE),
        clipping=clipping or hush.L2(norm=1.0),
        noise=noise or hush.Gaussian(multiplier=1.0),
        release=release or Always(),
    )
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plan,
        records=RECORDS,
        generator=torch.Generator().manual_seed(seed),
        physical_batch=5,
    )
    return step, data


def scale(seed: int) -> Check:
    step, data = problem(seed=seed)
    return noise_scale(observe(step, data, STEPS))


def fresh(seed: int) -> Check:
    step, data = problem(seed=seed)
    return noise_fresh(observe(step, data, STEPS))


def fresh_for_long(seed: int) -> Check:
    step, data = problem(seed=seed)
    return noise_fresh(observe(step, data, 33))


def fresh_of_many(seed: int) -> Check:
    step, data = problem(seed=seed, numbers=(1599, 100))
    return noise_fresh(observe(step, data, 2))


def sizes(seed: int) -> Check:
    step, data = problem(seed=seed)
    return noise_at_any_size(step, data, repeats=2)


def law(seed: int) -> Check:
    step, data = problem(seed=seed)
    return noise_law(observe(step, data, STEPS))


def draws(seed: int) -> Check:
    return draws_independent(*problem(seed=seed))


def one_record(seed: int) -> Check:
    step, data = problem(seed=seed)
    return influence(step, next(step.batches(data)), places=(0, 3))


def charges(seed: int) -> Check:
    step, data = problem(seed=seed)
    return charged(step, data, 3)


def leftovers(seed: int) -> Check:
    step, data = problem(seed=seed)
    return nothing_kept(step, data, 2)


def masks(seed: int) -> Check:
    return masks_independent(hush.Coordinate(rate=0.25), seed=seed)


def masks_of_some(seed: int) -> Check:
    return masks_independent(hush.Twice(rate=0.5, coordinate_rate=0.5), seed=seed)


def rejection(seed: int) -> Check:
    strict = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=-1.0, test="mean")
    step, data = problem(strict, seed=seed)
    # a proposal is accepted with a chance of .5 at most: all of 16 with less than 2e-5
    return rollback_complete(step, data, STEPS)


def no_change(seed: int) -> Check:
    step, data = problem(hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, test="mean"), seed=seed)
    return no_change_measured(step, data, 5)


def batches_of_tests(seed: int) -> Check:
    step, data = problem(hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, test="mean"), seed=seed)
    return fresh_test_batches(step, data)


def verdicts(seed: int) -> Check:
    step, _ = problem(hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, test="mean"), seed=seed)
    return noisy_verdicts(step)


CAUGHT: list[tuple[sabotage.Sabotage, Callable[[int], Check]]] = [
    (sabotage.a_quarter_of_the_noise, scale),
    (sabotage.noise_per_physical_batch, scale),
    (sabotage.noise_per_rank, scale),
    (sabotage.divided_by_who_came, sizes),
    (sabotage.noise_in_proportion_to_the_batch, sizes),
    (sabotage.no_noise_for_an_empty_draw, sizes),
    (sabotage.no_clipping_far_out, one_record),
    (sabotage.an_empty_slot_that_counts, one_record),
    (sabotage.clipping_after_averaging, one_record),
    (sabotage.reseeded_every_step, fresh),
    (sabotage.two_seeds_in_turn, fresh),
    (sabotage.a_cycle_of_thirty_seeds, fresh_for_long),
    (sabotage.the_same_noise_for_both_halves, fresh),
    (sabotage.noise_that_repeats_along_the_numbers, fresh_of_many),
    (sabotage.one_number_without_noise, law),
    (sabotage.coins_for_noise, law),
    (sabotage.drawn_twice, draws),
    (sabotage.records_drawn_in_pairs, draws),
    (sabotage.records_drawn_in_hidden_pairs, draws),
    (sabotage.batches_of_one_size, draws),
    (sabotage.shuffled_epochs, draws),
    (sabotage.one_mask_for_all_numbers, masks),
    (sabotage.one_mask_for_all_numbers, masks_of_some),
    (sabotage.one_mask_for_all_records, masks),
    (sabotage.a_rate_a_fifth_too_high, masks),
    (sabotage.momentum_kept, rejection),
    (sabotage.stale_loss, no_change),
    (sabotage.tested_on_the_training_batch, batches_of_tests),
    (sabotage.a_quarter_of_the_noise_in_the_test, verdicts),
    (sabotage.every_second_step_uncharged, charges),
    (sabotage.a_bare_number_in_a_buffer, leftovers),
    (sabotage.a_bare_number_in_an_attribute, leftovers),
]


def name(value: Any) -> str:
    return str(value.__name__)


@functools.cache
def unbroken(check: Callable[[int], Check]) -> Check:
    return check(0)


@pytest.mark.parametrize(("broken", "check"), CAUGHT, ids=name)
def test_it_is_caught(
    broken: sabotage.Sabotage, check: Callable[[int], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unbroken(check).passed
    broken(monkeypatch)
    assert not check(1).passed


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "check"), CAUGHT, ids=name)
def test_it_is_caught_on_every_seed(
    broken: sabotage.Sabotage, check: Callable[[int], Check], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(check(seed).passed for seed in range(20))
    broken(monkeypatch)
    assert not any(check(seed).passed for seed in range(SEEDS))


def power(factor: float, draws: int, exponent: float) -> float:
    """The chance that `noise_scale` fails where there is `factor` times the noise: exact."""
    law = stats.gamma(draws / exponent)
    low, high = law.ppf(LEVEL / 2), law.isf(LEVEL / 2)
    by = factor**exponent
    return float(law.cdf(low / by) + law.sf(high / by))


def test_the_power_of_the_checks_with_a_law() -> None:
    many = STEPS * NUMBERS
    assert power(0.25, many, 2.0) > 0.999999
    assert power(2**0.5, many, 2.0) > 0.999999, "two ranks; more physical batches have more"
    assert power(0.8, many, 2.0) > 0.99, "a fifth less noise"
    assert power(0.9, many, 2.0) < 0.9, "a tenth less noise needs more draws than these"
    assert power(1.0, many, 2.0) == pytest.approx(LEVEL)
    # a rate of .3 for .25 over 250 x 40 coins, a sixth of the level for each of its tests
    coins, wrong = 250 * 40, stats.norm(0.3, (0.3 * 0.7 / (250 * 40)) ** 0.5)
    assert wrong.sf(stats.binom(coins, 0.25).isf(LEVEL / 12) / coins) > 0.999
    # half of the numbers of successive draws agree in sign by chance, and all of them if reseeded
    assert stats.binomtest(15 * NUMBERS, 15 * NUMBERS).pvalue < 1e-100


@pytest.mark.parametrize(
    ("noise", "clipping"),
    [
        (hush.Laplace(multiplier=1.0), hush.Lp(p=1.0, norm=1.0)),
        (hush.GeneralizedGaussian(beta=3.0, multiplier=2.0), hush.L2(norm=1.0)),
        (hush.BlockGaussian(multipliers=(1.0, 2.0)), hush.Subspaces(ranks=(40, 5), l2=(0.5, 1.5))),
        (hush.Gaussian(multiplier=1.0), hush.Box(bounds=((40, 0.1), (5, 0.3)))),
    ],
    ids=lambda part: type(part).__name__,
)
def test_other_noise_and_clipping_pass_and_fail_alike(
    noise: Noise, clipping: Clipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, data = problem(noise=noise, clipping=clipping)
    observed = observe(step, data, STEPS // 2)
    for check in (check(observed) for check in (noise_scale, noise_law, noise_fresh)):
        assert check.passed, check
    assert influence(step, next(step.batches(data)), places=(1,)).passed
    sabotage.noise_per_rank(monkeypatch)
    step, data = problem(noise=noise, clipping=clipping)
    assert not noise_scale(observe(step, data, STEPS // 2)).passed


class Dropping(nn.Module):
    """A model that draws at random for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 5))

    def forward(self, inputs: Tensor) -> Any:
        return self.layers(inputs)


@pytest.mark.parametrize(
    ("sampling", "clipping", "model"),
    [
        (hush.Poisson(rate=0.5), hush.L2(norm=1.0), Dropping()),
        (hush.Poisson(rate=0.5), hush.Importance(norm=1.0), None),
        (hush.Twice(rate=0.5, coordinate_rate=0.5), hush.L2(norm=1.0), None),
        (hush.Poisson(rate=0.5), hush.L2(norm=1.0), nn.Linear(8, 5).double()),
    ],
    ids=["dropout", "coins", "masks", "double precision"],
)
def test_dropout_coins_and_masks_are_those_of_the_step(
    sampling: Sampling, clipping: Clipping, model: nn.Module | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step draws at random beside its noise is drawn again, not taken for noise or influence."""
    step, data = problem(clipping=clipping, sampling=sampling, model=model)
    assert noise_scale(observe(step, data, 4)).passed
    batch = next(step.batches(data))
    assert isinstance(step.generator, Stream)
    state = step.generator.get_state()
    assert influence(step, batch, places=(0,)).passed
    assert torch.equal(step.generator.get_state(), state)
    step(batch)
    sabotage.a_quarter_of_the_noise(monkeypatch)
    assert not noise_scale(observe(step, data, 4)).passed


def test_p_values_are_even_where_nothing_is_wrong() -> None:
    """The alarm rate is what is said: 200 p-values of exact laws are evenly spread."""
    rng, values = np.random.default_rng(0), []
    for _ in range(200):
        noise = rng.normal(0, 0.5**0.5, size=(5, 40))
        values.append(noise_scale(ObservedNoise(noise=noise, exponent=2.0)).p_value)
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_what_cannot_be_looked_at_is_said() -> None:
    step, data = problem(noise=hush.Rectified(scale=1.0, bound=3.0))
    with pytest.raises(Unsupported, match="not added"):
        observe(step, data, 2)
    step, data = problem()
    with pytest.raises(InvalidValue, match="steps=1"):
        observe(step, data, 1)
    with pytest.raises(Unsupported, match="no masks"):
        masks_independent(hush.Poisson(rate=0.5))
    with pytest.raises(Unsupported, match="selective"):
        rollback_complete(step, data, 1)
    eager = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=1e9, test="mean")
    step, data = problem(eager)
    with pytest.raises(Unsupported, match="accepted"):
        rollback_complete(step, data, 2)


def test_weights_that_a_recurrent_layer_lists_twice_are_not_kept_state() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.linear(self.lstm(x)[0][:, -1])
            return scores

    torch.manual_seed(0)
    model = Last()
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=8)
    data = torch.randn(8, 5, 4), torch.randint(0, 2, (8,))
    assert nothing_kept(step, data, 2).passed
