"""Canaries: the auditor's records, whose gradients leave as clear a trace as clipping allows."""

from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from hush.core.errors import DataError, InvalidValue
from hush.core.plan import Plan
from hush.core.value import check_count
from hush.gradients.recording import record
from hush.gradients.tree import Loss
from hush.training.data import Data, count, take

_QUIET_RECORDS = 512
"""Records whose gradients say which coordinates are quiet."""


class Directions(Protocol):
    """Gradients of canaries: one direction each, of any length beyond the clipping norm."""

    @property
    def canaries(self) -> int: ...

    def rows(self, who: Tensor, length: float) -> Tensor:
        """Gradients of these canaries, one a row, with entries of 0 or up to `length`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spikes:
    """Each canary has a coordinate of its own (a Dirac gradient)."""

    coordinates: Tensor
    dimension: int

    @property
    def canaries(self) -> int:
        return len(self.coordinates)

    def rows(self, who: Tensor, length: float) -> Tensor:
        gradients = torch.zeros(len(who), self.dimension, device=self.coordinates.device)
        return gradients.scatter_(1, self.coordinates[who][:, None], length)

    def scores(self, update: Tensor) -> Tensor:
        """Inner product of an update with the direction of each canary."""
        return update[self.coordinates].double()


@dataclass(frozen=True, kw_only=True, eq=False)
class Signs:
    """Each canary pulls at every coordinate, up or down by chance: it fills any box and any block."""

    signs: Tensor
    """A row of -1 and 1 for each canary, as bytes."""

    @property
    def canaries(self) -> int:
        return len(self.signs)

    def rows(self, who: Tensor, length: float) -> Tensor:
        return self.signs[who].float().mul_(length)


def directions_for(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    data: Data,
    canaries: int,
    generator: torch.Generator,
) -> Directions:
    """Directions that reach the edge of what the plan's clipping allows.

    One coordinate does where only the length is bounded, by an l_p norm with p <= 2: then canaries sit
    on the coordinates that other records move least, as the auditor knows those. Where single
    coordinates or blocks are bounded, or p > 2, a record that pulls at all of them is the worst.
    """
    canaries = check_count("canaries", canaries, "they are counted", at_least=1)
    trained = [value for value in model.parameters() if value.requires_grad]
    dimension, device = sum(value.numel() for value in trained), trained[0].device
    blocks = plan.clipping.sensitivity(dimension)
    if len(blocks) == 1 and blocks[0].p <= 2 and blocks[0].cap is None:
        if canaries > dimension:
            raise InvalidValue(
                f"canaries={canaries} must be at most the {dimension} numbers that are trained: each "
                f"has one of its own. Pass e.g. canaries={dimension // 2 or 1}.",
                key="canaries",
            )
        coordinates = quietness(model, loss, data).argsort()[:canaries]
        return Spikes(coordinates=coordinates, dimension=dimension)
    coins = torch.randint(0, 2, (canaries, dimension), generator=generator, dtype=torch.int8)
    return Signs(signs=coins.mul_(2).sub_(1).to(device))


def quietness(model: nn.Module, loss: Loss, data: Data) -> Tensor:
    """Mean absolute per-sample gradient of the first records, by coordinate, at the present weights."""
    some = torch.arange(min(_QUIET_RECORDS, count(data)))
    device = next(model.parameters()).device
    inputs, targets = take(data, some)
    tape = record(model, loss, inputs.to(device), targets.to(device))
    sums = (
        torch.cat([part.abs().sum(0).reshape(-1) for part in gradients.values()])
        for _, gradients in tape.chunks()
    )
    return reduce(torch.add, sums) / len(some)


def mislabelled(
    inputs: Tensor, targets: Tensor, canaries: int, classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random records with a wrong label each, as canaries.

    Canaries in input space: what a model knows of them it knows by heart.
    """
    canaries = check_count("canaries", canaries, "they are counted", at_least=1)
    if canaries > len(targets):
        raise DataError(
            f"{canaries} canaries are to be made of {len(targets)} records: the same one twice would be "
            f"one canary in two places. Pass at most {len(targets)}."
        )
    some = torch.randperm(len(targets), generator=generator)[:canaries].to(targets.device)
    moved = torch.randint(1, classes, (canaries,), generator=generator).to(targets.device)
    return inputs[some.to(inputs.device)], (targets[some] + moved) % classes
