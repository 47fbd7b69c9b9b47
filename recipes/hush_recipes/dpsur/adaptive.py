"""Adaptive private gradient descent (DPAGD): noisy choice of the step size, adaptive noise level.

After Lee and Kifer 2018: every record takes part in every step; the step size is the best of a few by
their noisy losses; if the best is not to move, the same gradient is measured again with more of the
budget.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.clipping.norms import NORM
from hush.core.guarantee import Budget, Guarantee, Neighbours, check_delta
from hush.core.value import Value, check_count, number
from hush.gradients.recording import per_sample_losses
from hush.gradients.terms import zero_rows
from hush.gradients.tree import tree_map
from hush.noise import Gaussian
from hush.training.data import Batch, Data, count, occupied, own_randomness, prepare
from hush.training.distributed.processes import check_first_rank
from hush.training.noisy_mean import split_like
from hush.training.options import Distributed, Execution, Randomness
from hush.training.step import PrivateStep
from hush_recipes.dpsur.gaussian_filter import GaussianFilter

_WHY = "a step goes so far along the noisy direction at most"
_UPDATE_EVERY = 10
"""Moves after which the largest step size is chosen anew, from those that were taken."""


@dataclass(frozen=True, kw_only=True)
class Adaptive(Value):
    """Settings of `AdaptiveDescent`; none may depend on the records."""

    clip: float = field(metadata=NORM)
    """Clipping norm of the per-sample gradients."""
    loss_clip: float = field(default=1.0, metadata=NORM)
    """Clipping norm of the vector of a record's loss changes, an entry a candidate step size."""
    longest: float = field(default=1.0, metadata=number(above=0, at_most=1e12, why=_WHY, example=1.0))
    """Largest candidate step size at first."""
    sizes: int = 20
    """Candidate step sizes, evenly spaced."""
    splits: int = 60
    """The first gradient and each choice of a step size are given 1 / (2 splits) of the budget."""
    growth: float = field(
        default=0.1,
        metadata=number(above=0, at_most=100, why="more budget is to be tried", example=0.1),
    )
    """Relative increase of a gradient's precision (1 / variance) when no step size helps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (("sizes", "they are chosen from"), ("splits", "the budget is split")):
            object.__setattr__(self, name, check_count(name, getattr(self, name), why, at_least=1))


class AdaptiveDescent:
    """Descent until the budget is used; the model moves in place, in evaluation mode.

    **Guarantee.** Every model on the way, and how many there were, satisfy `spent(delta)`: all noisy
    quantities are Gaussian releases of full batches, and a `GaussianFilter` of the budget admits each
    one before it is drawn. Its whole budget is on the ledger before the first one:
    docs/guarantees/baselines.md.

        descent = AdaptiveDescent(model, loss, (inputs, targets), budget, Adaptive(clip=0.1))
        for length in descent.run():
            ...
        print(descent.spent(delta=1e-5))

    Args:
        model: module to train, in place.
        loss: one value a record.
        data: inputs and targets, a row a slot.
        budget: of the whole run; all of it is charged.
        settings: clipping norms, candidate step sizes and shares of the budget.
        ledger: ledger to charge; None: one in memory.
        generator: seeds the noise, so that it can be repeated: for tests.
        physical_batch: records to work on at once; None: as many as fit.
        present: which slots hold a record; None: all do.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        data: Data,
        budget: Budget,
        settings: Adaptive,
        *,
        ledger: Ledger | None = None,
        generator: torch.Generator | None = None,
        physical_batch: int | None = None,
        present: Tensor | None = None,
    ) -> None:
        check_first_rank(type(self).__name__)
        self.filter = GaussianFilter(budget)
        self.settings = settings
        model.eval()
        self.step = PrivateStep(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=1.0),
            replace(self.filter.plan, clipping=L2(norm=settings.clip)),
            records=count(data),
            ledger=ledger,
            randomness=Randomness(generator=generator),
            execution=Execution(physical_batch=physical_batch),
            distributed=Distributed(processes=False),
        )
        self._delta = check_delta(budget.delta, self.step.records)
        data = prepare(data, present)
        self._full_batch = Batch(
            torch.arange(self.step.records), data, self.step.probe(data), occupied(data, present)
        )
        self._share = self.filter.precision / (2 * settings.splits)

    def run(self) -> Iterator[float]:
        """Step sizes of the moves, each yielded right after its move."""
        total = self.gradient_sum()
        self.step.ledger.store_delta(self._delta)
        self.step.charge(f"filter {self.filter.precision!r}")
        precision, longest, taken = self._share, self.settings.longest, list[float]()
        while self.filter.admit(precision):
            noisy = self._privatize(total, self.settings.clip, precision)
            length = self._choose_length(noisy, longest)
            while length == 0:
                more = self.settings.growth * precision
                if not self.filter.admit(more):
                    return
                second = self._privatize(total, self.settings.clip, more)
                noisy = (precision * noisy + more * second) / (precision + more)
                precision += more
                length = self._choose_length(noisy, longest)
            if length is None:
                return
            self._move(noisy, length)
            taken.append(length)
            if len(taken) % _UPDATE_EVERY == 0:
                longest = (1 + self.settings.growth) * max(taken[-_UPDATE_EVERY:])
            yield length
            total = self.gradient_sum()

    def spent(
        self, delta: float | None = None, *, group: int = 1, neighbours: Neighbours | None = None
    ) -> Guarantee:
        """(epsilon, delta) guarantee of everything on the ledger, the filter's whole budget among it.

        Args:
            delta: of the guarantee; None: the budget's, which the ledger keeps.
            group: number of units of privacy that change together.
            neighbours: adjacency relation; None: the one that is charged.
        """
        return self.step.spent(delta, group=group, neighbours=neighbours)

    def _privatize(self, total: Tensor, norm: float, precision: float) -> Tensor:
        """Noisy sum, of l2 sensitivity `norm` and noise of a precision that the filter admitted."""
        self.step.ledger.check_process()  # the charge, which checks it too, was before the first draw
        noise = Gaussian(multiplier=precision**-0.5)
        sensitivity = norm / (1 - self.step.rounding)
        return noise.privatize(total.clone(), norm=sensitivity, generator=self.step.generator)

    def gradient_sum(self) -> Tensor:
        """Sum of all clipped per-sample gradients (sensitive)."""
        total = self.step.clipped_sum(self._full_batch).clone()
        self.step.advance(self._full_batch.data)
        return total

    def _choose_length(self, direction: Tensor, longest: float) -> float | None:
        """Step size of the least noisy loss, 0 if none helps; None if there is no budget to ask."""
        if not self.filter.admit(self._share):
            return None
        lengths = torch.linspace(0, longest, self.settings.sizes + 1, dtype=torch.float64).tolist()
        changes = self.loss_changes(direction, lengths)
        noisy_losses = self._privatize(changes, self.settings.loss_clip, self._share)
        return float(lengths[int(noisy_losses.argmin())])

    @torch.no_grad()
    def loss_changes(self, direction: Tensor, lengths: list[float]) -> Tensor:
        """Loss change of each step size along a direction, clipped per record and summed (sensitive)."""
        step, clip = self.step, self.settings.loss_clip
        total = torch.zeros(len(lengths), dtype=torch.float64, device=step.device)
        with self._weights_restored() as restore:
            for part in self._full_batch.physical_batches(step.generator):
                inputs, targets, present, _ = tree_map(part, step.gradients.to_device)
                losses = []
                for length in lengths:
                    self._shift(direction, length)
                    with own_randomness(step.generator, step.device):
                        values = per_sample_losses(
                            step.model,
                            step.gradients.loss,
                            inputs,
                            targets,
                            one_by_one=step.gradients.probed.one_by_one,
                        )
                    losses.append(values.double())
                    restore()
                changes = clip_loss_changes(torch.stack(losses, 1), clip)
                total += (changes if present is None else zero_rows(changes, present)).sum(0)
        return total

    @contextmanager
    def _weights_restored(self) -> Iterator[Callable[[], None]]:
        """Context for trials of other weights; what it gives restores those of before, as its end does.

        A run may end after a trial, and `spent` must find the weights that were released.
        """
        self.step.check_weights()
        parameters = list(self.step.trainable().values())
        start = [parameter.clone() for parameter in parameters]

        def restore() -> None:
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)

        try:
            yield restore
        finally:
            with torch.no_grad():
                restore()
            self.step.adopt_weights()

    def _move(self, direction: Tensor, length: float) -> None:
        try:
            self._shift(direction, length)
        finally:  # where it is stopped in between, it is a function of what was released all the same
            self.step.adopt_weights()

    @torch.no_grad()
    def _shift(self, direction: Tensor, length: float) -> None:
        unit = direction / torch.linalg.vector_norm(direction)
        parameters = list(self.step.trainable().values())
        for parameter, part in zip(parameters, split_like(unit, parameters), strict=True):
            parameter.sub_((length * part).to(parameter.dtype))


def clip_loss_changes(losses: Tensor, clip: float) -> Tensor:
    """Changes of each record's losses from the first, a row each, clipped to an l2 norm of `clip`.

    A loss that is not finite counts as the worst.
    """
    changes = (losses - losses[:, :1]).nan_to_num(nan=clip).clamp(-clip, clip)
    norms: Tensor = torch.linalg.vector_norm(changes, dim=1, keepdim=True)
    return changes * (clip / norms).clamp(max=1.0)
