"""Every sabotage is found out by a check that passes on the step as it is.

A check fails at p < 1e-6, so that one in 40,000 suites would fail by chance if seeds were not fixed.
The power of each is worked out below, or is 1; `..on_every_seed` (slow) repeats all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import hush
from hush.core.parts import Clipping, Noise, Release, Sampling
from hush.training.step import PrivateStep
from hush_recipes.audit.checks import masks_independent, no_change_measured, rollback_complete
from hush_recipes.audit.draws import LEVEL, Check, draws_independent, fresh_test_batches, noisy_verdicts
from hush_recipes.audit.noise import noise_at_any_size, noise_fresh, noise_law, noise_scale, observe
from hush_recipes.audit.self_test import charged, influence, nothing_kept
from tests.recipes.audit import sabotage
from tests.recipes.audit.sabotage import plan_of
from tests.training.helpers import step_of

RECORDS, RATE, STEPS, NUMBERS = 40, 0.25, 16, 45
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
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
        inputs = 3 * torch.randn(RECORDS, numbers[0], dtype=next(model.parameters()).dtype)
        data = inputs, torch.randint(0, numbers[1], (RECORDS,))
    plan = plan_of(sampling or hush.Poisson(RATE), clipping, noise, release)
    options: Any = {"records": RECORDS, "execution": hush.Execution(physical_batch=5)}
    return step_of(model, plan, make=MOMENTUM, seed=seed, **options), data


MEAN_TEST = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, test="mean")
# a proposal is accepted with a chance of .5 at most: all of 16 with less than 2e-5
STRICT = hush.Selective(rate=0.5, clip=1e-3, multiplier=1.0, threshold=-1.0, test="mean")


def one_record(step: PrivateStep, data: tuple[Tensor, Tensor]) -> Check:
    return influence(step, next(step.batches(data)), places=(0, 3))


CHECKS: dict[str, Callable[[int], Check]] = {
    "scale": lambda seed: noise_scale(observe(*problem(seed=seed), STEPS)),
    "fresh": lambda seed: noise_fresh(observe(*problem(seed=seed), STEPS)),
    "fresh for long": lambda seed: noise_fresh(observe(*problem(seed=seed), 33)),
    "fresh of many": lambda seed: noise_fresh(observe(*problem(seed=seed, numbers=(1599, 100)), 2)),
    "sizes": lambda seed: noise_at_any_size(*problem(seed=seed), repeats=2),
    "law": lambda seed: noise_law(observe(*problem(seed=seed), STEPS)),
    "draws": lambda seed: draws_independent(*problem(seed=seed)),
    "one record": lambda seed: one_record(*problem(seed=seed)),
    "charges": lambda seed: charged(*problem(seed=seed), 3),
    "leftovers": lambda seed: nothing_kept(*problem(seed=seed), 2),
    "masks": lambda seed: masks_independent(hush.Coordinate(rate=0.25), seed=seed),
    "masks of some": lambda seed: masks_independent(
        hush.Twice(rate=0.5, coordinate_rate=0.5), seed=seed
    ),
    "rejection": lambda seed: rollback_complete(*problem(STRICT, seed=seed), STEPS),
    "no change": lambda seed: no_change_measured(*problem(MEAN_TEST, seed=seed), 5),
    "draws of tests": lambda seed: fresh_test_batches(*problem(MEAN_TEST, seed=seed)),
    "verdicts": lambda seed: noisy_verdicts(problem(MEAN_TEST, seed=seed)[0]),
}


CAUGHT: list[tuple[sabotage.Sabotage, str]] = [
    (sabotage.a_quarter_of_the_noise, "scale"),
    (sabotage.noise_per_physical_batch, "scale"),
    (sabotage.noise_per_rank, "scale"),
    (sabotage.divided_by_who_came, "sizes"),
    (sabotage.noise_in_proportion_to_the_batch, "sizes"),
    (sabotage.no_noise_for_an_empty_draw, "sizes"),
    (sabotage.no_clipping_far_out, "one record"),
    (sabotage.an_empty_slot_that_counts, "one record"),
    (sabotage.clipping_after_averaging, "one record"),
    (sabotage.reseeded_every_step, "fresh"),
    (sabotage.two_seeds_in_turn, "fresh"),
    (sabotage.a_cycle_of_thirty_seeds, "fresh for long"),
    (sabotage.the_same_noise_for_both_halves, "fresh"),
    (sabotage.noise_that_repeats_along_the_numbers, "fresh of many"),
    (sabotage.one_number_without_noise, "law"),
    (sabotage.coins_for_noise, "law"),
    (sabotage.drawn_twice, "draws"),
    (sabotage.records_drawn_in_pairs, "draws"),
    (sabotage.records_drawn_in_hidden_pairs, "draws"),
    (sabotage.batches_of_one_size, "draws"),
    (sabotage.shuffled_epochs, "draws"),
    (sabotage.one_mask_for_all_numbers, "masks"),
    (sabotage.one_mask_for_all_numbers, "masks of some"),
    (sabotage.one_mask_for_all_records, "masks"),
    (sabotage.a_rate_a_fifth_too_high, "masks"),
    (sabotage.momentum_kept, "rejection"),
    (sabotage.stale_loss, "no change"),
    (sabotage.tested_on_the_training_batch, "draws of tests"),
    (sabotage.a_quarter_of_the_noise_in_the_test, "verdicts"),
    (sabotage.every_second_step_uncharged, "charges"),
    (sabotage.a_bare_number_in_a_buffer, "leftovers"),
    (sabotage.a_bare_number_in_an_attribute, "leftovers"),
]


def name(value: Any) -> str:
    return str(getattr(value, "__name__", value))


@functools.cache
def unbroken(check: str) -> Check:
    return CHECKS[check](0)


@pytest.mark.parametrize(("broken", "check"), CAUGHT, ids=name)
def test_it_is_caught(broken: sabotage.Sabotage, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unbroken(check).passed
    broken(monkeypatch)
    assert not CHECKS[check](1).passed


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "check"), CAUGHT, ids=name)
def test_it_is_caught_on_every_seed(
    broken: sabotage.Sabotage, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(CHECKS[check](seed).passed for seed in range(20))
    broken(monkeypatch)
    assert not any(CHECKS[check](seed).passed for seed in range(SEEDS))


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
