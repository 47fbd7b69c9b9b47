"""Guard of released weights and buffers: changed outside of a step, or trained on another ledger.

A raw `optimizer.step()` beside the private one, or batch norm running in training mode between two
steps, changes the released model without a charge. torch counts the writes to each tensor; writes
through `.data` are not counted.
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
    """Weights and buffers of a model after a step or an adoption on one ledger."""

    ledger: str
    """Identity of the ledger."""
    writes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Address and number of writes of each tensor, by its `id`."""
    trained: set[int] = field(default_factory=set)
    """Parameters that steps on the ledger have trained, by `id`."""

    def has(self, value: Tensor) -> bool:
        return self.writes.get(id(value)) == _writes(value)


_ACCEPTED: Any = WeakIdKeyDictionary()
"""By tensor: the `_Accepted` of each model and ledger, because models may share parameters."""


class WeightsGuard:
    """Detects weights and buffers that no private step has changed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ledger: Ledger,
        may_change: Callable[[], Collection[str]],
    ) -> None:
        """Guard of the model as it is now.

        Args:
            model: Trained model.
            optimizer: Its optimizer.
            ledger: Ledger of the steps.
            may_change: Names of buffers that forward passes change independently of the records.
        """
        self._model = model
        self._may_change = may_change
        self._accepted: dict[str, _Accepted] = {}
        """By ledger."""
        self._writes = _all_writes(self._model)
        """Address and number of writes of each tensor, by its `id`, when it was last accepted."""
        self._others = self._trained_elsewhere(ledger)
        """Other ledgers whose runs have trained some of the parameters."""
        if any(group.get("fused") for group in optimizer.param_groups):
            optimizer.register_step_post_hook(_count_writes)
        self.warn_of_other_ledgers(stacklevel=4)

    def adopt(self, ledger: Ledger, trained: Collection[Tensor] = ()) -> None:
        """Accept the current weights and buffers in all steps on the ledger.

        Args:
            ledger: Ledger of the steps.
            trained: Parameters that a step charged to it has just moved; empty: none was.
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
        """Whether torch has counted no write since the last step or adoption."""
        return _all_writes(self._model) == self._writes

    def accept_writes(self, ledger: Ledger) -> None:
        """Accept counted writes that have left all values as they were."""
        self._writes = _all_writes(self._model)
        if ledger.identity in self._accepted:
            self._accepted[ledger.identity].writes = self._writes

    def check(self, ledger: Ledger) -> None:
        """Raise unless a step on the ledger made all writes to weights and buffers.

        Changed weights void a ledger that has charges.
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
                "private step: statistics of records there, such as those of a batch norm in training "
                "mode, would be released without noise. Restore them; if the change did not depend on "
                "the records, call step.adopt_weights() right after it."
            )
        self._writes = now

    def warn_of_other_ledgers(self, stacklevel: int = 3) -> None:
        """Warn if some of the weights are the result of a private run on another ledger."""
        if self._others:
            warnings.warn(
                "some of the model's weights came out of an earlier private run on another ledger "
                f"({', '.join(sorted(self._others))}): if any record was in both, the two charges add "
                "up. Make one ledger = hush.Ledger(), pass ledger=ledger to both, and report "
                "ledger.epsilon(delta); or begin with fresh weights.",
                EarlierRun,
                stacklevel=stacklevel,
            )

    def _trained_elsewhere(self, ledger: Ledger) -> set[str]:
        """Other ledgers under which a parameter was trained to its present value."""
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
    """Address and number of writes of each parameter and buffer, by its `id`."""
    values = _values(model)
    return dict(zip(map(id, values), map(_writes, values), strict=True))


def _writes(value: Tensor) -> tuple[int, int]:
    """Address and number of writes of a tensor."""
    if type(value) is not nn.Parameter:
        value = getattr(value, "_local_tensor", value)  # shard of a parameter split over ranks
        if value.is_meta or value.layout is not torch.strided:
            return id(value), value._version
    return value.data_ptr(), -1 if value.is_inference() else value._version


def _count_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the writes of a fused optimizer, which torch does not count."""
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is not None:
                torch.autograd.graph.increment_version(value)


def _void(ledger: Ledger) -> NoReturn:
    """Void a ledger that has charges, and raise."""
    reason = "the model's weights were changed outside of the private step, where nothing is charged"
    if ledger.counts:  # otherwise no release is on it
        ledger.void(reason)
    raise LedgerError(
        f"{reason}: no guarantee holds for the model. Only step(batch) may train it: leave out other "
        "calls of optimizer.step(). If the change did not depend on the records (weights that were "
        "loaded, averaged or clamped), call step.adopt_weights() right after it."
    )
