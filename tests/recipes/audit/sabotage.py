"""Broken versions of a private step, each a few lines: what every check must find out."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.accounting.ledger import Ledger
from hush.clipping import norms as lp
from hush.core.parts import ClippedSum, Clipping, Noise, Release, Sampling
from hush.core.randomness import Stream, bernoulli, uniform
from hush.noise.exact import ziggurat
from hush.training.data import Batch
from hush.training.methods.selective import Trials
from hush.training.rehearsal import Snapshot
from hush.training.step import PrivateStep
from tests.training import helpers

Sabotage = Callable[[pytest.MonkeyPatch], None]


def replaces(*target: Any) -> Callable[[Callable[..., Any]], Sabotage]:
    """Make of a function the sabotage that puts it in place of a function of hush."""

    def made(function: Callable[..., Any]) -> Sabotage:
        def sabotage(patch: pytest.MonkeyPatch) -> None:
            setter: Any = patch.setattr
            setter(*target, function)

        sabotage.__name__, sabotage.__doc__ = function.__name__, function.__doc__
        return sabotage

    return made


def plan_of(
    sampling: Sampling | None = None,
    clipping: Clipping | None = None,
    noise: Noise | None = None,
    release: Release | None = None,
) -> hush.Plan:
    """A plan of DP-SGD with other parts."""
    return helpers.plan_of(sampling or hush.Poisson(0.2), clipping, noise or 1.0, release)


PRIVATE, PRIVATIZE, MASKED = (
    PrivateStep.private_gradient,
    hush.Gaussian.privatize,
    Sampling.mask_coordinates,
)
RESTORE, CHARGE, VERDICT = Snapshot.restore, Ledger.charge, Trials.noisy_verdict
WEIGHTS, DRAWS = lp.clipping_weights, ziggurat.pending_draws


@replaces(hush.Gaussian, "privatize")
def a_quarter_of_the_noise(
    self: hush.Gaussian, location: Tensor, *, norm: float, generator: Any
) -> Tensor:
    return PRIVATIZE(self, location, norm=norm / 4, generator=generator)


def _noise_per_part(patch: pytest.MonkeyPatch, parts: Callable[[Batch], list[Tensor]]) -> None:
    """The sum of noisy means, one for each part of the records."""

    def private(self: PrivateStep, batch: Batch) -> Tensor:
        noisy = [PRIVATE(self, Batch(part, batch.data, batch.physical)).clone() for part in parts(batch)]
        return torch.stack(noisy).sum(0) if noisy else torch.zeros(self.size, dtype=torch.float64)

    patch.setattr(PrivateStep, "private_gradient", private)


def noise_per_physical_batch(patch: pytest.MonkeyPatch) -> None:
    _noise_per_part(patch, lambda batch: [*batch.indices.split(batch.physical)] if len(batch) else [])


def noise_per_rank(patch: pytest.MonkeyPatch) -> None:
    """Two ranks, each with half of the records, that add noise and then are summed."""
    _noise_per_part(patch, lambda batch: [batch.indices[::2], batch.indices[1::2]])


@replaces(hush.L2, "clip")
def clipping_after_averaging(self: hush.L2, tape: Any, thin: Any = None) -> ClippedSum:
    everyone = torch.ones(tape.records)
    total = tape.weighted_sum(everyone)
    length = math.sqrt(sum(float(part.square().sum()) for part in total.values())) / len(everyone)
    share = min(1.0, self.norm / max(length, 1e-30))
    return ClippedSum(
        total={name: share * part for name, part in total.items()}, skipped=torch.tensor(0)
    )


@replaces(PrivateStep, "private_gradient")
def divided_by_who_came(self: PrivateStep, batch: Batch) -> Tensor:
    expected = self.plan.sampling.expected(self.records)
    return PRIVATE(self, batch) * expected / max(1, len(batch))


def _seeds_in_turn(patch: pytest.MonkeyPatch, period: int) -> None:
    """The noise of step k is that of step k - period."""

    def private(self: PrivateStep, batch: Batch) -> Tensor:
        assert isinstance(self.generator, Stream)
        key = bytes([self.steps % period] * 32)
        self.generator.set_state(Stream(self.device, key).get_state())
        return PRIVATE(self, batch)

    patch.setattr(PrivateStep, "private_gradient", private)


def reseeded_every_step(patch: pytest.MonkeyPatch) -> None:
    _seeds_in_turn(patch, 1)


def two_seeds_in_turn(patch: pytest.MonkeyPatch) -> None:
    _seeds_in_turn(patch, 2)


def a_cycle_of_thirty_seeds(patch: pytest.MonkeyPatch) -> None:
    _seeds_in_turn(patch, 30)


@replaces("hush.noise.exact.ziggurat.pending_draws")
def noise_that_repeats_along_the_numbers(
    beta: float, count: int, units: float, source: Any
) -> ziggurat.PendingDraws:
    """The same 65,536 draws over and over, as of a buffer that is filled once."""
    drawn = DRAWS(beta, min(count, 2**16), units, source)
    cycle = np.arange(count) % 2**16
    drawn.start, drawn.words = drawn.start[cycle], drawn.words[cycle]
    return drawn


def _noise_times(patch: pytest.MonkeyPatch, factor: Callable[[float], float]) -> None:
    """Noise multiplied by a function of how many were drawn over how many are on average."""

    def private(self: PrivateStep, batch: Batch) -> Tensor:
        expected = self.plan.sampling.expected(self.records)
        total = self.clipped_sum(batch).clone()
        noise = self.privatize(total.clone()) - total / expected
        return total / expected + factor(len(batch) / expected) * noise

    patch.setattr(PrivateStep, "private_gradient", private)


def noise_in_proportion_to_the_batch(patch: pytest.MonkeyPatch) -> None:
    _noise_times(patch, lambda share: share)


def no_noise_for_an_empty_draw(patch: pytest.MonkeyPatch) -> None:
    _noise_times(patch, lambda share: float(share > 0))


def _other_noise(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    def privatize(self: hush.Gaussian, location: Tensor, *, norm: float, generator: Any) -> Tensor:
        noise = PRIVATIZE(self, torch.zeros_like(location), norm=norm, generator=generator)
        return location + change(noise / (norm * self.multiplier)) * norm * self.multiplier

    patch.setattr(hush.Gaussian, "privatize", privatize)


def the_same_noise_for_both_halves(patch: pytest.MonkeyPatch) -> None:
    _other_noise(patch, lambda noise: noise[: (len(noise) + 1) // 2].repeat(2)[: len(noise)])


def one_number_without_noise(patch: pytest.MonkeyPatch) -> None:
    _other_noise(patch, lambda noise: torch.cat([torch.zeros_like(noise[:1]), noise[1:]]))


def coins_for_noise(patch: pytest.MonkeyPatch) -> None:
    """As much noise as is charged, of another law."""
    _other_noise(patch, torch.sign)


def drawn_twice(patch: pytest.MonkeyPatch) -> None:
    draw = hush.Poisson.draw
    patch.setattr(hush.Poisson, "draw", lambda self, *options: draw(self, *options).repeat_interleave(2))


@replaces(hush.Poisson, "draw")
def records_drawn_in_pairs(self: hush.Poisson, records: int, generator: Any, step: int = 0) -> Tensor:
    """Each at the rate charged, and always with its neighbour."""
    tossed = bernoulli((records + 1) // 2, self.rate, generator)
    return tossed.repeat_interleave(2)[:records].nonzero().squeeze(1)


@replaces(hush.Poisson, "draw")
def records_drawn_in_hidden_pairs(
    self: hush.Poisson, records: int, generator: Any, step: int = 0
) -> Tensor:
    """The same for pairs that stand at no fixed distance."""
    order = torch.randperm(records, generator=torch.Generator().manual_seed(5))
    tossed = bernoulli((records + 1) // 2, self.rate, generator)
    return order[tossed.repeat_interleave(2)[:records]]


@replaces(hush.Poisson, "draw")
def batches_of_one_size(self: hush.Poisson, records: int, generator: Any, step: int = 0) -> Tensor:
    return uniform(records, generator).argsort()[: round(records * self.rate)]


@replaces(hush.CyclicPoisson, "draw")
def groups_of_chance(self: hush.CyclicPoisson, records: int, generator: Any, step: int = 0) -> Tensor:
    return bernoulli(records, self.rate / self.cycle, generator).nonzero().squeeze(1)


def shuffled_epochs(patch: pytest.MonkeyPatch) -> None:
    remaining: list[Tensor] = []

    def draw(self: hush.Poisson, records: int, generator: Any, step: int = 0) -> Tensor:
        if not remaining:
            remaining.extend(uniform(records, generator).argsort().split(round(records * self.rate)))
        return remaining.pop()

    patch.setattr(hush.Poisson, "draw", draw)


@replaces(Sampling, "mask_coordinates")
def one_mask_for_all_numbers(self: Sampling, values: Tensor, generator: Any) -> Tensor:
    flat = values.view(len(values), -1)
    return flat.mul_(MASKED(self, torch.ones(len(values), 1), generator)).view_as(values)


@replaces(Sampling, "mask_coordinates")
def one_mask_for_all_records(self: Sampling, values: Tensor, generator: Any) -> Tensor:
    return values.mul_(MASKED(self, torch.ones(1, values.shape[1]), generator))


@replaces(Sampling, "mask_coordinates")
def a_rate_a_fifth_too_high(self: Sampling, values: Tensor, generator: Any) -> Tensor:
    return MASKED(hush.Coordinate(1.2 * self.coordinate_participation), values, generator)


@replaces(Snapshot, "restore")
def momentum_kept(self: Snapshot) -> None:
    momentum = {key: dict(state) for key, state in self.optimizer.state.items()}
    RESTORE(self)
    self.optimizer.state.update(momentum)


def stale_loss(patch: pytest.MonkeyPatch) -> None:
    """The old loss is the one that was measured when the model was new, on another batch."""
    last: list[Tensor] = []

    def number(self: Trials, new: Tensor, old: Tensor) -> Tensor:
        expected, clip = self.sampling.expected(self.step.records), self.release.clip
        before = last.pop() if last else old.sum() / expected
        last.append(new.sum() / expected)
        return (new.sum() / expected - before).clamp(-clip, clip)

    patch.setattr(Trials, "bounded_rise", number)


@replaces(lp, "clipping_weights")
def no_clipping_far_out(norm: float, norms: Tensor, *_: Any, **__: bool) -> Tensor:
    """Gradients longer than a thousand norms are added as they are."""
    return torch.where(norms > 1e3 * norm, torch.ones_like(norms), WEIGHTS(norm, norms))


@replaces(Ledger, "charge")
def every_second_step_uncharged(self: Ledger, plan: hush.Plan, *, step: int, **options: Any) -> None:
    if step % 2:
        CHARGE(self, plan, step=step // 2 + 1, **options)


@replaces(PrivateStep, "private_gradient")
def a_bare_number_in_a_buffer(self: PrivateStep, batch: Batch) -> Tensor:
    """A number of the sum before noise, in a buffer that is published with the weights."""
    self.model.register_buffer("largest", self.clipped_sum(batch).max().clone())
    return PRIVATE(self, batch)


@replaces(PrivateStep, "private_gradient")
def a_bare_number_in_an_attribute(self: PrivateStep, batch: Batch) -> Tensor:
    self.model.largest = [self.clipped_sum(batch).max().clone()]  # type: ignore[assignment]
    return PRIVATE(self, batch)


def tested_on_the_training_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trials, "draw_test", lambda self, batch: batch)


@replaces(Trials, "noisy_verdict")
def a_quarter_of_the_noise_in_the_test(self: Trials, number: Tensor) -> bool:
    with pytest.MonkeyPatch.context() as inside:
        a_quarter_of_the_noise(inside)
        return VERDICT(self, number)


def an_empty_slot_that_counts(patch: pytest.MonkeyPatch) -> None:
    """What is in an empty slot moves the others' share in the last bits."""
    clip = hush.L2.clip

    def rounded(self: hush.L2, tape: Any, thin: Any = None) -> ClippedSum:
        clipped = clip(self, tape, thin)
        bare = float(getattr(tape, "tape", tape).norms(2.0).sum())
        total = {name: part * (1 + bare * 2.0**-50) for name, part in clipped.total.items()}
        return ClippedSum(total=total, skipped=clipped.skipped)

    patch.setattr(hush.L2, "clip", rounded)
