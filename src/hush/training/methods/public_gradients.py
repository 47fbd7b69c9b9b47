"""Per-sample gradients of public records, materialised one a row."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hush.gradients.checks.models import per_sample_loss
from hush.gradients.geometry import Geometry, geometry
from hush.gradients.recording import Loss, record
from hush.gradients.tape import BranchedTape, GradientTape
from hush.gradients.tree import tree_map
from hush.training.data import Data, count, take

_GRADIENTS_AT_ONCE = 64
"""Records whose gradients are worked out together."""
_DESCENT_BATCH = 250
"""Records of a pass without per-sample gradients."""


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
    for at_once in torch.arange(count(data)).split(_GRADIENTS_AT_ONCE):
        inputs, targets = tree_map(take(data, at_once), lambda value: value.to(device))
        few = rows[at_once[0] : at_once[-1] + 1]
        for some, written in _only(
            record(model, per_sample_loss(loss), inputs, targets), names
        ).chunks():
            for part, columns in zip(written.values(), few.split(sizes, 1), strict=True):
                columns[some] = part.unsqueeze(-1).flatten(1).to(dtype)
    return rows


def finite(rows: Tensor) -> Tensor:
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
    return geometry(*(finite(gradient_rows(model, loss, part)) for part in (reference, measured)))


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
