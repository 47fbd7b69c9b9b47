"""Guard of released weights and buffers: changed outside of a step, or trained on another ledger.

A raw `optimizer.step()` beside the private one, or batch norm running in training mode between two
steps, changes the released model without a charge. torch counts the writes to each tensor. Fused
optimizers, batch norm kernels and `.data` write without a count, so norms are compared as well; on a GPU
the result is read at the next `batches` or `spent`, because reading it waits for the GPU.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.core.errors import LedgerError, PrivacyWarning
from hush.gradients.models import ModuleTree


class Reading(NamedTuple):
    """Addresses and write counts of a model's parameters and buffers."""

    parameters: list[tuple[int, int]]
    buffers: dict[str, tuple[int, int]]


class Accepted(NamedTuple):
    """Reading of a model after a step or an adoption."""

    reading: Reading
    trained: bool
    """Whether a step has moved the weights."""


_ACCEPTED: "WeakKeyDictionary[nn.Module, dict[str, Accepted]]" = WeakKeyDictionary()
"""Last reading of each model by the identity of the ledger: several steps on one ledger may train a
model in turns."""


_NORMS: "WeakKeyDictionary[nn.Module, Tensor]" = WeakKeyDictionary()
"""Norms of each model's parameters and buffers after a step or an adoption."""


class WeightsGuard:
    """Detects weights and buffers that no private step has changed."""

    def __init__(self, tree: ModuleTree, may_change: Callable[[], Collection[str]]) -> None:
        """A guard of the model as it is now.

        Args:
            tree: Modules and parameters of the model.
            may_change: Names of buffers that forward passes change independently of the records.
        """
        self._tree = tree
        self._may_change = may_change
        self._values: list[Tensor] = []
        """Values of the last reading whose norms are compared."""
        self._reading = self.read()
        self._moved: Tensor | None = None
        """Whether a norm has changed outside of a step, on the device; None: not compared."""
        _NORMS.setdefault(tree.model, self._norms())

    def read(self) -> Reading:
        """Reading of the weights and buffers as they are now."""
        modules = self._tree.modules()
        parameters = [
            _version(value)
            for module in modules.values()
            for value in module._parameters.values()
            if value is not None
        ]
        buffers = {
            f"{path}.{name}".lstrip("."): _version(buffer)
            for path, module in modules.items()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        skipped = set(self._may_change())
        values = [
            value
            for path, module in modules.items()
            for table in (module._parameters, module._buffers)
            for name, value in table.items()
            if value is not None and (not skipped or f"{path}.{name}".lstrip(".") not in skipped)
        ]
        shards = [getattr(value, "_local_tensor", value) for value in values]
        self._values = [value for value in shards if value.is_floating_point() and value.numel()]
        return Reading(parameters, buffers)

    def adopt(self, ledger: Ledger, *, trained: bool = False) -> None:
        """Accept the current weights and buffers in all steps on the ledger.

        Args:
            ledger: Ledger of the steps.
            trained: Whether a step charged to it has made them.
        """
        self._reading = self.read()
        if not trained:  # what a GPU has found before a step is still to be read after it
            self._moved = None
        _NORMS[self._tree.model] = self._norms()
        known = _ACCEPTED.setdefault(self._tree.model, {})
        before = known.get(ledger.identity)
        trained = trained or (before is not None and before.trained)
        known[ledger.identity] = Accepted(self._reading, trained)

    @contextmanager
    def unchanged(self, ledger: Ledger) -> Iterator[None]:
        """Context of passes that leave all values as they were, although torch may count writes."""
        before = self.read()
        yield
        if before == self._reading != (after := self.read()):
            self._reading = after
            known = _ACCEPTED.get(self._tree.model, {})
            if ledger.identity in known and known[ledger.identity].reading == before:
                known[ledger.identity] = known[ledger.identity]._replace(reading=after)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Norms of the parameters and buffers of the last reading that no pass may change."""
        if not self._values:
            return torch.zeros(0)
        return torch.stack([norm.double() for norm in torch._foreach_norm(self._values)])

    def _moved_uncounted(self, *, wait: bool) -> bool:
        """Whether a value was changed without a count of torch.

        Args:
            wait: Wait for a GPU; otherwise a later call returns what it finds.
        """
        now = self._norms()
        before = _NORMS.get(self._tree.model, now)
        if now.shape != before.shape or now.device != before.device:
            return False
        moved = ((now != before) & ~(now.isnan() & before.isnan())).any()
        self._moved = moved if self._moved is None else self._moved | moved
        return (wait or not moved.is_cuda) and bool(self._moved)

    def check(self, ledger: Ledger, *, wait: bool = True) -> None:
        """Raise if weights or buffers were changed outside of the steps on the ledger.

        Changed weights void a ledger that has charges.

        Args:
            ledger: Ledger of the steps.
            wait: Wait for a GPU that compares norms.
        """
        now = self.read()
        if now == self._reading:
            if self._moved_uncounted(wait=wait):
                self._void(ledger)
            return
        other = _ACCEPTED.get(self._tree.model, {}).get(ledger.identity)
        for accepted in (self._reading, *([] if other is None else [other.reading])):
            if now.parameters == accepted.parameters:
                names = now.buffers.keys() | accepted.buffers.keys()
                changed = {name for name in names if now.buffers.get(name) != accepted.buffers.get(name)}
                changed -= set(self._may_change())
                if not changed:
                    self._reading = now
                    return
                raise _buffers_changed(sorted(changed))
        self._void(ledger)

    def _void(self, ledger: Ledger) -> NoReturn:
        """Void a ledger that has charges, and raise."""
        reason = "the model's weights were changed outside of the private step, where nothing is charged"
        if ledger.counts:  # otherwise nothing was released on it, and nothing is lost
            ledger.void(reason)
        raise LedgerError(
            f"{reason}: no guarantee holds for the model. Only step(batch) may train it: leave out "
            "other calls of optimizer.step(). If the change did not depend on the records (weights that "
            "were loaded, averaged or clamped), call step.adopt_weights() right after it."
        )

    def warn_of_other_ledger(self, ledger: Ledger) -> None:
        """Warn if the weights are the result of a private run on another ledger."""
        others = [
            identity
            for identity, accepted in _ACCEPTED.get(self._tree.model, {}).items()
            if identity != ledger.identity
            and accepted.trained
            and accepted.reading.parameters == self._reading.parameters
        ]
        if others:
            warnings.warn(
                "the model's weights came out of an earlier private run, which was charged to another "
                f"ledger ({', '.join(sorted(others))}): if any record was in both, the two charges add "
                "up, and what this run reports is for its own steps alone. Make one ledger = "
                "hush.Ledger(), pass ledger=ledger to both, and report ledger.epsilon(delta); or begin "
                "with fresh weights.",
                PrivacyWarning,
                stacklevel=3,
            )


def _version(value: Tensor) -> tuple[int, int]:
    value = getattr(value, "_local_tensor", value)  # the shard of a parameter that is split over ranks
    address = value.data_ptr() if value.layout is torch.strided and not value.is_meta else id(value)
    return address, -1 if value.is_inference() else value._version


def _buffers_changed(names: list[str]) -> Any:
    several = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return LedgerError(
        f"the model's buffers {', '.join(names[:3])}{several} were changed outside of the private "
        "step, where nothing is charged: statistics of records there, such as those a batch norm keeps "
        "when it runs in training mode, are released with the model, without noise. Put back what was "
        "there. If the change did not depend on the records (buffers that were loaded, or set to what "
        "is public), call step.adopt_weights() right after it."
    )
