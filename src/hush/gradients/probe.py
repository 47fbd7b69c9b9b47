"""Probe of a model on two synthetic records, before the first draw.

It detects mistakes of honest users, and properties of the model that a training step needs. Training
itself is not watched, because the caller is trusted (docs/guarantees/tape.md).
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from hush.core.errors import DataError, HushError, Unsupported
from hush.gradients.losses import criterion_of
from hush.gradients.models import WHOLE, WholeModules, check_model
from hush.gradients.recording import (
    NotVectorized,
    data_errors_translated,
    draws_from,
    host_states,
    per_sample_losses,
    record,
    uncompiled,
)
from hush.gradients.tree import Loss, Views, call_model, local_shard, tree_map

_DRAWS = 20
"""Passes in which a model that branches may leave a parameter out by chance: a layer dropped with
probability 1/2 is left out for two records in all of them once in 10**12 times."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Rounding tolerance of a record's loss, relative to it or to 1: some kernels add in an order of their
own, or group records (experts)."""

_USES_STATE = re.compile(
    "escaped from inside a function being vmapped|backward through the graph a second time"
)
"""torch's errors for a tensor that was kept since the last forward pass."""


@dataclass(frozen=True)
class Probed:
    """Properties of a model and a loss, found on synthetic records.

    Args:
        unused: Names of trainable parameters that the loss does not reach; they receive noise only.
        changing_buffers: Names of buffers that each forward pass changes in the same way for any records
            (`spectral_norm`). A training step restores them after each physical batch.
        one_by_one: Whether `torch.vmap` cannot run the model, which then runs one record at a time.
        host_draws: Whether a forward pass draws from NumPy's or Python's generator, which all records
            of a physical batch share.
        kept: Names of attributes that a forward pass sets and none reads, such as an attention map.
    """

    unused: tuple[str, ...] = ()
    changing_buffers: tuple[str, ...] = ()
    one_by_one: bool = False
    host_draws: bool = False
    kept: tuple[str, ...] = ()


def probe(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    views: Views | None = None,
    *,
    modules: WholeModules = WHOLE,
) -> Probed:
    """Properties of a model and a loss, from passes over two synthetic records.

    The model, its buffers, its attributes and all random states are restored.
    """
    check_model(model, sharded=modules.sharded)
    state = _State(model)
    attempt = partial(_probe, model, loss, (inputs, targets), views, state, modules)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*degrees of freedom")  # the deviation of a single record
        stack.enter_context(_same_draws(model))
        stack.callback(state.restore)
        stack.enter_context(uncompiled())
        try:
            if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
                # under vmap its executor would lose the gradients of all later calls
                raise NotVectorized("torch.vmap cannot run scripted modules.")
            return attempt(one_by_one=False)
        except Exception as error:
            refused = isinstance(error, HushError) and not isinstance(error, NotVectorized)
            if refused or isinstance(error, torch.OutOfMemoryError):
                raise
            kept = state.kept()
            state.restore()
            if _USES_STATE.search(str(error)):
                raise _keeps_state(kept) from error
            try:
                return attempt(one_by_one=True)
            except RuntimeError as alone:
                if _USES_STATE.search(str(alone)):
                    raise _keeps_state(state.kept()) from alone
                raise alone from error


@contextmanager
def buffers_restored(
    model: nn.Module, names: tuple[str, ...], kept: tuple[str, ...] = ()
) -> Iterator[None]:
    """Context of forward passes that restores buffers, and kept attributes that hold activations."""
    places = [
        (model.get_submodule(path), last) for path, _, last in (name.rpartition(".") for name in kept)
    ]
    values = [getattr(module, last, None) for module, last in places]
    before = {name: model.get_buffer(name) for name in names}
    copies = {name: buffer.clone() for name, buffer in before.items()}
    try:
        yield
    finally:
        for name, buffer in before.items():
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._buffers[last] = buffer
            buffer.copy_(copies[name])
        for (module, last), value in zip(places, values, strict=True):
            now = getattr(module, last, None)
            if isinstance(now, Tensor) and (is_batchedtensor(now) or now.requires_grad):
                module.__dict__[last] = value


