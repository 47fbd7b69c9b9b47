"""Guards of released weights: moved outside of a private step, or trained further on another ledger."""

import warnings
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hush.accounting.ledger.ledger import Ledger
from hush.core.errors import LedgerError, PrivacyWarning
from hush.gradients.forward.module_tree import ModuleTree
from hush.gradients.tree import local_shard

Reading = tuple[list[tuple[int, int]], Tensor]
"""Address and version of each parameter, and the bits of their norms."""

_RELEASED: "WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, Tensor]]]" = WeakKeyDictionary()
"""Norms of the weights of each model that still exists, before the first step and after the last one on
each ledger, by its identity. They tell one set of weights from another, and stay on the model's device
until they are compared, so that no step waits for them."""

_ACCEPTED: "WeakKeyDictionary[nn.Module, dict[str, Reading]]" = WeakKeyDictionary()
"""Weights of each model that a step on a ledger, by its identity, last moved or adopted: where several
steps on one ledger train a model in turns, each charge covers what the others go on from."""


class WeightsGuard:
    """Recognises weights that changed other than by a private step, where nothing is charged."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tree = ModuleTree(model)
        self._versions, self.norms = self.read()

    def adopt(self, ledger: Ledger) -> None:
        """Take the weights as they are now for released or public ones, in all steps on the ledger."""
        self._versions, self.norms = self.read()
        _ACCEPTED.setdefault(self._model, {})[ledger.identity] = self._versions, self.norms

    def applied(self, ledger: Ledger) -> None:
        """Take the weights as they are now for those that a step charged to the ledger has made."""
        before = self.norms
        self.adopt(ledger)
        released = _RELEASED.setdefault(self._model, {})
        start, _ = released.get(ledger.identity, (before, before))
        released[ledger.identity] = start, self.norms

    def check(self, ledger: Ledger, reading: Reading | None = None) -> None:
        """Raise, and void a ledger with charges, if the weights were moved by no step on it.

        Args:
            ledger: the one that the step is charged to.
            reading: of the weights when the step began, to be compared once the GPU has done other
                work too; None: as they are now.
        """
        versions, norms = reading or self.read()
        accepted = _ACCEPTED.get(self._model, {}).get(ledger.identity)
        for reading in ((self._versions, self.norms), accepted):
            if reading is not None and versions == reading[0] and torch.equal(norms, reading[1]):
                self._versions, self.norms = reading
                return
        reason = "the model's weights were changed outside of the private step, where nothing is charged"
        if ledger.counts:  # otherwise nothing was released on it, and nothing is lost
            ledger.void(reason)
        raise LedgerError(
            f"{reason}: no guarantee holds for the model. Only step(batch) may train it: leave out "
            "other calls of optimizer.step(). If the change did not depend on the records (weights that "
            "were loaded, averaged or clamped), call step.adopt_weights() right after it."
        )

    @torch.no_grad()
    def read(self) -> Reading:
        """Address and version of each parameter, and the bits of their norms.

        Writes by way of `.data` are not counted by torch; they change the norm. The bits, of which those
        of a NaN are equal to themselves, stay on the device until they are compared, so that a step does
        not wait for what it has just moved.
        """
        values = [local_shard(value) for value in self._tree.parameters().values()]
        device = values[0].device.type
        cast = torch.is_autocast_enabled(device)  # it takes norms in other precisions
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            norms = torch._foreach_norm(values)
        if len({norm.dtype for norm in norms}) > 1:
            norms = tuple(norm.double() for norm in norms)
        versions = [(value.data_ptr(), value._version) for value in values]
        return versions, torch.stack(norms).view(torch.uint8)


def warn_of_other_ledger(norms: Tensor, ledger: Ledger) -> None:
    """Warn if weights of these norms came out of a private run that is on another ledger.

    The model itself and copies of it are recognised while it exists; weights that were read from a
    file in another process are not.

    Args:
        norms: bits of the norms of the weights to be trained, as they are now.
        ledger: the one that their steps will be charged to.
    """
    runs = [pair for released in _RELEASED.values() for pair in released.items()]
    ledgers = {
        identity
        for identity, (start, last) in runs
        if _equal(last, norms) and not _equal(start, last) and identity != ledger.identity
    }
    if ledgers:
        warnings.warn(
            "the model's weights came out of an earlier private run, which was charged to another "
            f"ledger ({', '.join(sorted(ledgers))}): if any record was in both, the two charges add up, "
            "and what this run reports is for its own steps alone. Make one ledger = hush.Ledger(), "
            "pass ledger=ledger to both, and report ledger.epsilon(delta); or begin with fresh weights.",
            PrivacyWarning,
            stacklevel=3,
        )


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.device == second.device and torch.equal(first, second)
