"""Guards of a released model: changed outside of a step, or trained further on another ledger."""

import warnings
from contextlib import nullcontext
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.core.errors import LedgerError, PrivacyWarning
from hush.gradients.models import ModuleTree
from hush.gradients.tree import local_shard
from hush.training.checks.released_buffers import (
    Buffers,
    changed_buffers,
    read_buffers,
    refuse_changed_buffers,
)


class Reading(NamedTuple):
    """What weights and buffers are recognised by."""

    versions: list[tuple[int, int]]
    """Address and version of each parameter."""
    norms: Tensor
    """Bits of the parameters' norms."""
    buffers: Buffers

    def same_weights(self, other: "Reading") -> bool:
        return self.versions == other.versions and torch.equal(self.norms, other.norms)


_RELEASED: "WeakKeyDictionary[nn.Module, dict[str, tuple[Tensor, Tensor]]]" = WeakKeyDictionary()
"""Norms of the weights of each model that still exists, before the first step and after the last one on
each ledger, by its identity. They tell one set of weights from another, and stay on the model's device
until they are compared, so that no step waits for them."""

_ACCEPTED: "WeakKeyDictionary[nn.Module, dict[str, Reading]]" = WeakKeyDictionary()
"""Weights of each model that a step on a ledger, by its identity, last moved or adopted: where several
steps on one ledger train a model in turns, each charge covers what the others go on from."""


class WeightsGuard:
    """Recognises weights and buffers that were changed by no private step, where nothing is charged.

    Buffers that forward passes change in a way that does not depend on a record may change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tree = ModuleTree(model)
        self.may_change: frozenset[str] = frozenset()
        """Names of such buffers."""
        self._accepted = self._read(None)

    @property
    def norms(self) -> Tensor:
        """Bits of the norms of the weights that were last accepted."""
        return self._accepted.norms

    def adopt(self, ledger: Ledger) -> None:
        """Take the weights as they are now for released or public ones, in all steps on the ledger."""
        self._accepted = self.read()
        _ACCEPTED.setdefault(self._model, {})[ledger.identity] = self._accepted

    def applied(self, ledger: Ledger) -> None:
        """Take the weights as they are now for those that a step charged to the ledger has made."""
        before = self.norms
        self.adopt(ledger)
        released = _RELEASED.setdefault(self._model, {})
        start, _ = released.get(ledger.identity, (before, before))
        released[ledger.identity] = start, self.norms

    def check(self, ledger: Ledger, reading: Reading | None = None) -> None:
        """Raise if weights or buffers were changed by no step on the ledger, or one that was stopped.

        If weights were, a ledger with charges is void.

        Args:
            ledger: the one that the step is charged to.
            reading: of the model when the step began, to be compared once the GPU has done other work
                too; None: as it is now.
        """
        now = reading or self.read()
        other = _ACCEPTED.get(self._model, {}).get(ledger.identity)
        changed: set[str] | None = None
        for accepted in (self._accepted, other):
            if accepted is not None and now.same_weights(accepted):
                changed = changed_buffers(accepted.buffers, now.buffers)
                if not changed or not (changed := changed - self.may_change):
                    self._accepted = accepted
                    return
        if changed is None:
            self._refuse_weights(ledger)
        refuse_changed_buffers(changed)

    def _refuse_weights(self, ledger: Ledger) -> NoReturn:
        reason = "the model's weights were changed outside of the private step, where nothing is charged"
        if ledger.counts:  # otherwise nothing was released on it, and nothing is lost
            ledger.void(reason)
        raise LedgerError(
            f"{reason}: no guarantee holds for the model. Only step(batch) may train it: leave out "
            "other calls of optimizer.step(). If the change did not depend on the records (weights that "
            "were loaded, averaged or clamped), call step.adopt_weights() right after it."
        )

    def read(self) -> Reading:
        """Weights and buffers as they are now."""
        return self._read(self._accepted.buffers)

    @torch.no_grad()
    def _read(self, before: Buffers | None) -> Reading:
        """Address and version of each parameter, the bits of norms, and the buffers.

        Writes by way of `.data` are not counted by torch; they change the norm. The bits, of which those
        of a NaN are equal to themselves, stay on the device until they are compared, so that a step does
        not wait for what it has just moved.
        """
        values = [local_shard(value) for value in self._tree.parameters().values()]
        device = values[0].device.type
        cast = torch.is_autocast_enabled(device)  # it takes norms in other precisions
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            norms = torch._foreach_norm(values)
            buffers = read_buffers(self._tree, before, self.may_change)
        if len({norm.dtype for norm in norms}) > 1:
            norms = tuple(norm.double() for norm in norms)
        versions = [(value.data_ptr(), value._version) for value in values]
        return Reading(versions, torch.stack(norms).view(torch.uint8), buffers)


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
