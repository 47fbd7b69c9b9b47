"""Clipping that bounds single entries: per-sample gradients clipped into sensitivity sets and summed.

For sets with a cap on entries or of several blocks, where a weight for each record is not enough. Up to
a chunk of records is materialised at once: one pass clips each record, one masks sampled coordinates,
and one sums the records. In a single set, terms that need not be materialised are not.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hush.clipping.norms import clipping_weights
from hush.core.errors import Unsupported
from hush.core.parts import ClippedSum, CoordinateMask, SensitivitySet
from hush.gradients.precision import full_precision, vector_norms
from hush.gradients.terms import zero_rows


class MaterialisableTape(Protocol):
    """A tape whose per-sample gradients can be materialised."""

    @property
    def device(self) -> torch.device: ...

    def norms(self, order: float) -> Tensor: ...

    def zeros(self) -> dict[str, Tensor]: ...

    def chunks(self) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]: ...


class ClampableTape(MaterialisableTape, Protocol):
    """A tape that can also clamp every entry to a limit of its record."""

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]: ...


class EntrywiseClipping:
    """Entrywise clipping, for a `ClampableTape`."""

    def clip_entrywise(
        self: ClampableTape, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None = None
    ) -> ClippedSum:
        """The sum of the gradients, each clipped into the sensitivity sets, and then masked.

        Args:
            sensitivity: sets of consecutive coordinates; a single one is of all of them.
            mask: zeroes coordinates at random, for plans that sample them.
        """
        if len(sensitivity) == 1:
            return clip_sum(self, sensitivity[0], mask)
        return clip_blocks(self, sensitivity, mask)


def clip_sum(
    tape: ClampableTape, sensitivity: SensitivitySet, mask: CoordinateMask | None
) -> ClippedSum:
    """The sum of the gradients, each scaled to the set's Euclidean norm, clamped to its largest entry,
    and then masked.

    **Guarantee.** What one record adds lies in the set, up to rounding in single precision; a record
    whose gradient is not finite adds nothing. One scaled by w adds w clamp(g, -m / w, m / w), m the
    largest entry of the set.
    """
    norms = tape.norms(2.0)
    euclidean = sensitivity.p == 2
    weights = (
        clipping_weights(sensitivity.norm, norms) if euclidean else norms.isfinite().to(norms.dtype)
    )
    total = tape.clamped_weighted_sum(weights, sensitivity.max_entry / weights, mask)
    if sensitivity.dimension is not None:
        _check_covered(total, sensitivity.dimension)
    return ClippedSum(total=total, skipped=(~norms.isfinite()).sum())


def clip_blocks(
    tape: MaterialisableTape, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None
) -> ClippedSum:
    """The sum of the gradients, each block of them scaled by its own norm and clamped to its own largest
    entry, and then masked.

    **Guarantee.** What one record adds lies in the sets, up to rounding in single precision; a record
    whose gradient, or what the tape writes for it, is not finite adds nothing. Coefficients in a public
    basis may overflow where the gradient does not.
    """
    with full_precision(tape.device):
        total = tape.zeros()
    ends = list(itertools.accumulate(block.dimension or 0 for block in sensitivity))
    _check_covered(total, ends[-1])
    euclidean = [
        (end - (block.dimension or 0), end, block.norm)
        for block, end in zip(sensitivity, ends, strict=True)
        if block.p == 2
    ]
    limits = _entry_limits(sensitivity, tape.device)
    finite = tape.norms(2.0).isfinite()
    skipped = (~finite).sum()
    with full_precision(tape.device):
        for rows, gradients in tape.chunks():
            flat = flat_rows(gradients)
            whole = flat.isfinite().all(1)
            skipped = skipped + (finite[rows] & ~whole).sum()
            keep = whole & finite[rows]
            flat = flat if bool(keep.all()) else zero_rows(flat, keep)
            for start, end, norm in euclidean:
                part = flat[:, start:end]
                part.mul_(clipping_weights(norm, vector_norms(part, 2.0))[:, None])
            flat.clamp_(-limits.to(flat.dtype), limits.to(flat.dtype))
            if mask is not None:
                flat = mask(flat)
            summed = flat.sum(0, dtype=torch.float64).split([part.numel() for part in total.values()])
            for part, addend in zip(total.values(), summed, strict=True):
                part += addend.view_as(part)
    return ClippedSum(total=total, skipped=skipped)


def _check_covered(total: dict[str, Tensor], bounded: int) -> None:
    width = sum(part.numel() for part in total.values())
    if bounded != width:
        raise Unsupported(
            f"the clipping bounds {bounded} numbers and a gradient has {width}: what is in no block "
            "would not be bounded, nor hidden. Make the blocks add up to the number of parameters."
        )


def flat_rows(gradients: Mapping[str, Tensor]) -> Tensor:
    """The gradients of all parameters, one record a row, in memory of their own."""
    return torch.cat([part.unsqueeze(-1).flatten(1) for part in gradients.values()], 1)


def _entry_limits(sensitivity: Sequence[SensitivitySet], device: torch.device) -> Tensor:
    """The largest absolute value of each coordinate."""
    limits = torch.tensor([block.max_entry for block in sensitivity], dtype=torch.float64)
    sizes = torch.tensor([block.dimension or 0 for block in sensitivity])
    return limits.repeat_interleave(sizes).to(device)
