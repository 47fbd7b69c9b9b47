"""Clipping thresholds of blocks from the gradient norms of public records."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.clipping.blocks import Principal, Subspaces
from hush.clipping.norms import NORM
from hush.core.errors import DataError
from hush.gradients.precision import vector_norms
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.tree import Loss
from hush.training.data import Data, count, take
from hush.training.methods.public_bases import principal_basis, tapes
from hush.training.methods.statistics import QUANTILE

_FOR_BASES = 0.6
"""Share of the public records that the basis is computed from; the others are measured."""


def public_thresholds(
    model: nn.Module,
    loss: Loss,
    public: Data,
    *,
    ranks: Sequence[int],
    norm: float,
    bases: Principal,
    entries: bool = False,
    quantile: float = 0.99,
) -> Subspaces:
    """Clipping in principal subspaces with thresholds from the gradients of public records.

    The first 60% of the public records give a basis, the others the expected norm in each of its blocks.
    Thresholds are in proportion to these norms. They cost no privacy.

    Args:
        model: Model at the weights that training starts from.
        loss: Loss of a record.
        public: Inputs and targets that need no protection and are not in the private set.
        ranks: Rank of each subspace, then of the residual; they add up to the number of parameters.
        norm: Euclidean norm of all thresholds together.
        bases: Principal directions; see `Principal`.
        entries: Also bound each coefficient.
        quantile: Quantile over the records of the largest coefficient, which bounds each coefficient.

    Returns:
        The clipping, for a `Plan`.

    **Guarantee.** docs/guarantees/public-basis.md, 4.
    """
    split = int(_FOR_BASES * count(public))
    for_basis, measured = (
        take(public, rows) for rows in torch.arange(count(public)).tensor_split([split])
    )
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    basis = principal_basis(model, loss, for_basis, ranks, bases, generator)
    norms = Norms.of(model, loss, measured, basis)
    thresholds = thresholds_of(norms, norm=norm, quantile=quantile)
    linf = thresholds.linf if entries else None
    return Subspaces(ranks=ranks, l2=thresholds.l2, linf=linf, bases=bases)


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
        norms = []
        for tape in tapes(model, loss, data):
            if frame is None:
                norms.append(torch.stack([tape.norms(2.0), tape.norms(torch.inf)])[:, :, None])
                continue
            by_block = torch.empty(2, tape.records, len(frame.sizes), device=tape.device)
            for rows, blocks in ProjectedTape(tape, frame).chunks():
                for order, part in zip((2.0, torch.inf), by_block, strict=True):
                    columns = [vector_norms(block, order) for block in blocks.values()]
                    part[rows] = torch.stack(columns, 1).float()
            norms.append(by_block)
        l2, linf = torch.cat(norms, 1).to("cpu", torch.float64)
        return cls(l2=l2, linf=linf)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Clipping norms of each block: l2 first, then of every entry."""

    l2: tuple[float, ...]
    linf: tuple[float, ...]


def thresholds_of(norms: Norms, *, norm: float, quantile: float = 0.99) -> Thresholds:
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
