"""Private training runs with canaries, which are records inserted by the auditor.

An excluded canary leaves its slot empty.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import Guarantee
from hush.core.parts import ClippedSum, CoordinateMask
from hush.core.plan import Plan
from hush.gradients.losses import per_sample_loss
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import record
from hush.gradients.tape import GradientTape, UnitTape, unit_tape
from hush.gradients.terms import CHUNK_ENTRIES, Dense
from hush.gradients.tree import Loss, Views
from hush.training.data import Data, count, take
from hush.training.options import Execution, Randomness, Units
from hush.training.step import PrivateStep
from hush.training.units import UnitTable

ORDINARY = -1
"""Canary index of ordinary records."""
_QUIET_RECORDS = 512  # number of records used to find coordinates with small gradients
Example = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spikes:
    """Canary gradients with a single non-zero coordinate each (Dirac canaries)."""

    coordinates: Tensor
    dimension: int

    @property
    def canaries(self) -> int:
        return len(self.coordinates)

    def rows(self, who: Tensor, length: float) -> Tensor:
        gradients = torch.zeros(len(who), self.dimension, device=self.coordinates.device)
        return gradients.scatter_(1, self.coordinates[who][:, None], length)


@dataclass(frozen=True, kw_only=True, eq=False)
class Signs:
    """Canary gradients with a random sign at each coordinate, for box and block clipping."""

    signs: Tensor
    """One row of -1 and 1 per canary, as bytes."""

    @property
    def canaries(self) -> int:
        return len(self.signs)

    def rows(self, who: Tensor, length: float) -> Tensor:
        return self.signs[who].float().mul_(length)


Directions = Spikes | Signs
"""Canary gradients, with norms above the clipping norm."""


def directions_for(
    plan: Plan, model: nn.Module, loss: Loss, data: Data, canaries: int, generator: torch.Generator
) -> Directions:
    """Canary gradients with the largest influence under the clipping rule of `plan`.

    Returns:
        `Spikes` for l_p clipping with p <= 2, at the coordinates where the gradients of other records
        are smallest; otherwise `Signs`.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    dimension, device = sum(value.numel() for value in trained), trained[0].device
    blocks = plan.clipping.sensitivity(dimension)
    if len(blocks) == 1 and blocks[0].p <= 2 and blocks[0].cap is None:
        if canaries > dimension:
            raise InvalidValue(
                f"canaries={canaries} must be at most the number of parameters, {dimension}. "
                f"Pass e.g. canaries={dimension // 2 or 1}.",
                key="canaries",
            )
        some = torch.arange(min(_QUIET_RECORDS, count(data)))
        tape = record(model, loss, *(part.to(device) for part in take(data, some)))
        sums = (
            torch.cat([part.abs().sum(0).reshape(-1) for part in gradients.values()])
            for _, gradients in tape.chunks()
        )
        coordinates = (reduce(torch.add, sums) / len(some)).argsort()[:canaries]
        return Spikes(coordinates=coordinates, dimension=dimension)
    coins = torch.randint(0, 2, (canaries, dimension), generator=generator, dtype=torch.int8)
    return Signs(signs=coins.mul_(2).sub_(1).to(device))


def mislabelled(
    inputs: Tensor, targets: Tensor, canaries: int, classes: int, generator: torch.Generator
) -> Example:
    """Random records with wrong labels, which a model can only fit by memorisation."""
    some = torch.randperm(len(targets), generator=generator)[:canaries].to(targets.device)
    moved = torch.randint(1, classes, (len(some),), generator=generator).to(targets.device)
    return inputs[some.to(inputs.device)], (targets[some] + moved) % classes


@dataclass(frozen=True, kw_only=True, eq=False)
class CanaryRun:
    """Scores of the canaries of one run, and its guarantee."""

    scores: Tensor
    """Score of each canary. A larger score suggests inclusion. Scores are as sensitive as the coins."""
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
    physical_batch: int | None = None,
    views: Views | None = None,
    public: Example | None = None,
    units: Units | None = None,
    owned: int = 1,
    done: Callable[[], None] = lambda: None,
) -> CanaryRun:
    """Train with the canaries that `included` selects, and score all canaries.

    If `units` is given, a canary is a user, and one coin includes all its records. The other arguments
    are those of `PrivateStep`, `Randomness` and `Execution`.

    Args:
        plan: Plan of the run.
        data: Ordinary records.
        canaries: Canary records (consecutive for each user), scored by the decrease of their loss; or
            `Spikes` or `Signs`, scored by the inner product of clipped gradients and updates.
        included: Result of a fair coin flip for each canary.
        delta: Delta of the reported guarantee.
        others: Whether ordinary records take part. The audit is stronger without them.
        units: User ids of the ordinary records.
        owned: Number of records per canary.
        done: Callback after each step.
    """
    per_sample = per_sample_loss(loss)
    directions = None if isinstance(canaries, tuple) else canaries
    if units is None and owned > 1:
        raise InvalidValue(
            f"owned={owned} needs units: without user-level privacy, several records are several units "
            "of privacy. Pass units=, or omit owned.",
            key="owned",
        )
    coins, number, ordinary = included.cpu(), len(included), len(data[1])
    # canary gradients have no inputs; a selective test evaluates them on ordinary inputs
    some = torch.arange(owned * number) % ordinary
    own = canaries if isinstance(canaries, tuple) else take(data, some)
    if len(own[1]) != owned * number or (directions and directions.canaries != number):
        raise DataError(
            f"included has {number} coins, which is not the number of canaries with {owned} records "
            "each. Pass one coin per canary."
        )
    whose = torch.arange(number).repeat_interleave(owned)
    if units is not None:
        table = UnitTable.of(units.owners, 1)
        units = replace(units, owners=torch.cat([table.owners, len(table) + whose]))
    step = CanaryStep(
        WithCanaryIndex(model),
        lambda outputs, targets: per_sample(outputs[0], targets),
        optimizer,
        plan,
        records=ordinary + number if units is None else None,
        units=units,
        randomness=Randomness(generator=generator),
        execution=Execution(physical_batch=physical_batch),
        views=None if views is None else _views_with_index(views),
        public=None if public is None else _with_index(public, torch.full((len(public[1]),), ORDINARY)),
    )
    step.directions = directions
    who = torch.cat([torch.full((ordinary,), ORDINARY), whose])
    present = torch.cat([torch.full((ordinary,), others), coins[whose]])
    slots = [torch.cat([a, b.to(a.device)]) for a, b in zip(data, own, strict=True)]
    before = None if directions else _losses(model, per_sample, own, owned)
    scores = torch.zeros(number, dtype=torch.float64)
    for batch in step.batches(_with_index((slots[0], slots[1]), who), steps=steps, present=present):
        if step(batch) and directions:
            assert step.update is not None
            scores += step.scores(directions, step.update).cpu()
        done()
    if before is not None:
        scores = (before - _losses(model, per_sample, own, owned)).cpu()
    return CanaryRun(scores=scores, charge=step.spent(delta), steps=step.steps)


