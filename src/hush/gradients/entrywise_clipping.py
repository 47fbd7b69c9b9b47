"""Entrywise clipping: clips per-sample gradients to sensitivity sets and sums them.

One weight per record is not enough for sets that bound single entries or have several blocks. Records
are materialised in chunks. The first pass clips each record, the second masks sampled coordinates, and
the third sums the records. With a single set, terms that can be clamped in factored form are not
materialised.
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
    """Mixin for entrywise clipping of a tape with `norms` and `clamped_weighted_sum`."""

    def clip_entrywise(
        self: Any, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None = None
    ) -> ClippedSum:
        """Sum of the gradients, each clipped to the sensitivity sets and then masked.

        **Guarantee.** The contribution of each record lies in its set, up to rounding in single
        precision. A record whose gradient is not finite contributes zero. With a single set of largest
        entry m, a record of weight w contributes w clamp(g, -m / w, m / w).
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
    """Sum of the gradients, with each block clipped to its norm, clamped to its largest entry and
    masked.

    **Guarantee.** Same as `EntrywiseClipping.clip_entrywise`. A record whose coefficients in a public
    basis overflow also contributes zero.
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
    """Gradients of all parameters in new memory: (records, entries)."""
    return torch.cat([part.unsqueeze(-1).flatten(1) for part in gradients.values()], 1)
