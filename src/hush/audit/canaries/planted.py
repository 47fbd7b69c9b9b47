"""Private run with canaries: the step that trains, with records of the auditor's own beside the others.

A canary that is out leaves its slot empty: neighbours are zero-out, as in every charge. What is in the
slot of one that is out adds nothing to any sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hush.audit.canaries.directions import Directions, Spikes
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.tape import ClippedSum, CoordinateMask
from hush.core.value import check_count
from hush.gradients.losses import per_sample_loss
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.tape import GradientTape, UnitTape, unit_tape
from hush.gradients.terms import CHUNK_ENTRIES, Dense
from hush.gradients.tree import Loss, Views
from hush.training.options import Execution, Randomness, Units
from hush.training.step import PrivateStep
from hush.training.units import UnitTable

ORDINARY = -1
"""Mark of a record that is no canary."""
Example = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class CanaryRun:
    """Scores of the canaries of one run, and the guarantee that was charged."""

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
    units: Units | None = None,
    owned: int = 1,
    done: Callable[[], None] = lambda: None,
) -> CanaryRun:
    """Scores of all canaries after training with those whose coin is true.

    With `units` a canary is an owner, all of whose records are in or out by one coin.

    Args:
        model: module to train, in place.
        loss: one value a record.
        optimizer: takes the noisy gradients.
        plan: what is run and charged.
        data: the ordinary records.
        canaries: records of the auditor's own, scored by how much their loss fell, those of one owner
            after another's; or `Directions`, the gradient of each of a canary's records, scored by how
            much of their clipped gradient is in the updates, which are released.
        included: a fair coin for each canary: whether it is in.
        steps: of the run.
        delta: of the guarantee that is reported.
        others: without, the slots of the ordinary records are empty as well, and canaries stand out as
            far as they ever could: the guarantee is for any records.
        generator: as in `PrivateStep`, and so are the others.
        secure: likewise.
        physical_batch: likewise.
        views: likewise.
        public: likewise.
        units: owners of the ordinary records, as in `PrivateStep`.
        owned: records of each canary; one where a record is the unit of privacy.
        done: called after each step.
    """
    per_sample = per_sample_loss(loss)
    directions = None if isinstance(canaries, tuple) else canaries
    owned = _check_owned(owned, units)
    own = canaries if isinstance(canaries, tuple) else _stand_ins(data, owned * len(included))
    if len(own[1]) != owned * len(included) or (
        directions is not None and directions.canaries != len(included)
    ):
        raise DataError(
            f"there are {len(included)} coins, and another number of canaries that own {owned} records "
            "each: one coin puts all of a canary's records in or leaves them out."
        )
    whose = torch.arange(len(included)).repeat_interleave(owned)
    step = CanaryStep(
        WithCanaryIndex(model),
        ignoring_canary_index(per_sample),
        optimizer,
        plan,
        records=len(data[1]) + len(included) if units is None else None,
        units=None if units is None else replace(units, owners=_with_owners_of_canaries(units, whose)),
        randomness=Randomness(generator=generator, secure=secure),
        execution=Execution(physical_batch=physical_batch),
        views=None if views is None else _views_with_index(views),
        public=None if public is None else _with_index(public, torch.full((len(public[1]),), ORDINARY)),
    )
    step.directions = directions
    coins, ordinary = included.cpu(), len(data[1])
    who = torch.cat([torch.full((ordinary,), ORDINARY), whose])
    present = torch.cat([torch.full((ordinary,), others), coins[whose]])
    slots = tuple(torch.cat([a, b.to(a.device)]) for a, b in zip(data, own, strict=True))
    before = _losses(model, per_sample, own, owned) if directions is None else None
    scores = torch.zeros(len(included), dtype=torch.float64)
    for batch in step.batches(_with_index((slots[0], slots[1]), who), steps=steps, present=present):
        if step(batch) and directions is not None:
            assert step.update is not None
            scores += step.scores(directions, step.update).cpu()
        done()
    if before is not None:
        scores = (before - _losses(model, per_sample, own, owned)).cpu()
    return CanaryRun(scores=scores, charge=step.spent(delta), steps=step.steps)


class WithCanaryIndex(nn.Module):
    """The model on inputs with the number of their canary, which is passed on to the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, who: Tensor) -> tuple[Any, Tensor]:
        return self.model(inputs), who


def ignoring_canary_index(loss: Loss) -> Loss:
    """Per-sample loss of outputs with a canary's number, which does not enter."""

    def of_outputs(outputs: tuple[Any, Tensor], targets: Tensor) -> Tensor:
        return loss(outputs[0], targets)

    return of_outputs