def _probe(
    model: nn.Module,
    loss: Loss,
    pair: tuple[Any, Any],
    views: Views | None,
    state: "_State",
    modules: WholeModules,
    *,
    one_by_one: bool,
) -> Probed:
    recorded = partial(record, model, loss, views=views, one_by_one=one_by_one, modules=modules)
    losses = partial(per_sample_losses, model, loss, one_by_one=one_by_one, modules=modules)
    one_view = first_views(views, *pair)
    versions = [value._version for value in model.parameters()]
    unused: tuple[str, ...] = ()
    host_draws = False
    buffers, after = [], []
    criterion = criterion_of(loss)
    loss_state = _State(criterion) if isinstance(criterion, nn.Module) else None
    # a running maximum or sum of the records, or the last one, differs after some two of these
    for rows in ([0, 1], [0, 0], [1, 1]):
        with _same_draws(model):
            drawn = host_states()
            tape = recorded(*tree_map(pair, lambda value: value[rows]))  # noqa: B023
            host_draws = host_draws or drawn != host_states()
        if rows == [0, 1]:
            unused = tape.unused_parameters
        buffers.append(state.changed_buffers())
        with _same_draws(model):
            after.append(losses(*one_view))
        kept = state.kept()
        attributes = () if modules.sharded else tuple(kept)
        state.restore()
        if loss_state is not None:
            if loss_state.changed_buffers():
                raise _keeps_state(["the loss"])
            kept += ["the loss"] if loss_state.kept() else []
            loss_state.restore()
    if not modules.sharded and [value._version for value in model.parameters()] != versions:
        raise Unsupported(
            "the model changes its parameters in forward(), before their gradients are computed. Change "
            "them between steps."
        )
    changing = sorted({name for changed in buffers for name in changed})
    dependent = [
        name
        for name in changing
        if not all(_equal(buffers[0].get(name), changed.get(name)) for changed in buffers)
    ]
    if dependent or not all(_close(after[0], values) for values in after):
        raise _keeps_state(dependent or kept)
    if not one_by_one:
        check_independent_losses(model, loss, *one_view)
    for _ in range(_DRAWS if one_by_one else 0):
        if unused:
            other = recorded(*pair).unused_parameters
            unused = tuple(name for name in unused if name in other)
    return Probed(unused, tuple(changing), one_by_one, host_draws, attributes)


@torch.no_grad()
def check_independent_losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> None:
    """Raise if the loss of a record in a plain batch depends on the other record.

    A private step gives each record to the model on its own. A model that compares records, such as one
    with a contrastive loss or batch statistics, would run and learn something else. A record must keep
    its loss when the other one is replaced by a copy of it, at the same place and with the same draws.
    """
    kind = next(model.parameters()).device.type
    needed = torch.is_autocast_enabled(kind)
    state = _State(model)

    def values(rows: list[int], *, autocast: bool) -> Tensor:
        x, y = tree_map((inputs, targets), lambda value: value[rows])
        with torch.autocast(kind, enabled=autocast), _same_draws(model), data_errors_translated(model):
            try:
                return loss(call_model(model, x), y)
            finally:
                state.restore()

    if needed:  # low precision hides one record in another
        with suppress(RuntimeError, DataError):  # unless inputs or weights are of mixed types
            values([0, 1], autocast=False)
            needed = False
    try:
        chosen = [0, 1], [0, 0], [1, 1], [0]
        together, first, second, alone = (values(rows, autocast=needed) for rows in chosen)
        # the standard deviation of one record is NaN
        defined = together.isnan().any() or not alone.isnan().any()
        if defined and together.shape == (2,) and _close(together, torch.stack([first[0], second[1]])):
            return
        if defined and together.dim() == 0 and _close(2 * together, first + second):  # a sum or a mean
            return
    except DataError as error:
        if "do not fit each other" not in str(error):  # as they did for each record alone
            raise
    raise Unsupported(
        "the loss of a record changes with who else is in the batch: clipping one record's gradient "
        "would not bound its influence, and a private step computes each record alone. Use a model and "
        "a loss that treat records one by one (no batch statistics, no mean over the batch, no "
        "comparisons between records, no outputs and targets whose shapes differ and broadcast)."
    )


