"""Broken versions of a private step, each a few lines: what every check must find out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hush
from hush.core.tape import ClippedSum
from hush.sampling import coordinates
from hush.training.batch import Batch
from hush.training.selective import Trials
from hush.training.snapshot import Snapshot
from hush.training.step import PrivateStep

NOISY_MEAN, AROUND, KEPT = PrivateStep._noisy_mean, hush.Gaussian.around, coordinates._kept
RESTORE = Snapshot.restore


def a_quarter_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    def around(self: hush.Gaussian, location: Tensor, *, norm: float, generator: Any) -> Tensor:
        return AROUND(self, location, norm=norm / 4, generator=generator)

    patch.setattr(hush.Gaussian, "around", around)


def noise_per_physical_batch(patch: pytest.MonkeyPatch) -> None:
    def noisy_mean(self: PrivateStep, batch: Batch) -> Tensor:
        return _parts(self, batch, [*batch.indices.split(batch.physical)] if len(batch) else [])

    patch.setattr(PrivateStep, "_noisy_mean", noisy_mean)


def noise_per_rank(patch: pytest.MonkeyPatch) -> None:
    """Two ranks, each with half of the records, that add noise and then are summed."""

    def noisy_mean(self: PrivateStep, batch: Batch) -> Tensor:
        return _parts(self, batch, [batch.indices[::2], batch.indices[1::2]])

    patch.setattr(PrivateStep, "_noisy_mean", noisy_mean)


def clipping_after_averaging(patch: pytest.MonkeyPatch) -> None:
    def clip(self: hush.L2, tape: Any, thin: Any = None) -> ClippedSum:
        everyone = torch.ones(tape.records)
        total = tape.weighted_sum(everyone)
        length = math.sqrt(sum(float(part.square().sum()) for part in total.values())) / len(everyone)
        share = min(1.0, self.norm / length)
        return ClippedSum(
            total={name: share * part for name, part in total.items()}, skipped=torch.tensor(0)
        )

    patch.setattr(hush.L2, "clip", clip)


def divided_by_who_came(patch: pytest.MonkeyPatch) -> None:
    def noisy_mean(self: PrivateStep, batch: Batch) -> Tensor:
        expected = self.plan.sampling.expected(self.records)
        return NOISY_MEAN(self, batch) * expected / max(1, len(batch))

    patch.setattr(PrivateStep, "_noisy_mean", noisy_mean)


def reseeded_every_step(patch: pytest.MonkeyPatch) -> None:
    def noisy_mean(self: PrivateStep, batch: Batch) -> Tensor:
        assert isinstance(self.generator, torch.Generator)
        self.generator.manual_seed(0)
        return NOISY_MEAN(self, batch)

    patch.setattr(PrivateStep, "_noisy_mean", noisy_mean)


def two_seeds_in_turn(patch: pytest.MonkeyPatch) -> None:
    def noisy_mean(self: PrivateStep, batch: Batch) -> Tensor:
        assert isinstance(self.generator, torch.Generator)
        self.generator.manual_seed(self.steps % 2)
        return NOISY_MEAN(self, batch)

    patch.setattr(PrivateStep, "_noisy_mean", noisy_mean)


def _other_noise(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    def around(self: hush.Gaussian, location: Tensor, *, norm: float, generator: Any) -> Tensor:
        noise = AROUND(self, torch.zeros_like(location), norm=norm, generator=generator)
        return location + change(noise / (norm * self.multiplier)) * norm * self.multiplier

    patch.setattr(hush.Gaussian, "around", around)


def the_same_noise_for_both_halves(patch: pytest.MonkeyPatch) -> None:
    _other_noise(patch, lambda noise: noise[: (len(noise) + 1) // 2].repeat(2)[: len(noise)])


def one_number_without_noise(patch: pytest.MonkeyPatch) -> None:
    _other_noise(patch, lambda noise: torch.cat([torch.zeros(1), noise[1:]]))


def coins_for_noise(patch: pytest.MonkeyPatch) -> None:
    """As much noise as is charged, of another law."""
    _other_noise(patch, torch.sign)


def drawn_twice(patch: pytest.MonkeyPatch) -> None:
    draw = hush.Poisson.draw
    patch.setattr(hush.Poisson, "draw", lambda self, *given: draw(self, *given).repeat_interleave(2))


def batches_of_one_size(patch: pytest.MonkeyPatch) -> None:
    def draw(self: hush.Poisson, records: int, generator: Any) -> Tensor:
        return torch.randperm(records, generator=generator)[: round(records * self.rate)]

    patch.setattr(hush.Poisson, "draw", draw)


def shuffled_epochs(patch: pytest.MonkeyPatch) -> None:
    left: list[Tensor] = []

    def draw(self: hush.Poisson, records: int, generator: Any) -> Tensor:
        if not left:
            left.extend(torch.randperm(records, generator=generator).split(round(records * self.rate)))
        return left.pop()

    patch.setattr(hush.Poisson, "draw", draw)


def one_mask_for_all_numbers(patch: pytest.MonkeyPatch) -> None:
    def kept(values: Tensor, rate: float, generator: Any) -> Tensor:
        flat = values.view(len(values), -1)
        return flat.mul_(KEPT(torch.ones(len(values), 1), rate, generator)).view_as(values)

    patch.setattr(coordinates, "_kept", kept)


def one_mask_for_all_records(patch: pytest.MonkeyPatch) -> None:
    def kept(values: Tensor, rate: float, generator: Any) -> Tensor:
        return values.mul_(KEPT(torch.ones(1, values.shape[1]), rate, generator))

    patch.setattr(coordinates, "_kept", kept)


def a_rate_a_fifth_too_high(patch: pytest.MonkeyPatch) -> None:
    def kept(values: Tensor, rate: float, generator: Any) -> Tensor:
        return KEPT(values, 1.2 * rate, generator)

    patch.setattr(coordinates, "_kept", kept)


def momentum_kept(patch: pytest.MonkeyPatch) -> None:
    def restore(self: Snapshot) -> None:
        momentum = {key: dict(held) for key, held in self._optimizer.state.items()}
        RESTORE(self)
        self._optimizer.state.update(momentum)

    patch.setattr(Snapshot, "restore", restore)


def stale_loss(patch: pytest.MonkeyPatch) -> None:
    """The old loss is the one that was measured when the model was new, on another batch."""
    last: list[Tensor] = []

    def number(self: Trials, new: Tensor, old: Tensor) -> Tensor:
        expected, clip = self._sampling.expected(self._step.records), self._release.clip
        before = last.pop() if last else old.sum() / expected
        last.append(new.sum() / expected)
        return (new.sum() / expected - before).clamp(-clip, clip)

    patch.setattr(Trials, "_number", number)


def _parts(step: PrivateStep, batch: Batch, parts: list[Tensor]) -> Tensor:
    """The sum of noisy means, one for each part of the records."""
    found = [NOISY_MEAN(step, Batch(part, batch.data, batch.physical)).clone() for part in parts]
    return torch.stack(found).sum(0) if found else step._nothing(step._size())


Sabotage = Callable[[pytest.MonkeyPatch], None]
