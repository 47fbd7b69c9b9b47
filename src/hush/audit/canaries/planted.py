"""A private run that canaries were put into: the very step that trains, with records of another kind.

A canary that is out leaves its slot empty: neighbours are zero-out, as in every charge. What is in the
slot of one that is out adds nothing to any sum.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hush.audit.canaries.directions import Directions, Spikes
from hush.core.errors import DataError
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.checks.models import per_record
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import Loss, Views
from hush.gradients.tape import GradientTape
from hush.gradients.terms import CHUNK, Dense
from hush.training.step import PrivateStep

ORDINARY = -1
"""Mark of a record that is no canary."""
Example = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """What a run gave away of its canaries, and what it was charged."""

    scores: Tensor
    """One a canary; larger where it seems to be in (sensitive, as far as the coins are)."""
    charge: Guarantee
    steps: int


def run_with_canaries(
    model: nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    data: Example,
    canaries: Example | Directions,
    included: Tensor,
    *,
    steps: int,
    delta: float,
    others: bool = True,
    generator: torch.Generator | None = None,
    secure: bool = False,
    physical_batch: int | None = None,
    views: Views | None = None,
    public: Example | None = None,
) -> Planted:
    """Train with the canaries whose coin is true, and score all of them.

    Canaries that are records of the auditor's own (`Pair`) are scored by how much their loss fell; those
    that are `Directions` by how much of their clipped trace is in the updates, which are released.
    Without `others` the slots of the ordinary records are empty as well, and canaries stand out as far
    as they ever could: the guarantee is for any records.
    """
    each = per_record(loss)
    aimed = None if isinstance(canaries, tuple) else canaries
    own = canaries if isinstance(canaries, tuple) else _stand_ins(data, len(included))
    if len(own[1]) != len(included) or (aimed is not None and aimed.canaries != len(included)):
        raise DataError(f"there are {len(included)} coins, and another number of canaries.")
    step = _PlantedStep(
        Marked(model),
        marked_loss(each),
        optimizer,
        plan,
        records=len(data[1]) + len(included),
        generator=generator,
        secure=secure,
        physical_batch=physical_batch,
        views=None if views is None else _marked_views(views),
        public=None if public is None else _marked(public, torch.full((len(public[1]),), ORDINARY)),
    )
    step.aimed = aimed
    coins, ordinary = included.cpu(), len(data[1])
    who = torch.cat([torch.full((ordinary,), ORDINARY), torch.arange(len(coins))])
    present = torch.cat([torch.full((ordinary,), others), coins])
    slots = tuple(torch.cat([a, b.to(a.device)]) for a, b in zip(data, own, strict=True))
    before = _losses(model, each, own) if aimed is None else None
    scores = torch.zeros(len(included), dtype=torch.float64)
    for batch in step.batches(_marked((slots[0], slots[1]), who), steps=steps, present=present):
        if step(batch) and aimed is not None:
            assert step.update is not None
            scores += step.scores(step.update).cpu()
    if before is not None:
        scores = (before - _losses(model, each, own)).cpu()
    return Planted(scores=scores, charge=step.spent(delta), steps=step.steps)


class Marked(nn.Module):
    """The model on inputs that say who they are of, which is passed on to the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, who: Tensor) -> tuple[Any, Tensor]:
        return self.model(inputs), who


def marked_loss(loss: Loss) -> Loss:
    """The loss of each record, whoever it is of."""

    def unmarked(outputs: tuple[Any, Tensor], targets: Tensor) -> Tensor:
        return loss(outputs[0], targets)

    return unmarked


class _PlantedStep(PrivateStep):
    """The private step; of each physical batch, canaries with a direction are clipped as they are."""

    aimed: Directions | None = None
    _frame: PublicBasis | None = None
    _traces: tuple[PublicBasis | None, Tensor] | None = None

    def scores(self, update: Tensor) -> Tensor:
        """How much of each canary's own trace is in an update: their inner product."""
        if isinstance(self.aimed, Spikes):
            return self.aimed.scores(update)
        assert self.aimed is not None
        if self._traces is None or self._traces[0] is not self._frame:
            self._traces = self._frame, self._each_alone()
        return self._traces[1] @ update

    def _each_alone(self) -> Tensor:
        """What each canary alone would add to the sum: clipped, and with all of its coordinates."""
        assert self.aimed is not None
        found = []
        for who in torch.arange(self.aimed.canaries, device=self.device).split(1):
            total = self._canaries(who, self._frame, None).total.values()
            flat = torch.cat([part.reshape(-1) for part in total])
            found.append(flat if self._frame is None else self._frame.to_parameters(flat))
        return torch.stack(found)

    def clip_physical_batch(
        self, inputs: Any, targets: Any, frame: PublicBasis | None, present: Tensor | None
    ) -> ClippedSum:
        """Clipped sum of a physical batch, in which canaries with a direction have it for a gradient."""
        self._frame = frame
        if self.aimed is None or present is None:
            return super().clip_physical_batch(inputs, targets, frame, present)
        who = inputs[1]
        sampling = self.plan.sampling
        thin = (
            None
            if sampling.coordinate_participation == 1
            else partial(sampling.mask_coordinates, generator=self.generator)
        )
        parts = [super().clip_physical_batch(inputs, targets, frame, present & (who == ORDINARY))]
        at_once = max(1, CHUNK[self.device.type] // self.dimension)
        drawn = who[present & (who != ORDINARY)]
        parts += [self._canaries(some, frame, thin) for some in drawn.split(at_once) if len(some)]
        total = {
            name: torch.stack([part.total[name] for part in parts]).sum(0) for name in parts[0].total
        }
        return ClippedSum(total=total, skipped=torch.stack([part.skipped for part in parts]).sum())

    def _canaries(
        self, who: Tensor, frame: PublicBasis | None, thin: CoordinateMask | None
    ) -> ClippedSum:
        assert self.aimed is not None
        # beyond every bound, so that it is the clipping that holds them
        length = 2 * max(ball.norm for ball in self.plan.clipping.sensitivity(self.dimension))
        rows = self.aimed.rows(who, length)
        trained = self.trainable()
        parts = rows.split([value.numel() for value in trained.values()], dim=1)
        terms = {
            name: Dense(part.reshape(len(who), *value.shape))
            for (name, value), part in zip(trained.items(), parts, strict=True)
        }
        tape = GradientTape(dict(terms), self.device)
        return self.plan.clipping.clip(tape if frame is None else ProjectedTape(tape, frame), thin)


def _marked(records: Example, who: Tensor) -> tuple[Example, Tensor]:
    return (records[0], who.to(records[0].device)), records[1]


def _marked_views(views: Views) -> Views:
    def both(inputs: Example) -> Example:
        shown = views(inputs[0])
        return shown, inputs[1].expand(len(shown))

    return both


def _stand_ins(data: Example, canaries: int) -> Example:
    """Inputs for canaries that have none of their own: a selective test looks at them."""
    some = torch.arange(canaries) % len(data[1])
    return data[0][some.to(data[0].device)], data[1][some.to(data[1].device)]


@torch.no_grad()
def _losses(model: nn.Module, loss: Loss, records: Example) -> Tensor:
    device = next(model.parameters()).device
    return loss(model(records[0].to(device)), records[1].to(device)).double()