@torch.no_grad()
def check_padding_ignored(
    model: nn.Module, loss: Loss, pair: tuple[Any, Any], longer: tuple[Any, Any], probed: Probed
) -> None:
    """Raise if the losses of records change with one more position of padding."""
    state = _State(model)
    values = []
    try:
        model.eval()  # without draws, which follow shapes
        for inputs, targets in (pair, longer):
            with _same_draws(model):
                values.append(
                    per_sample_losses(model, loss, inputs, targets, one_by_one=probed.one_by_one)
                )
    finally:
        state.restore()
    if not _close(*values):
        raise Unsupported(
            "the loss of a record changes with its padding: padded to the longest of a physical batch, "
            "the length of one record would move the gradients of the others. Mask padding in forward() "
            "and in the loss (targets by pad_value=, e.g. (0, -100)), or pass pad_to= a public length."
        )


def _keeps_state(names: list[str]) -> Unsupported:
    what = ", ".join(names[:3]) or "something"
    way_out = "Compute it anew in every call, or use torch.nn.GroupNorm, which keeps no statistics."
    if any("activation_post_process" in name for name in names):
        way_out = (
            "Observe the ranges of quantization on public records before, and freeze them with "
            "model.apply(torch.ao.quantization.disable_observer)."
        )
    return Unsupported(
        f"the model keeps {what} of the records from its forward pass: what one record leaves there "
        f"enters the gradients of others without being clipped, or is released without noise. {way_out}"
    )


class _State:
    """Buffers, attributes and containers of a model's modules at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = {n: (value, value.clone(), value._version) for n, value in model.named_buffers()}
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        for module in model.modules():
            self._tables.append((module.__dict__, dict(module.__dict__)))
            for name, value in module.__dict__.items():
                if name in ("_parameters", "_modules"):
                    continue  # gathering sharded parameters changes them
                if isinstance(value, dict):
                    self._tables.append((value, dict(value)))
                elif isinstance(value, list):
                    self._lists.append((value, list(value)))

    def changed_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that were written to or replaced."""
        now = dict(self._model.named_buffers())
        replaced = [name for name, value in now.items() if is_batchedtensor(value)]
        if replaced:
            raise _keeps_state(replaced)
        changed = {}
        for name, value in now.items():
            own, copy, version = self._buffers.get(name, (None, None, 0))
            # also if it has converged, or was written through .data
            if value is not own or value._version != version or not _equal(value, copy):
                changed[name] = value.clone()
        return changed

    def kept(self) -> list[str]:
        """Names of the attributes that have changed, tensors first."""
        modules = {id(module.__dict__): path for path, module in self._model.named_modules()}
        changed = [
            (not isinstance(value, Tensor), f"{modules[id(table)]}.{name}".lstrip("."))
            for table, before in self._tables
            if id(table) in modules
            for name, value in table.items()
            if before.get(name) is not value
        ]
        return [name for _, name in sorted(changed)]

    @torch.no_grad()
    def restore(self) -> None:
        for table, before in self._tables:
            if table.keys() != before.keys() or any(table[key] is not before[key] for key in before):
                table.clear()
                table.update(before)
        for values, parts in self._lists:
            values[:] = parts
        for name, (value, copy, _) in self._buffers.items():
            if not _equal(value, copy):
                value.copy_(copy)
            self._buffers[name] = value, copy, value._version


def _same_draws(model: nn.Module) -> AbstractContextManager[None]:
    """Context that seeds torch, NumPy and Python with a fixed seed."""
    return draws_from(0, *{value.device for value in model.parameters()})


def first_views(views: Views | None, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Records as the model takes them: the first view of each."""
    if views is None:
        return inputs, targets
    by_record = torch.vmap(views, randomness="different")(inputs)
    return tree_map(by_record, lambda value: value[:, 0]), targets


def _equal(value: Tensor | None, other: Tensor | None) -> bool:
    if value is None or other is None:
        return value is other
    value, other = local_shard(value), local_shard(other)
    return value.shape == other.shape and torch.equal(value.nan_to_num(), other.nan_to_num())


def _close(values: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE.get(values.dtype, 0.0)
    return torch.allclose(values, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
