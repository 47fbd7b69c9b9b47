"""Weights that private runs of this process released: training them further adds to what was spent."""

import warnings
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hush.accounting.ledger.ledger import Ledger
from hush.core.errors import PrivacyWarning

_RELEASED: "WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, Tensor]]]" = WeakKeyDictionary()
"""Norms of the weights of each model that still exists, before the first step and after the last one on
each ledger, by its identity. They tell one set of weights from another, and stay on the model's device
until they are compared, so that no step waits for them."""


def note_released(model: nn.Module, before: Tensor, after: Tensor, ledger: Ledger) -> None:
    """Remember that a step on this ledger moved weights of some norms to weights of others."""
    steps = _RELEASED.setdefault(model, {})
    start, _ = steps.get(ledger.identity, (before, before))
    steps[ledger.identity] = start, after


def warn_of_other_ledger(lengths: Tensor, ledger: Ledger) -> None:
    """Warn if weights of these lengths came out of a private run that is on another ledger.

    The model itself and copies of it are recognised while it exists; weights that were read from a
    file in another process are not.

    Args:
        lengths: bits of the norms of the weights to be trained, as they are now.
        ledger: what their steps will be charged to.
    """
    known = [pair for released in _RELEASED.values() for pair in released.items()]
    others = {
        name
        for name, (start, last) in known
        if _equal(last, lengths) and not _equal(start, last) and name != ledger.identity
    }
    if others:
        warnings.warn(
            "the model's weights came out of an earlier private run, which was charged to another "
            f"ledger ({', '.join(sorted(others))}): if any record was in both, the two charges add up, "
            "and what this run reports is for its own steps alone. Make one ledger = hush.Ledger(), "
            "pass ledger=ledger to both, and report ledger.epsilon(delta); or begin with fresh weights.",
            PrivacyWarning,
            stacklevel=3,
        )


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.device == second.device and torch.equal(first, second)
