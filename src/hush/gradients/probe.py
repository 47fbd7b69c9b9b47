"""Probe: runs a model on two synthetic records before the first draw.

The probe detects common mistakes and determines properties of the model that a training step needs.
Training itself is not monitored, because the caller is trusted (docs/guarantees/tape.md).
"""

import operator
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
from hush.gradients.tree import Loss, Views, call_model, local_shard, tree_leaves, tree_map

_DRAWS = 20
"""Number of passes for a model with random branches. A layer that is dropped with probability 1/2 is
unused in all passes over two records with probability 1e-12."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Tolerance (absolute and relative) for a record's loss; the order of additions in kernels may vary."""

_USES_STATE = re.compile(
    "escaped from inside a function being vmapped|backward through the graph a second time"
)
"""Error messages of torch for tensors from an earlier forward pass."""


@dataclass(frozen=True)
class Probed:
    """Properties of a model and a loss, determined with synthetic records.

    Args:
        unused: Names of trainable parameters on which the loss does not depend; they receive only noise.
        changing_buffers: Names of buffers that forward passes change independently of the records
            (`spectral_norm`). A training step restores them after each physical batch.
        one_by_one: Whether the model runs one record at a time, because `torch.vmap` does not support
            it.
        host_draws: Whether forward passes draw from NumPy's or Python's generator. All records of a
            physical batch share these draws.
        kept: Names of attributes (including lists and dictionaries) that forward passes write to but do
            not read, such as an attention map.
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
    """Determine properties of a model and a loss with passes over two synthetic records.

    The model, its buffers, its attributes and all random states are restored.
    """
    check_model(model, sharded=modules.sharded)
    state = _State(model)
    attempt = partial(_probe, model, loss, (inputs, targets), views, state, modules)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", ".*degrees of freedom"
        )  # standard deviation of a single record
        stack.enter_context(_same_draws(model))
        stack.callback(state.restore)
        stack.enter_context(uncompiled())
        try:
            if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
                # under vmap, scripted modules lose the gradients of later calls
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
    """Context for forward passes that restores buffers, and attributes that store activations."""
    places = [
        (model.get_submodule(path), last) for path, _, last in (name.rpartition(".") for name in kept)
    ]
    values = [getattr(module, last, None) for module, last in places]
    contents: list[Any] = [v.copy() if isinstance(v, (list, dict)) else None for v in values]
    before = {name: model.get_buffer(name) for name in names}
    copies = {name: buffer.clone() for name, buffer in before.items()}
    try:
        yield
    finally:
        for name, buffer in before.items():
            path, _, last = name.rpartition(".")
            model.get_submodule(path)._buffers[last] = buffer
            buffer.copy_(copies[name])
        for (module, last), value, content in zip(places, values, contents, strict=True):
            now = tree_leaves(getattr(module, last, None))
            if any(is_batchedtensor(leaf) or leaf.requires_grad for leaf in now):
                if isinstance(value, list):
                    value[:] = content
                elif isinstance(value, dict):
                    value.clear()
                    value.update(content)
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
    written = [value._version for value in tree_leaves(one_view)]
    versions = [value._version for value in model.parameters()]
    unused: tuple[str, ...] = ()
    host_draws = False
    buffers, after = [], []
    criterion = criterion_of(loss)
    loss_state = _State(criterion) if isinstance(criterion, nn.Module) else None
    # a running maximum, a running sum and a stored last value differ between two of these batches
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
        if [value._version for value in tree_leaves(one_view)] != written:
            raise Unsupported(
                "the model writes into its inputs, e.g. in a first layer with inplace=True, so the next "
                "pass over the same records has different inputs. Call `model, changes = "
                "hush.fix(model)`, or copy the inputs in forward()."
            )
        kept = state.kept()
        attributes = () if modules.sharded else tuple(kept)
        state.restore()
        if loss_state is not None:
            if loss_state.changed_buffers():
                raise _keeps_state(["the loss"])
            kept += ["the loss"] if loss_state.kept() else []
            loss_state.restore()
    if not modules.sharded and [value._version for value in model.parameters()] != versions:
        raise Unsupported("the model changes its parameters in forward(). Change them between steps.")
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
    """Raise if the loss of a record depends on other records of the batch.

    A private step processes each record separately. A model that compares records (a contrastive loss,
    batch statistics) would run but optimise a different objective. The check replaces one of two records
    by a copy of the other, which must not change the loss of the other record at the same position and
    with the same random draws.
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

    if needed:  # low precision may hide the dependence
        with suppress(RuntimeError, DataError):  # inputs or weights may have mixed types
            values([0, 1], autocast=False)
            needed = False
    try:
        chosen = [0, 1], [1, 0], [0, 0], [1, 1], [0]
        together, swapped, first, second, alone = (values(rows, autocast=needed) for rows in chosen)
        # statistics of a single record may be NaN
        defined = together.isnan().any() or not alone.isnan().any()
        if defined and together.shape == (2,) and _close(together, torch.stack([first[0], second[1]])):
            return
        # a sum or a mean: compare each record at both positions, which have different draws
        if defined and together.dim() == 0 and _close(together + swapped, first + second):
            return
    except DataError as error:
        # single records fit the model, so a shape mismatch means that the loss compares records
        if "do not fit each other" not in str(error):
            raise
    raise Unsupported(
        "the loss of a record depends on the other records of the batch: clipping one record's gradient "
        "would not bound its influence. Use a model and a loss that process records independently (no "
        "batch statistics, no mean over the batch, no comparisons between records, no broadcasting of "
        "outputs and targets with different shapes)."
    )


