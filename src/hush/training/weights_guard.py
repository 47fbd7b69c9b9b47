"""Detect weights and buffers that were changed outside of a step, or trained on another ledger.

An additional `optimizer.step()`, or a batch norm in training mode between two steps, changes the model
without a charge. torch counts the writes to each tensor, except for writes through `.data`.
"""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hush.accounting.ledger import Ledger
from hush.core.errors import EarlierRun, LedgerError
from hush.gradients.tree import submodules


@dataclass(eq=False)
class _Accepted:
    """Accepted state of a model's weights and buffers, after a step or `adopt_weights` on one ledger."""

    ledger: str
    """Identity of the ledger."""
    writes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Address and number of writes of each tensor, by `id`."""
    trained: set[int] = field(default_factory=set)
    """`id`s of the parameters that steps on the ledger have trained."""

    def has(self, value: Tensor) -> bool:
        return self.writes.get(id(value)) == _writes(value)


_ACCEPTED: Any = WeakIdKeyDictionary()
"""Accepted states by tensor: one for each model and ledger, because models may share parameters."""


class WeightsGuard:
    """Detects changes of weights and buffers outside of private steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ledger: Ledger,
        may_change: Callable[[], Collection[str]],
    ) -> None:
        """Create a guard that accepts the current state of the model.

        Args:
            model: Trained model.
            optimizer: Optimizer of the model.
            ledger: Ledger of the steps.
            may_change: Names of buffers that forward passes change independently of the records.
        """
        self._model = model
        self._may_change = may_change
        self._accepted: dict[str, _Accepted] = {}
        """Accepted state by ledger."""
        self._writes = _all_writes(self._model)
        """Last accepted address and number of writes of each tensor, by `id`."""
        self._others = self._trained_elsewhere(ledger)
        """Other ledgers that have charges for some of the parameters."""
        if any(group.get("fused") for group in optimizer.param_groups):
            optimizer.register_step_post_hook(_count_writes)
        self.warn_of_other_ledgers(stacklevel=4)

    def adopt(self, ledger: Ledger, trained: Collection[Tensor] = ()) -> None:
        """Accept the current weights and buffers in all steps on the ledger.

        Args:
            ledger: Ledger of the steps.
            trained: Parameters updated by a charged step; empty for other changes.
        """
        writes = self._writes = _all_writes(self._model)
        accepted = self._accepted.setdefault(ledger.identity, _Accepted(ledger.identity))
        if accepted.writes.keys() != writes.keys():
            for value in _values(self._model):
                records = _ACCEPTED.setdefault(value, [])
                if accepted not in records:
                    records.append(accepted)
        accepted.writes = writes
        if trained:
            accepted.trained.update(map(id, trained))
        else:
            self._others |= self._trained_elsewhere(ledger)

    def unchanged(self) -> bool:
        """Whether torch counted no write since the last step or `adopt_weights`."""
        return _all_writes(self._model) == self._writes

    def accept_writes(self, ledger: Ledger) -> None:
        """Accept writes that did not change values."""
        self._writes = _all_writes(self._model)
        if ledger.identity in self._accepted:
            self._accepted[ledger.identity].writes = self._writes

    def check(self, ledger: Ledger) -> None:
        """Raise if weights or buffers were changed outside of steps on the ledger.

        A ledger with charges becomes void if weights were changed.
        """
        now = _all_writes(self._model)
        if now == self._writes:
            return
        buffers = []
        for path, module in self._model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is None or self._writes.get(id(value)) == _writes(value):
                        continue
                    known = [each for each in _ACCEPTED.get(value, ()) if each.ledger == ledger.identity]
                    if any(each.has(value) for each in known):
                        continue
                    if table is module._parameters:
                        _void(ledger)
                    buffers.append(f"{path}.{name}".lstrip("."))
        buffers = sorted(set(buffers) - set(self._may_change()))
        if buffers:
            several = f" and {len(buffers) - 3} others" if len(buffers) > 3 else ""
            raise LedgerError(
                f"the model's buffers {', '.join(buffers[:3])}{several} were changed outside of the "
                "private step: statistics of records, e.g. of a batch norm in training mode, would be "
                "released without noise. Restore the buffers; if the change did not depend on the "
                "records, call step.adopt_weights() after it."
            )
        self._writes = now

    def warn_of_other_ledgers(self, stacklevel: int = 3) -> None:
        """Warn if some weights come from a private run on another ledger."""
        if self._others:
            warnings.warn(
                "some of the model's weights come from a private run on another ledger "
                f"({', '.join(sorted(self._others))}): if a record was in both runs, the two costs add "
                "up. Pass the same ledger = hush.Ledger() to both and report ledger.epsilon(delta), or "
                "start with new weights.",
                EarlierRun,
                stacklevel=stacklevel,
            )

    def _trained_elsewhere(self, ledger: Ledger) -> set[str]:
        """Other ledgers with charges for the current values of parameters."""
        return {
            other.ledger
            for value in _values(self._model)
            for other in _ACCEPTED.get(value, ())
            if other.ledger != ledger.identity and id(value) in other.trained and other.has(value)
        }


def _values(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a model."""
    values: list[Tensor] = []
    for module in submodules(model):
        for table in (module._parameters, module._buffers):
            for value in table.values():
                if value is not None:
                    values.append(value)
    return values


def _all_writes(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Address and number of writes of each parameter and buffer, by `id`."""
    values = _values(model)
    return dict(zip(map(id, values), map(_writes, values), strict=True))


def _writes(value: Tensor) -> tuple[int, int]:
    """Address and number of writes of a tensor."""
    if type(value) is not nn.Parameter:
        value = getattr(value, "_local_tensor", value)  # shard of a sharded parameter
        if value.is_meta or value.layout is not torch.strided:
            return id(value), value._version
    return value.data_ptr(), -1 if value.is_inference() else value._version


def _count_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the writes of a fused optimizer, because torch does not count them."""
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is not None:
                torch.autograd.graph.increment_version(value)


def _void(ledger: Ledger) -> NoReturn:
    """Void the ledger if it has charges, and raise."""
    reason = "the model's weights were changed outside of the private step, without a charge"
    if ledger.counts:  # otherwise the ledger has no release
        ledger.void(reason)
    raise LedgerError(
        f"{reason}: the model has no guarantee. Only step(batch) may train it: remove other calls of "
        "optimizer.step(). If the change did not depend on the records (weights were loaded, averaged "
        "or clamped), call step.adopt_weights() after it."
    )
