"""Gradients held in a sensitivity set number by number, and summed, a few records at a time.

What is written out lives as long as a chunk of the tape: one pass holds each record back, one thins
it where coordinates are sampled, and one adds the records up.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hush.clipping.lp import weights_within
from hush.core.ball import Ball
from hush.core.errors import Unsupported
from hush.core.tape import ClippedSum, Thinning
from hush.gradients.exact import exactly
from hush.gradients.terms import being_captured, vector_norms


class Written(Protocol):
    """A tape that can be written out."""

    @property
    def device(self) -> torch.device: ...

    def norms(self, order: float) -> Tensor: ...

    def nothing(self) -> dict[str, Tensor]: ...

    def chunks(self) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]: ...


def within(
    tape: Written, balls: Sequence[Ball], thin: Thinning | None, counts: Tensor | None = None
) -> ClippedSum:
    """The sum of the gradients, each held in the balls and then thinned.

    **Guarantee.** What one record adds lies in the balls, up to rounding in single precision; a record
    whose gradient is not finite adds nothing. With `counts`, of a single ball, records where it is 0
    are left out.
    """
    norms = tape.norms(2.0)
    with exactly(tape.device):
        total = tape.nothing()
        if len(balls) == 1:
            _add_scaled(total, tape, balls[0], norms, thin, counts)
        else:
            _add_blocks(total, tape, balls, norms.isfinite(), thin)
    return ClippedSum(total=total, skipped=(~norms.isfinite()).sum())


def _add_scaled(
    total: dict[str, Tensor],
    tape: Written,
    ball: Ball,
    norms: Tensor,
    thin: Thinning | None,
    counts: Tensor | None,
) -> None:
    """One ball of everything: scale to its Euclidean norm, then cut off at its largest number.

    A record scaled by w adds w min(max(g, -top / w), top / w): scaling is part of adding up.
    """
    weights = weights_within(ball.norm, norms) if ball.p == 2 else norms.isfinite().to(norms.dtype)
    if counts is not None:
        weights = weights * counts.to(weights.dtype)
    # replayed, every record is finite: one of weight 0 is cut off nowhere, and adds zero
    every = being_captured() or bool(weights.all())
    for rows, written in tape.chunks():
        weight = weights[rows]
        some = slice(None) if every else weight > 0
        weight = weight[some]
        limits = (ball.top / weight)[:, None]
        for name, values in written.items():
            held = values[some].flatten(1).clamp(-limits, limits)
            if thin is not None:
                held = thin(held)
            total[name] += (weight.to(held.dtype) @ held).view_as(total[name])


def _add_blocks(
    total: dict[str, Tensor], tape: Written, balls: Sequence[Ball], finite: Tensor, thin: Thinning | None
) -> None:
    """Several blocks: each is scaled by its own norm and cut off at its own largest number."""
    ends = list(itertools.accumulate(ball.dimension or 0 for ball in balls))
    width = sum(part.numel() for part in total.values())
    if ends[-1] != width:
        raise Unsupported(
            f"the clipping bounds {ends[-1]} numbers and a gradient has {width}: what is in no block "
            "would not be bounded, nor hidden. Make the blocks add up to the number of parameters."
        )
    round_ones = [
        (end - (ball.dimension or 0), end, ball.norm)
        for ball, end in zip(balls, ends, strict=True)
        if ball.p == 2
    ]
    limits = _limits(balls, tape.device)
    every = bool(finite.all())
    for rows, written in tape.chunks():
        flat = torch.cat([values.flatten(1) for values in written.values()], dim=1)
        flat = flat if every else flat[finite[rows]]
        for start, end, norm in round_ones:
            part = flat[:, start:end]
            part.mul_(weights_within(norm, vector_norms(part, 2.0))[:, None])
        flat.clamp_(-limits.to(flat.dtype), limits.to(flat.dtype))
        if thin is not None:
            flat = thin(flat)
        summed = flat.sum(0).split([part.numel() for part in total.values()])
        for part, addend in zip(total.values(), summed, strict=True):
            part += addend.view_as(part)


def _limits(balls: Sequence[Ball], device: torch.device) -> Tensor:
    """The most that each number may be."""
    tops = torch.tensor([ball.top for ball in balls], dtype=torch.float64)
    sizes = torch.tensor([ball.dimension or 0 for ball in balls])
    return tops.repeat_interleave(sizes).to(device)