@torch.no_grad()
def check_padding_ignored(
    model: nn.Module, loss: Loss, pair: tuple[Any, Any], longer: tuple[Any, Any], probed: Probed
) -> None:
    """Raise if more padding changes the losses of records."""
    state = _State(model)
    values = []
    try:
        model.eval()  # disables dropout, whose draws depend on shapes
        for inputs, targets in (pair, longer):
            with _same_draws(model):
                values.append(
                    per_sample_losses(model, loss, inputs, targets, one_by_one=probed.one_by_one)
                )
    finally:
        state.restore()
    if not _close(*values):
        raise Unsupported(
            "the loss of a record depends on its padding: with padding to the longest record of a "
            "physical batch, the length of one record would change the gradients of others. Mask "
            "padding in forward() and in the loss (targets by pad_value=, e.g. (0, -100)), or pass a "
            "public length as pad_to=."
        )


def _keeps_state(names: list[str]) -> Unsupported:
    what = ", ".join(names[:3]) or "something"
    way_out = "Compute it anew in every call, or use torch.nn.GroupNorm, which keeps no statistics."
    if any("activation_post_process" in name for name in names):
        way_out = (
            "Calibrate the quantization ranges on public records, and freeze them with "
            "model.apply(torch.ao.quantization.disable_observer)."
        )
    return Unsupported(
        f"the model keeps {what} of the records after its forward pass: this state would affect the "
        f"gradients of other records without being clipped, or be released without noise. {way_out}"
    )


_TORCHS = frozenset(vars(nn.Module()))
"""Names of the attributes of every module."""


def _same_parts(first: Any, second: Any) -> bool:
    """Whether two lists or dictionaries contain the same objects."""
    parts = (part.values() if isinstance(part, dict) else part for part in (first, second))
    return len(first) == len(second) and all(map(operator.is_, *parts))


class _State:
    """Snapshot of buffers, attributes and containers of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = {n: (value, value.clone(), value._version) for n, value in model.named_buffers()}
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []
        for module in model.modules():
            self._tables.append((module.__dict__, dict(module.__dict__)))
            for name, value in module.__dict__.items():
                if name in ("_parameters", "_modules"):
                    continue  # these change when sharded parameters are gathered
                if isinstance(value, dict):
                    self._tables.append((value, dict(value)))
                elif isinstance(value, list):
                    self._lists.append((value, list(value)))

    def changed_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that were written to or replaced, with their new values."""
        now = dict(self._model.named_buffers())
        replaced = [name for name, value in now.items() if is_batchedtensor(value)]
        if replaced:
            raise _keeps_state(replaced)
        changed = {}
        for name, value in now.items():
            own, copy, version = self._buffers.get(name, (None, None, 0))
            # Report in-place writes of equal values. The value comparison also detects writes
            # through `.data`.
            if value is not own or value._version != version or not _equal(value, copy):
                changed[name] = value.clone()
        return changed

    def kept(self) -> list[str]:
        """Names of changed attributes, tensors first."""
        modules = {id(module.__dict__): path for path, module in self._model.named_modules()}
        pairs = [*self._tables, *self._lists]
        mutated = {id(now) for now, before in pairs if not _same_parts(now, before)}
        changed = [
            (not isinstance(value, Tensor), f"{modules[id(table)]}.{name}".lstrip("."))
            for table, before in self._tables
            if id(table) in modules
            for name, value in table.items()
            if before.get(name) is not value or (name not in _TORCHS and id(value) in mutated)
        ]
        return [name for _, name in sorted(changed)]

    @torch.no_grad()
    def restore(self) -> None:
        for table, before in self._tables:
            if table.keys() != before.keys() or not _same_parts(table, before):
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
    """Inputs and targets with the first view of each record."""
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