class WithCanaryIndex(nn.Module):
    """Wrapper of a model that passes the canary index of each input to the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, who: Tensor) -> tuple[Any, Tensor]:
        return self.model(inputs), who


class CanaryStep(PrivateStep):
    """Private step with canary gradients in place of the per-sample gradients of canaries."""

    directions: Directions | None = None
    _basis_used: PublicBasis | None = None
    _traces: tuple[PublicBasis | None, Tensor] | None = None

    def scores(self, directions: Directions, update: Tensor) -> Tensor:
        """Inner product of an update with each canary's clipped gradient."""
        if isinstance(directions, Spikes):
            return update[directions.coordinates].double()
        basis = self._basis_used
        if self._traces is None or self._traces[0] is not basis:
            rows = []
            for who in torch.arange(directions.canaries, device=self.device).split(1):
                alone = self._clip_canaries(directions, who, torch.ones_like(who), basis, None)
                flat = torch.cat([part.reshape(-1) for part in alone.total.values()])
                rows.append(flat if basis is None else basis.to_parameters(flat))
            self._traces = basis, torch.stack(rows)
        return self._traces[1] @ update

    def clip_physical_batch(
        self,
        inputs: Any,
        targets: Any,
        basis: PublicBasis | None,
        present: Tensor | None,
        counts: Tensor | None,
    ) -> ClippedSum:
        self._basis_used, directions = basis, self.directions
        if directions is None or present is None:
            return super().clip_physical_batch(inputs, targets, basis, present, counts)
        who, mask = inputs[1], self.coordinate_mask()
        is_ordinary = who == ORDINARY
        parts = [super().clip_physical_batch(inputs, targets, basis, present & is_ordinary, counts)]
        canary = present & ~is_ordinary
        unit = torch.arange(len(who), device=who.device)
        if counts is not None:
            unit = unit[: len(counts)].repeat_interleave(counts)
        owned = unit[canary].unique_consecutive(return_counts=True)[1]
        at_once = CHUNK_ENTRIES[self.device.type] // (self.dimension * max(owned.tolist(), default=1))
        groups = owned.split(max(1, at_once))
        drawn = who[canary].split([int(few.sum()) for few in groups])
        parts += [
            self._clip_canaries(directions, some, few, basis, mask)
            for some, few in zip(drawn, groups, strict=True)
            if len(some)
        ]
        sums = {name: [part.total[name] for part in parts] for name in parts[0].total}
        return ClippedSum(
            total={name: torch.stack(each).sum(0) for name, each in sums.items()},
            skipped=torch.stack([part.skipped for part in parts]).sum(),
        )

    def _clip_canaries(
        self,
        directions: Directions,
        who: Tensor,
        counts: Tensor,
        basis: PublicBasis | None,
        mask: CoordinateMask | None,
    ) -> ClippedSum:
        """Clipped sum of the gradients of the canaries `who`; `counts` are the records per user."""
        # above every bound, so all canary gradients are clipped
        length = 2 * max(block.norm for block in self.plan.clipping.sensitivity(self.dimension))
        trained = self.trainable()
        parts = directions.rows(who, length).split([value.numel() for value in trained.values()], dim=1)
        records = GradientTape(
            {
                name: Dense(part.reshape(len(who), *value.shape))
                for (name, value), part in zip(trained.items(), parts, strict=True)
            },
            self.device,
        )
        tape: GradientTape | UnitTape = records
        if self.units is not None:
            tape = unit_tape(records, counts, self.units.reduction, None)
        return self.plan.clipping.clip(tape if basis is None else ProjectedTape(tape, basis), mask)


def _with_index(records: Example, who: Tensor) -> tuple[Example, Tensor]:
    return (records[0], who.to(records[0].device)), records[1]


def _views_with_index(views: Views) -> Views:
    def expand(inputs: Example) -> Example:
        several = views(inputs[0])
        return several, inputs[1].expand(len(several))

    return expand


@torch.no_grad()
def _losses(model: nn.Module, loss: Loss, records: Example, owned: int) -> Tensor:
    """Mean loss of the records of each canary."""
    device = next(model.parameters()).device
    losses: Tensor = loss(model(records[0].to(device)), records[1].to(device)).double()
    return losses.reshape(-1, owned).mean(1)
