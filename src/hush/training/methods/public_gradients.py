"""Per-sample gradients of public records, their norms, and clipping thresholds from those."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hush.clipping.norms import NORM
from hush.core.errors import DataError
from hush.core.value import Range
from hush.gradients.checks.losses import per_sample_loss
from hush.gradients.geometry import Geometry, geometry
from hush.gradients.precision import vector_norms
from hush.gradients.public_basis import ProjectedTape, PublicBasis
from hush.gradients.recording import record
from hush.gradients.tape import BranchedTape, GradientTape
from hush.gradients.tree import Loss, tree_map
from hush.training.data import Data, count, take

_GRADIENTS_AT_ONCE = {"cpu": 64, "cuda": 256}
"""Records whose gradients are worked out together. Of few, a GPU waits for Python."""
_DESCENT_BATCH = 250
"""Records of a pass without per-sample gradients."""
QUANTILE = Range(above=0, below=1, why="it is a share of the records", example=0.99)


def gradient_rows(
    model: nn.Module, loss: Loss, data: Data, names: Sequence[str] | None = None
) -> Tensor:
    """Per-sample gradients of the named parameters, or of all, at the present weights, a row each.

    In the precision of the parameters, single at least. Without noise: as sensitive as the records.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    names = list(trained) if names is None else names
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in trained.values()), torch.float32)
    sizes = [trained[name].numel() for name in names]
    device = next(iter(trained.values())).device
    rows = torch.empty(count(data), sum(sizes), dtype=dtype, device=device)
    at_once = _GRADIENTS_AT_ONCE[device.type]
    for batch, tape in zip(rows.split(at_once), _tapes(model, loss, data), strict=True):
        for chunk, gradients in _only(tape, names).chunks():
            for part, columns in zip(gradients.values(), batch.split(sizes, 1), strict=True):
                columns[chunk] = part.unsqueeze(-1).flatten(1).to(dtype)
    return rows


def _tapes(model: nn.Module, loss: Loss, data: Data) -> Iterator[GradientTape | BranchedTape]:
    """Tapes of a few records at a time, in their order."""
    device = next(model.parameters()).device
    for indices in torch.arange(count(data)).split(_GRADIENTS_AT_ONCE[device.type]):
        inputs, targets = tree_map(take(data, indices), lambda value: value.to(device))
        yield record(model, per_sample_loss(loss), inputs, targets)


def finite_rows(rows: Tensor) -> Tensor:
    """Rows all of whose entries are finite."""
    usable = rows.isfinite().all(1)
    return rows if bool(usable.all()) else rows[usable]


def _only(tape: GradientTape | BranchedTape, names: Sequence[str]) -> GradientTape | BranchedTape:
    """The tape of some of the parameters."""
    if isinstance(tape, BranchedTape):
        return BranchedTape([(part, _some(own, names)) for part, own in tape.parts])
    return _some(tape, names)


def _some(tape: GradientTape, names: Sequence[str]) -> GradientTape:
    return replace(tape, terms={name: tape.terms[name] for name in names})


def probe(
    model: nn.Module,
    loss: nn.Module,
    reference: tuple[Tensor, Tensor],
    measured: tuple[Tensor, Tensor],
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
) -> Geometry:
    """Train on `measured` without any privacy, then measure its gradients beside those of `reference`.

    What comes back is a function of the records with no noise in it: both sets must be public.
    """
    descend(model, loss, measured, steps=steps, learning_rate=learning_rate, momentum=momentum)
    return geometry(*(finite_rows(gradient_rows(model, loss, part)) for part in (reference, measured)))


def descend(
    model: nn.Module,
    loss: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
) -> None:
    """Take steps of gradient descent on all of the data, without any privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    inputs, targets = data
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in zip(inputs.split(_DESCENT_BATCH), targets.split(_DESCENT_BATCH), strict=True):
            (loss(model(x), y) * (len(x) / len(inputs))).backward()
        optimizer.step()
    optimizer.zero_grad()


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
        for tape in _tapes(model, loss, data):
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
