"""Weights that private runs of this process released: training them further adds to what was spent."""

import warnings
from weakref import WeakKeyDictionary

from torch import nn

from hush.accounting.ledger import Ledger
from hush.core.errors import PrivacyWarning

Lengths = tuple[str, ...]
"""Euclidean norms of a model's weights, in full precision: they tell one set of weights from another."""

_RELEASED: "WeakKeyDictionary[nn.Module, dict[str, Lengths]]" = WeakKeyDictionary()
"""Of each model that still exists, the last weights charged to each ledger, by its identity."""


def note_released(model: nn.Module, lengths: Lengths, ledger: Ledger) -> None:
    """Remember that weights of these lengths came out of a step on this ledger."""
    _RELEASED.setdefault(model, {})[ledger.identity] = lengths


def warn_of_other_ledger(lengths: Lengths, ledger: Ledger) -> None:
    """Warn if weights of these lengths came out of a private run that is on another ledger.

    The model itself and copies of it are recognised while it exists; weights that were read from a
    file in another process are not.

    Args:
        lengths: of the weights to be trained, as they are now.
        ledger: what their steps will be charged to.
    """
    known = [pair for released in _RELEASED.values() for pair in released.items()]
    others = {name for name, held in known if held == lengths} - {ledger.identity}
    if others:
        warnings.warn(
            "the model's weights came out of an earlier private run, which was charged to another "
            f"ledger ({', '.join(sorted(others))}): if any record was in both, the two charges add up, "
            "and what this run reports is for its own steps alone. Make one ledger = hush.Ledger(), "
            "pass ledger=ledger to both, and report ledger.epsilon(delta); or begin with fresh weights.",
            PrivacyWarning,
            stacklevel=3,
        )
