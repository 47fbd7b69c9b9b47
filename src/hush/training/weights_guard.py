"""Guard of released weights and buffers: changed outside of a step, or trained on another ledger.

A raw `optimizer.step()` beside the private one, or batch norm running in training mode between two
steps, changes the released model without a charge. torch counts the writes to each tensor. Fused
optimizers, batch norm kernels and `.data` write without a count, so norms are compared as well; on a GPU
the result is read at the next `batches` or `spent`, because reading it waits for the GPU.
"""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hush.accounting.ledger import Ledger
from hush.core.errors import EarlierRun, LedgerError
from hush.gradients.tree import local_shard, submodules


@dataclass(eq=False)
class _Accepted:
    """Weights and buffers of a model after a step or an adoption on one ledger."""

    ledger: str
    """Identity of the ledger."""
    writes: dict[int, tuple[int, int]]
    """Address and number of writes of each tensor, by its `id`."""
    trained: set[int] = field(default_factory=set)
    """Parameters that steps on the ledger have trained, by `id`."""

    def has(self, value: Tensor) -> bool:
        return self.writes.get(id(value)) == _writes(value)


_ACCEPTED: Any = WeakIdKeyDictionary()
"""By tensor: the `_Accepted` of each model and ledger, because models may share parameters."""

_NORMS: "WeakKeyDictionary[nn.Module, Tensor]" = WeakKeyDictionary()
"""By model: norms of its parameters and buffers, which several steps on a model share."""


class WeightsGuard:
    """Detects weights and buffers that no private step has changed."""

    def __init__(
        self, model: nn.Module, ledger: Ledger, may_change: Callable[[], Collection[str]]
    ) -> None:
        """Guard of the model as it is now.

        Args:
            model: Trained model.
            ledger: Ledger of the steps.
            may_change: Names of buffers that forward passes change independently of the records.
        """
        self._model = model
        self._may_change = may_change
        self._accepted: dict[str, _Accepted] = {}
        """By ledger."""
        self._values, self._now = self._read()
        self._own = self._by_id()
        """Writes to each tensor, by its `id`, when it was last accepted."""
        self._measured: list[bool] = []
        """Whether the norm of each value is compared."""
        self._moved: Tensor | None = None
        """Whether a norm has changed outside of a step, on the device; None: not compared."""
        self._others = self._trained_elsewhere(ledger)
        """Other ledgers whose runs have trained some of the parameters."""
        _NORMS.setdefault(model, self._norms())
        self.warn_of_other_ledgers(stacklevel=4)

    def adopt(self, ledger: Ledger, trained: Collection[Tensor] = ()) -> None:
        """Accept the current weights and buffers in all steps on the ledger.

        Args:
            ledger: Ledger of the steps.
            trained: Parameters that a step charged to it has just moved; empty: none was.
        """
        self._values, self._now = self._read()
        writes = self._own = self._by_id()
        accepted = self._accepted.setdefault(ledger.identity, _Accepted(ledger.identity, {}))
        if accepted.writes.keys() != writes.keys():
            for value in self._values:
                records = _ACCEPTED.setdefault(value, [])
                if accepted not in records:
                    records.append(accepted)
        accepted.writes = writes
        if trained:
            accepted.trained.update(map(id, trained))
        else:
            self._moved = None  # after a step, the GPU's findings before it are still to be read
            self._others |= self._trained_elsewhere(ledger)
        _NORMS[self._model] = self._norms()

    def unchanged(self) -> bool:
        """Whether torch has counted no write since the last step or adoption."""
        self._measured = []  # a probe finds other buffers that may change
        return self._read()[1] == self._now

    def accept_writes(self, ledger: Ledger) -> None:
        """Accept counted writes that have left all values as they were."""
        self._values, self._now = self._read()
        self._own = self._by_id()
        if ledger.identity in self._accepted:
            self._accepted[ledger.identity].writes = self._own

    def check(self, ledger: Ledger, *, wait: bool = True) -> None:
        """Raise if weights or buffers were changed outside of the steps on the ledger.

        Changed weights void a ledger that has charges.

        Args:
            ledger: Ledger of the steps.
            wait: Wait for a GPU that compares norms.
        """
        values, now = self._read()
        if now != self._now:
            self._check_writes(ledger)
            self._values, self._now = values, now
            self._own = self._by_id()
        norms, before = self._norms(), _NORMS.get(self._model)
        if before is None or norms.shape != before.shape or norms.device != before.device:
            return
        if norms.is_cpu and torch.equal(norms, before):
            return
        moved = ((norms != before) & ~(norms.isnan() & before.isnan())).any()
        self._moved = moved if self._moved is None else self._moved | moved
        if (wait or not moved.is_cuda) and bool(self._moved):
            _void(ledger)

    def _check_writes(self, ledger: Ledger) -> None:
        """Raise unless this step, or another on the ledger, made all counted writes."""
        buffers, elsewhere = [], False
        for path, module in self._model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is None or self._own.get(id(value)) == _writes(value):
                        continue
                    known = [each for each in _ACCEPTED.get(value, ()) if each.ledger == ledger.identity]
                    if any(each.has(value) for each in known):
                        elsewhere = True
                    elif table is module._parameters:
                        _void(ledger)
                    else:
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
        if elsewhere:
            _NORMS.pop(self._model, None)

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

    def _read(self) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """Parameters and buffers, and the address and number of writes of each."""
        values, writes = [], []
        for module in submodules(self._model):
            for table in (module._parameters, module._buffers):
                for value in table.values():
                    if value is not None:
                        values.append(value)
                        writes.append(_writes(value))
        return values, writes

    def _by_id(self) -> dict[int, tuple[int, int]]:
        return dict(zip(map(id, self._values), self._now, strict=True))

    def _trained_elsewhere(self, ledger: Ledger) -> set[str]:
        """Other ledgers under which a parameter was trained to its present value."""
        return {
            other.ledger
            for value in self._values
            for other in _ACCEPTED.get(value, ())
            if other.ledger != ledger.identity and id(value) in other.trained and other.has(value)
        }

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Norms of the parameters and buffers that no pass may change."""
        if len(self._measured) != len(self._values):
            skipped = {id(self._model.get_buffer(name)) for name in self._may_change()}
            self._measured = [
                id(value) not in skipped and value.is_floating_point() and value.numel() > 0
                for value in self._values
            ]
        values = list(compress(self._values, self._measured))
        if not all(type(value) is nn.Parameter for value in values):
            values = [value for value in map(local_shard, values) if value.numel()]
        return torch.stack(torch._foreach_norm(values)) if values else torch.zeros(0)


def _writes(value: Tensor) -> tuple[int, int]:
    """Address and number of writes of a tensor."""
    if type(value) is not nn.Parameter:
        value = getattr(value, "_local_tensor", value)  # shard of a parameter split over ranks
    if value.is_meta or value.layout is not torch.strided:
        return id(value), value._version
    return value.data_ptr(), -1 if value.is_inference() else value._version


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
