"""Clipping thresholds from the norms of public gradients in each block of coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.clipping.norms import NORM
from hush.core.errors import DataError
from hush.core.ranges import Range
from hush.gradients.checks.models import per_sample_loss
from hush.gradients.precision import vector_norms
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import Loss, record
from hush.gradients.tree import tree_map
from hush.training.data import Data, count, take

_AT_ONCE = 64
QUANTILE = Range(above=0, below=1, why="it is a share of the records", example=0.99)


@dataclass(frozen=True, kw_only=True, eq=False)
class Norms:
    """Per-sample gradient norms in each block: (records, blocks), in double precision."""

    l2: Tensor
    linf: Tensor

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, data: Data, frame: PublicBasis | None = None) -> "Norms":
        """Gradient norms at the present weights; one block, the whole gradient, without a basis.

        As sensitive as the records.
        """
        device = next(model.parameters()).device
        found = []
        for indices in torch.arange(count(data)).split(_AT_ONCE):
            inputs, targets = tree_map(take(data, indices), lambda value: value.to(device))
            tape = record(model, per_sample_loss(loss), inputs, targets)
            if frame is None:
                found.append(torch.stack([tape.norms(2.0), tape.norms(torch.inf)])[:, :, None])
                continue
            norms = torch.empty(2, len(indices), len(frame.sizes), device=device)
            for rows, blocks in ProjectedTape(tape, frame).chunks():
                for order, part in zip((2.0, torch.inf), norms, strict=True):
                    part[rows] = torch.stack(
                        [vector_norms(b, order) for b in blocks.values()], 1
                    ).float()
            found.append(norms)
        l2, linf = torch.cat(found, 1).to("cpu", torch.float64)
        return cls(l2=l2, linf=linf)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Clipping norms of each block: l2 first, then of every entry."""

    l2: tuple[float, ...]
    linf: tuple[float, ...]


def public_thresholds(norms: Norms, *, norm: float, quantile: float = 0.99) -> Thresholds:
    """Block thresholds of total l2 norm `norm`, in proportion to the expected norms of public gradients.

    A block gets its expected norm, all of them scaled so that their squares add up to `norm` squared;
    the largest entry is the `quantile` over the records, once clipped to that. `norms` must be those
    of public records, and of others than those the frame was made of: the frame fits its own records,
    and leaves nothing over of them where they are no more than its ranks.
    """
    norm = NORM["range"].check("norm", norm)
    quantile = QUANTILE.check("quantile", quantile)
    usable = norms.l2.isfinite().all(1) & norms.linf.isfinite().all(1)
    l2, linf = norms.l2[usable], norms.linf[usable]
    expected = l2.mean(0) if len(l2) else torch.zeros(norms.l2.shape[1], dtype=torch.float64)
    bounds = norm * expected / expected.norm().clamp(min=torch.finfo(torch.float64).tiny)
    if not bool((bounds >= 1e-6 * norm).all()):
        raise DataError(
            f"the public gradients have expected norms of {_listed(expected.tolist())} in the blocks: "
            "one is as good as zero, and clipping to it would cut that part off every private "
            "gradient. Measure public records that the frame was not made of, or lower the ranks."
        )
    clipped = linf * (bounds / l2.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
    largest = clipped.quantile(quantile, dim=0).clamp(min=1e-12).minimum(bounds)
    return Thresholds(l2=tuple(bounds.tolist()), linf=tuple(largest.tolist()))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
