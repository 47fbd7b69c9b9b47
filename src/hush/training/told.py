"""What a step tells about the records that take part in it, for any model (sensitive)."""

import numpy as np
import torch
from torch import Tensor

from hush.accounting.per_instance.bounded import fisher, individual_rdp
from hush.accounting.per_instance.fisher import FisherLoss
from hush.accounting.pld.privacy_loss import Array
from hush.clipping import Linf
from hush.core.errors import Unproved
from hush.gradients.fisher import spectrum
from hush.gradients.recording import record
from hush.training.data import Batch
from hush.training.step import PrivateStep


def add_fisher(step: PrivateStep, batch: Batch, loss: FisherLoss, *, iterations: int = 60) -> None:
    """Add to `loss` what `step(batch)` will tell about each record; call it before the step.

    Nothing is told about those who do not take part, so over the draws of batches each record's loss
    has the chance of being drawn in it already. Upper ends of certified bounds, as in
    docs/guarantees/fisher.md.
    """
    information = torch.as_tensor(fisher(step.plan, _location(step, batch)))
    told = np.zeros(loss.records)
    start = 0
    for inputs, targets, _ in batch:
        found = spectrum(
            step.model,
            step.loss,
            inputs,
            targets,
            step.plan.clipping,
            information.to(inputs.device, inputs.dtype),
            iterations=iterations,
        )
        where = batch.indices[start : start + len(inputs)].cpu().numpy()
        told[where] = found.upper.cpu().numpy()
        start += len(inputs)
    loss.add(told)


def charges(step: PrivateStep, batch: Batch, orders: Array) -> Array:
    """What `step(batch)` costs each record of a full batch: a row each, exact for its own gradient.

    The gradients are written out a few at a time. Only for one release: docs/guarantees/filter.md.
    """
    if type(step.plan.clipping) is not Linf:
        raise Unproved(
            f"{type(step.plan.clipping).__name__} has no charges for each record here: gradients are "
            "written out and clamped. Use Linf, or hush.individual_rdp with clipped gradients."
        )
    location = _location(step, batch)
    limit = step.plan.clipping.reference_norm
    rows = []
    for inputs, targets, _ in batch:
        for _, written in record(step.model, step.loss, inputs, targets).chunks():
            flat = torch.cat([part.flatten(1) for part in written.values()], dim=1).clamp(-limit, limit)
            rows.append(individual_rdp(step.plan, location, orders, change=-flat.double().cpu().numpy()))
    return np.concatenate(rows)


def _location(step: PrivateStep, batch: Batch) -> Array:
    """The clipped sum of the batch."""
    total: Tensor | float = 0.0
    for inputs, targets, _ in batch:
        clipped = step.plan.clipping.clip(record(step.model, step.loss, inputs, targets)).total
        total = total + torch.cat([part.reshape(-1) for part in clipped.values()]).double()
    return np.asarray(torch.as_tensor(total).cpu())
