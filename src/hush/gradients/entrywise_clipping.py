"""Clipping that bounds single entries: per-sample gradients clipped into sensitivity sets and summed.

For sets with a cap on entries, or of several blocks, one weight per record is not enough. A chunk of
records is materialised at once: one pass clips each record, one masks sampled coordinates, and one sums
the records. In a single set, terms that can be clamped in factored form are not materialised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hush.clipping.norms import clipping_weights
from hush.core.parts import ClippedSum, CoordinateMask, SensitivitySet
from hush.gradients.precision import full_precision, vector_norms
from hush.gradients.terms import zero_rows


class EntrywiseClipping:
    """Entrywise clipping, for a tape with `norms` and `clamped_weighted_sum`."""

    def clip_entrywise(
        self: Any, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None = None
    ) -> ClippedSum:
        """Sum of the gradients, each clipped to the sensitivity sets and then masked.

        **Guarantee.** A record's addend lies in its set, up to rounding in single precision; a record
        with a gradient that is not finite adds zero. In a single set with largest entry m, a record of
        weight w adds w clamp(g, -m / w, m / w).
        """
        if len(sensitivity) > 1:
            return clip_blocks(self, sensitivity, mask)
        (only,) = sensitivity
        norms = self.norms(2.0)
        finite = norms.isfinite()
        weights = clipping_weights(only.norm, norms) if only.p == 2 else finite.to(norms.dtype)
        total = self.clamped_weighted_sum(weights, only.max_entry / weights, mask)
        return ClippedSum(total=total, skipped=(~finite).sum())


def clip_blocks(
    tape: Any, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None
) -> ClippedSum:
    """The sum of the gradients, with each block scaled by its own norm, clamped to its own largest entry
    and then masked.

    **Guarantee.** As of `EntrywiseClipping`. A record also adds zero if its coefficients in a public
    basis overflow.
    """
    sizes = [block.dimension or 0 for block in sensitivity]
    limits = torch.tensor([block.max_entry for block in sensitivity], dtype=torch.float64)
    limits = limits.repeat_interleave(torch.tensor(sizes)).to(tape.device)
    finite = tape.norms(2.0).isfinite()
    skipped = (~finite).sum()
    with full_precision(tape.device):
        total: dict[str, Tensor] = tape.zeros()
        for rows, gradients in tape.chunks():
            flat = flat_rows(gradients)
            whole = flat.isfinite().all(1)
            skipped = skipped + (finite[rows] & ~whole).sum()
            keep = whole & finite[rows]
            flat = flat if bool(keep.all()) else zero_rows(flat, keep)
            for block, part in zip(sensitivity, flat.split(sizes, 1), strict=True):
                if block.p == 2:
                    part.mul_(clipping_weights(block.norm, vector_norms(part, 2.0))[:, None])
            flat.clamp_(-limits.to(flat.dtype), limits.to(flat.dtype))
            if mask is not None:
                flat = mask(flat)
            summed = flat.sum(0, dtype=torch.float64).split([part.numel() for part in total.values()])
            for part, addend in zip(total.values(), summed, strict=True):
                part += addend.view_as(part)
    return ClippedSum(total=total, skipped=skipped)


def flat_rows(gradients: Mapping[str, Tensor]) -> Tensor:
    """The gradients of all parameters, one record a row, in new memory."""
    return torch.cat([part.unsqueeze(-1).flatten(1) for part in gradients.values()], 1)
