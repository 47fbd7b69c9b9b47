"""Descent with a noisy choice of the step size, and noise that shrinks when no step helps (DPAGD).

After Lee and Kifer 2018: every record takes part in every step; the length of a step is the best of a
few by their noisy losses; if the best is not to move, the same gradient is measured again with more of
the budget.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hush.accounting.filters import GaussianFilter
from hush.accounting.ledger.ledger import Ledger
from hush.clipping import L2
from hush.clipping.norms import NORM
from hush.core.guarantee import Budget, Guarantee
from hush.core.ranges import check_count, number
from hush.core.value import Value
from hush.gradients.recording import per_record_losses
from hush.gradients.terms import zero_rows
from hush.gradients.tree import tree_map
from hush.noise import Gaussian
from hush.training.data import Batch, Data, check_present, count
from hush.training.randomness import own_randomness
from hush.training.step import PrivateStep

_WHY = "a step goes so far along the noisy direction at most"
_AFTER = 10
"""Moves after which the largest step is chosen anew, from those that were taken."""


@dataclass(frozen=True, kw_only=True)
class Adaptive(Value):
    """The settings of `AdaptiveDescent`; none may depend on the records."""

    clip: float = field(metadata=NORM)
    """Each record's gradient is scaled down to this Euclidean norm."""
    loss_clip: float = field(default=1.0, metadata=NORM)
    """So is the vector of what the steps to choose from change of its loss."""
    longest: float = field(default=1.0, metadata=number(above=0, at_most=1e12, why=_WHY, example=1.0))
    """The largest step at first."""
    sizes: int = 20
    """How many steps there are to choose from, evenly spaced."""
    splits: int = 60
    """The first gradient and each choice of a step are given 1 / (2 splits) of the budget."""
    growth: float = field(
        default=0.1,
        metadata=number(above=0, at_most=100, why="more budget is to be tried", example=0.1),
    )
    """How much more precise a gradient is measured when no step helps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (("sizes", "they are chosen from"), ("splits", "the budget is split")):
            object.__setattr__(self, name, check_count(name, getattr(self, name), why, at_least=1))


class AdaptiveDescent:
    """Runs until the budget is used; the model moves in place, in evaluation mode.

    **Guarantee.** Every model on the way, and how many there were, satisfy `spent(delta)`: all noisy
    quantities are Gaussian releases of full batches, and a `GaussianFilter` of the budget admits each
    one before it is drawn. Its whole budget is on the ledger before the first one:
    docs/guarantees/baselines.md.

        descent = AdaptiveDescent(model, loss, (inputs, targets), budget, Adaptive(clip=0.1))
        for length in descent.run():
            ...
        print(descent.spent(delta=1e-5))
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
        secure: bool = False,
        physical_batch: int | None = None,
        present: Tensor | None = None,
    ) -> None:
        self.filter = GaussianFilter(budget)
        self.settings = settings
        model.eval()
        self._step = PrivateStep(
            model,
            loss,
            torch.optim.SGD(model.parameters(), lr=1.0),
            replace(self.filter.plan, clipping=L2(norm=settings.clip)),
            records=count(data),
            ledger=ledger,
            generator=generator,
            secure=secure,
            physical_batch=physical_batch,
        )
        self._everyone = Batch(
            torch.arange(self._step.records),
            data,
            self._step.probe(data),
            check_present(present, count(data)),
        )
        self._share = self.filter.precision / (2 * settings.splits)

    def run(self) -> Iterator[float]:
        """Descend; after each move yield its length."""
        total = self._gradient()
        self._step.charge(f"filter {self.filter.precision!r}")
        precision, longest, taken = self._share, self.settings.longest, list[float]()
        while self.filter.admit(precision):
            noisy = self._noisy(total, self.settings.clip, precision)
            length = self._chosen(noisy, longest)
            while length == 0:
                more = self.settings.growth * precision
                if not self.filter.admit(more):
                    return
                again = self._noisy(total, self.settings.clip, more)
                noisy = (precision * noisy + more * again) / (precision + more)
                precision += more
                length = self._chosen(noisy, longest)
            if length is None:
                return
            self._move(noisy, length)
            taken.append(length)
            if len(taken) % _AFTER == 0:
                longest = (1 + self.settings.growth) * max(taken[-_AFTER:])
            yield length
            total = self._gradient()

    def spent(self, delta: float) -> Guarantee:
        """The guarantee for everything on the ledger, the filter's whole budget among it."""
        return self._step.spent(delta)

    def _noisy(self, total: Tensor, norm: float, precision: float) -> Tensor:
        """A sum in which each record counts for `norm` at most, with noise that was admitted."""
        noise = Gaussian(multiplier=precision**-0.5)
        wide = norm / (1 - self._step.rounding)
        return noise.privatize(total.clone(), norm=wide, generator=self._step.generator)

    def _gradient(self) -> Tensor:
        """The sum of all clipped gradients in one vector."""
        return self._step.clipped_sum(self._everyone).clone()

    def _chosen(self, noisy: Tensor, longest: float) -> float | None:
        """The length whose noisy loss is least, 0 if none helps; None if there is no budget to ask."""
        if not self.filter.admit(self._share):
            return None
        lengths = torch.linspace(0, longest, self.settings.sizes + 1, dtype=torch.float64).tolist()
        noisy_losses = self._noisy(self._changes(noisy, lengths), self.settings.loss_clip, self._share)
        return float(lengths[int(noisy_losses.argmin())])

    @torch.no_grad()
    def _changes(self, noisy: Tensor, lengths: list[float]) -> Tensor:
        """How each length changes the loss, summed over the records, each held within the clip."""
        step, clip = self._step, self.settings.loss_clip
        start = [parameter.clone() for parameter in step.trainable().values()]
        total = torch.zeros(len(lengths), dtype=torch.float64, device=step.device)
        step.module_state.begin()
        for part in self._everyone:
            inputs, targets, present = tree_map(part, step.to_device)
            losses = []
            for length in lengths:
                self._move(noisy, length)
                with own_randomness(step.generator, step.device):
                    found = per_record_losses(step.model, step.loss, inputs, targets)
                losses.append(found.double())
                for parameter, value in zip(step.trainable().values(), start, strict=True):
                    parameter.copy_(value)
            changes = held(torch.stack(losses, 1), clip)
            total += (changes if present is None else zero_rows(changes, present)).sum(0)
        step.module_state.check()
        return total

    @torch.no_grad()
    def _move(self, noisy: Tensor, length: float) -> None:
        direction = noisy / torch.linalg.vector_norm(noisy)
        parameters = list(self._step.trainable().values())
        parts = direction.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.sub_((length * part.view_as(parameter)).to(parameter.dtype))
        self._step.adopt_weights()


def held(losses: Tensor, clip: float) -> Tensor:
    """Each record's losses less the first, its row scaled down to a Euclidean norm of `clip` at most.

    A loss that is not finite counts as the worst.
    """
    changes = (losses - losses[:, :1]).nan_to_num(nan=clip).clamp(-clip, clip)
    norms: Tensor = torch.linalg.vector_norm(changes, dim=1, keepdim=True)
    return changes * (clip / norms).clamp(max=1.0)
