"""Gradients held in a sensitivity set number by number, and summed, a few records at a time.

What is written out lives as long as a chunk of the tape: one pass holds each record back, one thins
it where coordinates are sampled, and one adds the records up. In a single ball, what need not be
written out is not.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hush.clipping.norms import weights_within
from hush.core.errors import Unsupported
from hush.core.sensitivity import SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.precision import full_precision
from hush.gradients.terms import vector_norms, zero_rows


class Materialisable(Protocol):
    """A tape that can be written out."""

    @property
    def device(self) -> torch.device: ...

    def norms(self, order: float) -> Tensor: ...

    def zeros(self) -> dict[str, Tensor]: ...

    def chunks(self) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]: ...


class Clampable(Protocol):
    """A tape that can cut off every number at a limit of its record."""

    def norms(self, order: float) -> Tensor: ...

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> dict[str, Tensor]: ...


def clip_sum(tape: Clampable, ball: SensitivitySet, thin: CoordinateMask | None) -> ClippedSum:
    """The sum of the gradients, each scaled to the ball's Euclidean norm, cut off at its largest
    number, and then thinned.

    **Guarantee.** What one record adds lies in the ball, up to rounding in single precision; a record
    whose gradient is not finite adds nothing. One scaled by w adds w min(max(g, -top / w), top / w).
    """
    norms = tape.norms(2.0)
    weights = weights_within(ball.norm, norms) if ball.p == 2 else norms.isfinite().to(norms.dtype)
    total = tape.clamped_weighted_sum(weights, ball.max_entry / weights, thin)
    if ball.dimension is not None:
        _check_covered(total, ball.dimension)
    return ClippedSum(total=total, skipped=(~norms.isfinite()).sum())


def clip_blocks(
    tape: Materialisable, balls: Sequence[SensitivitySet], thin: CoordinateMask | None
) -> ClippedSum:
    """The sum of the gradients, each block of them scaled by its own norm and cut off at its own largest
    number, and then thinned.

    **Guarantee.** What one record adds lies in the balls, up to rounding in single precision; a record
    whose gradient is not finite adds nothing.
    """
    with full_precision(tape.device):
        total = tape.zeros()
    ends = list(itertools.accumulate(ball.dimension or 0 for ball in balls))
    _check_covered(total, ends[-1])
    round_ones = [
        (end - (ball.dimension or 0), end, ball.norm)
        for ball, end in zip(balls, ends, strict=True)
        if ball.p == 2
    ]
    limits = _limits(balls, tape.device)
    finite = tape.norms(2.0).isfinite()
    every = bool(finite.all())
    with full_precision(tape.device):
        for rows, written in tape.chunks():
            flat = flat_rows(written)
            flat = flat if every else zero_rows(flat, finite[rows])
            for start, end, norm in round_ones:
                part = flat[:, start:end]
                part.mul_(weights_within(norm, vector_norms(part, 2.0))[:, None])
            flat.clamp_(-limits.to(flat.dtype), limits.to(flat.dtype))
            if thin is not None:
                flat = thin(flat)
            summed = flat.sum(0, dtype=torch.float64).split([part.numel() for part in total.values()])
            for part, addend in zip(total.values(), summed, strict=True):
                part += addend.view_as(part)
    return ClippedSum(total=total, skipped=(~finite).sum())


def _check_covered(total: dict[str, Tensor], bounded: int) -> None:
    width = sum(part.numel() for part in total.values())
    if bounded != width:
        raise Unsupported(
            f"the clipping bounds {bounded} numbers and a gradient has {width}: what is in no block "
            "would not be bounded, nor hidden. Make the blocks add up to the number of parameters."
        )


def flat_rows(written: Mapping[str, Tensor]) -> Tensor:
    """The gradients of all parameters, one record a row, in memory of their own."""
    return torch.cat([part.unsqueeze(-1).flatten(1) for part in written.values()], 1)


def _limits(balls: Sequence[SensitivitySet], device: torch.device) -> Tensor:
    """The most that each number may be."""
    tops = torch.tensor([ball.max_entry for ball in balls], dtype=torch.float64)
    sizes = torch.tensor([ball.dimension or 0 for ball in balls])
    return tops.repeat_interleave(sizes).to(device)