class CanaryStep(PrivateStep):
    """Private step in which canaries with a direction have it for their per-sample gradient."""

    directions: Directions | None = None
    _basis_used: PublicBasis | None = None
    _traces: tuple[PublicBasis | None, Tensor] | None = None

    def scores(self, directions: Directions, update: Tensor) -> Tensor:
        """Inner product of an update with each canary's own clipped gradient."""
        if isinstance(directions, Spikes):
            return directions.scores(update)
        if self._traces is None or self._traces[0] is not self._basis_used:
            self._traces = self._basis_used, self._clipped_alone(directions)
        return self._traces[1] @ update

    def _clipped_alone(self, directions: Directions) -> Tensor:
        """Clipped gradient of each canary, with all of its coordinates, a row each."""
        rows = []
        for who in torch.arange(directions.canaries, device=self.device).split(1):
            alone = self._clip_canaries(directions, who, torch.ones_like(who), self._basis_used, None)
            flat = torch.cat([part.reshape(-1) for part in alone.total.values()])
            rows.append(flat if self._basis_used is None else self._basis_used.to_parameters(flat))
        return torch.stack(rows)

    def clip_physical_batch(
        self,
        inputs: Any,
        targets: Any,
        basis: PublicBasis | None,
        present: Tensor | None,
        counts: Tensor | None,
    ) -> ClippedSum:
        """Clipped sum of a physical batch, in which canaries with a direction have it for a gradient."""
        self._basis_used = basis
        directions = self.directions
        if directions is None or present is None:
            return super().clip_physical_batch(inputs, targets, basis, present, counts)
        who, mask = inputs[1], self.coordinate_mask()
        ordinary = present & (who == ORDINARY)
        parts = [super().clip_physical_batch(inputs, targets, basis, ordinary, counts)]
        canary = present & (who != ORDINARY)
        drawn, unit = who[canary], torch.arange(len(who), device=who.device)
        if counts is not None:
            unit = unit[: len(counts)].repeat_interleave(counts)
        owned = unit[canary].unique_consecutive(return_counts=True)[1]
        at_once = CHUNK_ENTRIES[self.device.type] // (self.dimension * max(owned.tolist(), default=1))
        groups = owned.split(max(1, at_once))
        parts += [
            self._clip_canaries(directions, some, few, basis, mask)
            for some, few in zip(drawn.split([int(few.sum()) for few in groups]), groups, strict=True)
            if len(some)
        ]
        total = {
            name: torch.stack([part.total[name] for part in parts]).sum(0) for name in parts[0].total
        }
        return ClippedSum(total=total, skipped=torch.stack([part.skipped for part in parts]).sum())

    def _clip_canaries(
        self,
        directions: Directions,
        who: Tensor,
        counts: Tensor,
        basis: PublicBasis | None,
        mask: CoordinateMask | None,
    ) -> ClippedSum:
        """Clipped sum of some canaries' gradients, all of them in.

        Args:
            directions: the gradients of the canaries' records.
            who: the canary that owns each record.
            counts: records of each unit, one after another in `who`.
            basis: as in `clip_physical_batch`.
            mask: likewise.
        """
        # beyond every bound, so that it is the clipping that holds them
        length = 2 * max(block.norm for block in self.plan.clipping.sensitivity(self.dimension))
        rows = directions.rows(who, length)
        trained = self.trainable()
        parts = rows.split([value.numel() for value in trained.values()], dim=1)
        terms = {
            name: Dense(part.reshape(len(who), *value.shape))
            for (name, value), part in zip(trained.items(), parts, strict=True)
        }
        records = GradientTape(dict(terms), self.device)
        tape: GradientTape | UnitTape = records
        if self.units is not None:
            tape = unit_tape(records, counts, self.units.reduction, None)
        return self.plan.clipping.clip(tape if basis is None else ProjectedTape(tape, basis), mask)


def _check_owned(owned: int, units: Units | None) -> int:
    checked = check_count("owned", owned, "a canary has one record at least", 1)
    if units is None and checked > 1:
        raise InvalidValue(
            f"owned={checked} and no units: where a record is the unit of privacy, a canary of several "
            "is several units, and finds more than the charge is for. Pass units=, or "
            "leave out owned.",
            key="owned",
        )
    return checked


def _with_owners_of_canaries(units: Units, whose: Tensor) -> Tensor:
    """Owners of the ordinary records and then of the canaries', as numbers."""
    ordinary = UnitTable.of(units.owners, 1)
    return torch.cat([ordinary.owners, len(ordinary) + whose])


def _with_index(records: Example, who: Tensor) -> tuple[Example, Tensor]:
    return (records[0], who.to(records[0].device)), records[1]


def _views_with_index(views: Views) -> Views:
    def expand(inputs: Example) -> Example:
        several = views(inputs[0])
        return several, inputs[1].expand(len(several))

    return expand


def _stand_ins(data: Example, canaries: int) -> Example:
    """Inputs for canaries that are directions: a selective test evaluates them."""
    some = torch.arange(canaries) % len(data[1])
    return data[0][some.to(data[0].device)], data[1][some.to(data[1].device)]


@torch.no_grad()
def _losses(model: nn.Module, loss: Loss, records: Example, owned: int) -> Tensor:
    """Mean loss of the records of each canary."""
    device = next(model.parameters()).device
    losses: Tensor = loss(model(records[0].to(device)), records[1].to(device)).double()
    return losses.reshape(-1, owned).mean(1)
