"""Thousands of independent runs in one private step: a record for each row of a table, and empty rows.

A record moves the numbers of its own row and no others, so each row is a run of the plan on one record;
clipping, draws and noise are those of the step, all in one call.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hush.clipping import L2, Box, Importance, Lp, Subspaces
from hush.core.plan import Plan
from hush.noise import BlockGaussian
from hush.training.noisy_mean import split_like
from hush.training.options import Execution, Randomness
from hush.training.step import PrivateStep
from hush_recipes.audit.scores import Draws

STRENGTH = 100.0
"""The length of a bare gradient in every coordinate: clipping decides what is left of it."""
_WRITTEN_OUT = 250
"""Rows at once where the step writes every gradient out: the work grows with their square."""


class Tables(nn.Module):
    """A row of numbers for each index, in blocks that are parameters of their own."""

    def __init__(self, rows: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Embedding(rows, width) for width in widths)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, index: Tensor) -> Tensor:
        return torch.cat([block(index) for block in self.blocks], 1)

    def rows(self, update: Tensor) -> Tensor:
        """Entries of a flat update that belong to each row."""
        return torch.cat(split_like(update, list(self.parameters())), 1)


def widths(plan: Plan, touched: int) -> tuple[int, ...]:
    """Number of the touched coordinates in each block of the clipping."""
    return tuple(block.dimension or touched for block in plan.clipping.sensitivity(touched))


def copied(plan: Plan, rows: int) -> Plan:
    """The plan for a table of rows, in each of which it does what `plan` does in one."""
    clipping, noise = plan.clipping, plan.noise
    if isinstance(clipping, Box):
        runs: Any = clipping.bounds
        clipping = Box(bounds=tuple((rows * count, bound) for count, bound in runs))
        if isinstance(noise, BlockGaussian):
            # its unit is the longest change of a block, which is sqrt(rows) times as long
            share = tuple(multiplier / math.sqrt(rows) for multiplier in noise.multipliers)
            noise = replace(noise, multipliers=share)
    elif isinstance(clipping, Subspaces):
        clipping = replace(clipping, ranks=tuple(rows * rank for rank in clipping.ranks))
    return replace(plan, clipping=clipping, noise=noise)


def factored(plan: Plan) -> bool:
    """Whether a step writes no gradient out: then it takes as many rows at once as there are."""
    return type(plan.clipping) in (L2, Lp, Importance) and plan.sampling.coordinate_participation == 1


def released(
    plan: Plan,
    *,
    touched: int = 1,
    runs: int = 10_000,
    steps: int = 1,
    others: int = 0,
    seed: int = 0,
) -> Draws:
    """The noisy sums of `steps` steps, a row of steps x `touched` numbers for each run.

    `others` more records are in every row, with the record and without, and push the same way; the
    opposite way where it is below 0.
    """
    rows = runs if factored(plan) else min(runs, _WRITTEN_OUT)
    rounds = -(-runs // rows)
    table = Tables(2 * rows, widths(plan, touched))
    around = torch.arange(2 * rows).repeat(abs(others))
    index = torch.cat([torch.arange(rows), around])
    signs = torch.cat([torch.ones(rows), math.copysign(1, others) * torch.ones(len(around))])
    step = PrivateStep(
        table,
        _pull,
        torch.optim.SGD(table.parameters(), lr=0.0),
        copied(plan, 2 * rows),
        records=len(index),
        randomness=Randomness(generator=torch.Generator().manual_seed(seed)),
        execution=Execution(physical_batch=len(index)),
    )
    sums = []
    for batch in step.batches((index, signs), steps=rounds * steps):
        step(batch)
        assert step.update is not None
        sums.append(table.rows(step.update) * plan.sampling.expected(len(index)))
    # rounds x steps x rows x touched -> runs x (steps, touched)
    by_run = torch.stack(sums).view(rounds, steps, 2, rows, touched).permute(2, 0, 3, 1, 4)
    present, absent = by_run.reshape(2, rounds * rows, steps * touched).numpy()
    return Draws(present=present, absent=absent)


def _pull(outputs: Tensor, signs: Tensor) -> Tensor:
    """A loss whose gradient is `STRENGTH` everywhere, times the record's sign."""
    return STRENGTH * signs * outputs.sum(1)
