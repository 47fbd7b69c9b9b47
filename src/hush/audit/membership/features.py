"""What an attacker sees of a model on some records: from outside, and from inside."""

import torch
from torch import Tensor, nn

from hush.accounting.pld.privacy_loss import Array
from hush.gradients.recording import record

_AT_ONCE = 512
_EMBEDDED = 64
"""Numbers of an embedding that are kept; a longer one is seen through as many random directions."""
Records = tuple[Tensor, Tensor]


@torch.no_grad()
def scores(model: nn.Module, records: Records) -> Tensor:
    """The scores of the classes, in double precision, without dropout."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        found = [model(part.to(device)).double().cpu() for part in records[0].split(_AT_ONCE)]
    finally:
        model.train(training)
    return torch.cat(found)


def losses(model: nn.Module, records: Records) -> Array:
    """Each record's cross-entropy."""
    found = nn.functional.cross_entropy(scores(model, records), records[1].cpu(), reduction="none")
    return found.numpy()


def confidences(model: nn.Module, records: Records) -> Array:
    """log p - log(1 - p) of the probability p of the right class (Carlini et al. 2022).

    As a difference of logarithms of sums: 1 - p is 0 in floating point long before it is.
    """
    found, labels = scores(model, records), records[1].cpu()[:, None]
    right = found.gather(1, labels)[:, 0]
    wrong = found.scatter(1, labels, -torch.inf).logsumexp(1)
    return (right - wrong).numpy()


def posteriors(model: nn.Module, records: Records) -> Array:
    """From outside (black box): sorted log-probabilities, and whether the largest is the right one's."""
    found = scores(model, records)
    logs = found.log_softmax(1).sort(1, descending=True).values
    correct = (found.argmax(1) == records[1].cpu()).double()[:, None]
    return torch.cat([logs, correct], dim=1).numpy()


def inside(model: nn.Module, records: Records) -> Array:
    """From inside (white box): posteriors, label, loss, gradient norms by parameter, and the embedding.

    The last layer's gradient itself is a function of these: the error times the embedding.
    """
    device = next(model.parameters()).device
    *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    embedded: list[Tensor] = []
    norms: list[Tensor] = []
    # out of the way while the tape runs, which works on its own copies
    handle = last.register_forward_pre_hook(lambda _, given: embedded.append(given[0].double().cpu()))
    try:
        scores(model, records)
    finally:
        handle.remove()
    each = nn.CrossEntropyLoss(reduction="none")
    for x, y in zip(records[0].split(_AT_ONCE), records[1].split(_AT_ONCE), strict=True):
        tape = record(model, each, x.to(device), y.to(device))
        by_parameter = tape.norms_by_parameter(2.0).values()
        norms.append(torch.stack([norm.double().cpu() for norm in by_parameter], dim=1))
    embedding = torch.cat(embedded).flatten(1)
    if embedding.shape[1] > _EMBEDDED:
        directions = torch.Generator().manual_seed(0)
        onto = torch.randn(embedding.shape[1], _EMBEDDED, generator=directions, dtype=torch.float64)
        embedding = embedding @ onto / _EMBEDDED**0.5
    parts = [
        torch.from_numpy(posteriors(model, records)),
        records[1].cpu().double()[:, None],
        torch.from_numpy(losses(model, records))[:, None],
        torch.cat(norms).clamp_min(1e-300).log(),
        embedding,
    ]
    return torch.cat(parts, dim=1).numpy()
