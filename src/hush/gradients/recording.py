"""Per-sample gradients of a batch: one forward and one backward pass, recorded on a gradient tape.

The model runs under `torch.vmap`, each record in a batch of one, so no other record enters its loss.
`Recording`, a torch function mode, intercepts every torch call. A layer with a rule (`rules`) is
computed for all records at once and keeps the factors of its weights' per-sample gradients. Any other
use of a parameter, or of a value derived from parameters alone, goes through a per-sample copy (a view,
not memory), whose gradient autograd returns. The backward pass is an ordinary one and never sums a
weight's gradient over records.

A model that `torch.vmap` cannot run, e.g. because it branches on a value, is computed one record at a
time by plain autograd (`one_by_one`; `probe` finds out).

Gradient checkpointing keeps the activations instead of recomputing them: its saved-tensor hooks would
run the segment again outside of `torch.vmap`. Gradients are the same, and no memory is saved.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_batched,
    current_level,
    is_batchedtensor,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd.function import _SingleLevelFunction, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hush.core.errors import DataError, HushError, Unsupported
from hush.gradients.direct import direct_chain, direct_tape, runs_directly
from hush.gradients.models import WHOLE, WholeModules
from hush.gradients.precision import autocast_dtype, precise_under_autocast, to_autocast_dtype
from hush.gradients.rules import RULES, Layer, PerSampleCopy, Weight
from hush.gradients.rules.attention import determinism_restored
from hush.gradients.tape import GradientTape, tape_of_uses
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import Loss, Views, call_loss, call_model, tree_leaves, tree_map


class NotVectorized(Unsupported):
    """A model or loss that `torch.vmap` cannot run for all records at once."""


def record(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    views: Views | None = None,
    *,
    one_by_one: bool = False,
    modules: WholeModules = WHOLE,
) -> GradientTape:
    """The gradient tape of one batch: the gradient of each record's own loss.

    Args:
        model: Only parameters that require a gradient take part.
        loss: One value per record.
        inputs: A tensor, or a tuple or dictionary of tensors for a model that takes several; records
            are along the first dimension of each.
        targets: As the inputs.
        views: If given, a record's loss is the mean over the views that this returns for it.
        one_by_one: Compute each record alone by plain autograd (`Probed.one_by_one`).
        modules: Modules, whose parameters may be split over ranks.
    """
    trainable = modules.trainable(model)
    device = next(iter(trainable.values())).device
    records = len(next(tree_leaves(inputs)))
    if records == 0:
        empty = {name: Dense(v.detach().new_zeros(0, *v.shape)) for name, v in trainable.items()}
        return GradientTape({**empty}, device)
    if one_by_one:
        return _record_one_by_one(model, loss, inputs, targets, views, trainable, modules)
    if views is None and runs_directly(inputs):
        chain = direct_chain(model, loss)
        if chain is not None:
            with data_errors_translated(model):
                return direct_tape(chain, loss, inputs, targets, trainable)
    recording = Recording(model, trainable, records, device, modules)
    try:
        with torch.enable_grad(), modules.gathering(), vmap_errors_translated(model):
            recording.backward(recording.losses(loss, inputs, targets, views))
    finally:
        recording.release_copies()
    return tape_of_uses(recording.terms, trainable, records, device)


@torch.no_grad()
def per_sample_losses(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    *,
    one_by_one: bool = False,
    modules: WholeModules = WHOLE,
) -> Tensor:
    """The per-sample losses of a batch, each computed as on the tape: (records,)."""
    records, device = len(next(tree_leaves(inputs))), next(model.parameters()).device
    if records == 0:
        return torch.zeros(0, device=device)
    if one_by_one:
        with torch.enable_grad():  # for a model that differentiates in forward()
            values = _losses_one_by_one(model, loss, inputs, targets, None, device)
            return torch.stack([value.detach() for value in values])
    trainable = dict(model.named_parameters())
    recording = Recording(model, trainable, records, device, modules, losses_only=True)
    with modules.gathering(), vmap_errors_translated(model):
        return recording.losses(loss, inputs, targets)


def _record_one_by_one(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    views: Views | None,
    trainable: dict[str, nn.Parameter],
    modules: WholeModules,
) -> GradientTape:
    """The tape of materialised gradients, with one forward and one backward pass per record."""
    if modules.sharded:
        raise Unsupported(
            "torch.vmap cannot run the model for all records at once (it branches on a value, for "
            "example), and its parameters are sharded: ranks would gather weights in different orders "
            "and wait for each other forever. Choose with torch.where, or leave fully_shard out."
        )
    device = next(iter(trainable.values())).device
    records = len(next(tree_leaves(inputs)))
    rows = {name: value.detach().new_zeros(records, *value.shape) for name, value in trainable.items()}
    used: set[str] = set()
    with torch.enable_grad():
        losses = _losses_one_by_one(model, loss, inputs, targets, views, device)
        for row, value in enumerate(losses):
            if not value.requires_grad:
                continue
            gradients = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
            for name, gradient in zip(trainable, gradients, strict=True):
                if gradient is not None:
                    used.add(name)
                    rows[name][row] = gradient.to_dense()  # of a sparse table
    terms: dict[str, Term] = {name: Dense(gradients) for name, gradients in rows.items()}
    return GradientTape(terms, device, tuple(name for name in trainable if name not in used))


def _losses_one_by_one(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: Any,
    views: Views | None,
    device: torch.device,
) -> Iterator[Tensor]:
    """The loss of each record. The draws of a record do not depend on how much other records draw."""
    seeds = torch.randint(2**62, (len(next(tree_leaves(inputs))),)).tolist()
    for row, seed in enumerate(seeds):
        x, y = (tree_map(part, lambda value: value[row]) for part in (inputs, targets))  # noqa: B023
        with draws_from(seed, device), uncompiled(), data_errors_translated(model):
            value = _loss_of_record(model, loss, x, y, views)
        yield value


@contextmanager
def draws_from(seed: int, *devices: torch.device) -> Iterator[None]:
    """Context in which torch, NumPy and Python draw from a seed; their states are restored after it."""
    cuda = [device for device in devices if device.type == "cuda"]
    with host_draws_restored(), torch.random.fork_rng(cuda):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        yield


@contextmanager
def host_draws_restored() -> Iterator[None]:
    """Context that restores the generators of Python and NumPy."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def host_states() -> tuple[Any, ...]:
    """States of the generators of Python and NumPy, which records of a physical batch share."""
    kind, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), kind, np.asarray(words).tobytes(), *rest


def _loss_of_record(model: nn.Module, loss: Loss, x: Any, y: Any, views: Views | None) -> Tensor:
    """The loss of one record, the mean over its views."""
    viewed = views(x) if views else tree_map(x, lambda value: value.unsqueeze(0))
    count = len(next(tree_leaves(viewed)))
    repeated = tree_map(y, lambda value: value.unsqueeze(0).expand(count, *value.shape))
    return call_loss(loss, call_model(model, viewed), repeated, count).mean()


def uncompiled() -> AbstractContextManager[None]:
    """Context in which modules compiled by `torch.compile` run as written."""
    if "torch._dynamo" not in sys.modules:  # loading it takes seconds
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class Recording(TorchFunctionMode):
    """Torch function mode of one forward pass, which collects the terms of per-sample gradients."""

    def __init__(
        self,
        model: nn.Module,
        trainable: dict[str, nn.Parameter],
        records: int,
        device: torch.device,
        modules: WholeModules,
        *,
        losses_only: bool = False,
    ) -> None:
        super().__init__()
        self.losses_only = losses_only
        """Apply rules without gradients: some layers have no batching rule of torch's own."""
        self.records = records
        self.device = device
        self.terms: dict[str, list[Term]] = {name: [] for name in trainable}
        """One term for each use of a parameter."""
        self._model = model
        self._parameters = trainable
        self._modules = modules
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._last_operand: tuple[Tensor, int, Tensor] | None = None
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        """Input of every captured layer, so that its backward pass always runs."""
        self._copies: dict[int, PerSampleCopy] = {}
        self._hooks = _top_saved_tensors_default_hooks(True)
        self.level = 0
        """Level of the `vmap` over records among nested ones."""

    def losses(self, loss: Loss, inputs: Any, targets: Any, views: Views | None = None) -> Tensor:
        """Per-sample losses, each the mean over the record's views."""

        if views is None:  # outside of vmap, where it is not intercepted
            inputs, targets = (tree_map(part, _AS_BATCH_OF_ONE) for part in (inputs, targets))

        def one_loss(x: Any, y: Any) -> Tensor:
            self.level = current_level()
            with self:
                if views is None:
                    return call_loss(loss, call_model(self._model, x), y, 1)
                return _loss_of_record(self._model, loss, x, y, views)

        try:
            with uncompiled():
                losses = torch.vmap(one_loss, randomness="different")(inputs, targets)
                return losses if views else losses.squeeze(1)
        finally:
            self._last_operand = None

    def release_copies(self) -> None:
        """Release per-sample copies: each holds the graph that holds it."""
        for copy in self._copies.values():
            copy.release()
        self._copies = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _top_saved_tensors_default_hooks(True) != self._hooks:
            before = self._hooks
            with saved_tensors_hooks(_pack, _unpack):  # see the module's docstring
                self._hooks = _top_saved_tensors_default_hooks(True)
                try:
                    return self.__torch_function__(func, types, args, kwargs)
                finally:
                    self._hooks = before
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None and func.__name__ == "__get__":  # an attribute, such as shape
            return func(*args)
        if rule is not None and (self.losses_only or torch.is_grad_enabled()):
            first = (kwargs.pop("input"),) if "input" in kwargs else ()
            output = rule(self, *first, *args, **kwargs)
            if output is not NotImplemented:
                return output
            args = (*first, *args)
        if func is custom_function_call and args[0].__name__.startswith("_NoopSaveInputs"):
            return torch.empty(0)  # of gradient checkpointing, before torch 2.13
        batched, shared = _of_records_or_shared(args, kwargs)
        output = self._call_under_vmap(func, args, kwargs, per_sample=batched and shared)
        if shared and not batched and any(map(is_batchedtensor, tree_leaves(output))):
            # it draws for each record, as dropout of a parameter does
            return self._call_under_vmap(func, args, kwargs, per_sample=True)
        return output

    def _call_under_vmap(self, func: Any, args: Any, kwargs: Any, *, per_sample: bool) -> Any:
        """The result of a call without a rule, with per-sample copies of shared values."""
        if per_sample and torch.is_grad_enabled() and not self.losses_only:
            args, kwargs = tree_map((args, kwargs), self.per_sample)
        if func in _CONVOLUTIONS:
            args, kwargs = tree_map((args, kwargs), to_autocast_dtype)
        if func in _FLOAT32:
            args, kwargs = tree_map((args, kwargs), precise_under_autocast)
        return func(*args, **kwargs)

    def by_record(self, value: Tensor) -> Tensor:
        """The values of all records, outside of `vmap`: (records, ...)."""
        values, dim = _unwrap_batched(value, self.level)
        if dim == 0:
            return values
        with temporarily_pop_interpreter_stack():
            if dim is None:
                return values.expand(self.records, *values.shape)
            return values.movedim(dim, 0)

    def as_weights(self, *values: Tensor | None) -> list[Weight | None] | None:
        """The arguments of a layer as weights; None if its rule does not apply.

        The rule does not apply if none of them is trained, or one was itself derived from parameters.
        """
        weights: list[Weight | None] = []
        trained = False
        for value in values:
            name = self._names.get(id(value))
            if value is None:
                weights.append(None)
            elif name is not None:
                weights.append(Weight(value.detach(), self.terms[name]))
                trained = True
            elif value.requires_grad or is_batchedtensor(value):
                return None
            else:
                weights.append(Weight(value))
        return weights if trained else None

    def of_records_and_constants(self, x: Tensor, *constants: Tensor | None) -> bool:
        """Whether x depends on the record and the rest are constants: a frozen layer.

        Such a layer is computed for all records at once. False inside of a `vmap` of the model's own.
        """
        if current_level() != self.level or not is_batchedtensor(x):
            return False
        return not any(
            value is not None and (value.requires_grad or is_batchedtensor(value)) for value in constants
        )

    def run_batched(self, work: Callable[..., Any], *operands: Tensor) -> Any:
        """`work(*operands)` outside of `vmap`, on tensors whose first dimension is the records."""
        batched = [self.by_record(self.per_sample(value)) for value in operands]
        # torch's context for this, `temporarily_pop_interpreter_stack`, takes longer than the rest
        interpreter = pop_dynamic_layer_stack()
        try:
            output = work(*batched)
        finally:
            push_dynamic_layer_stack(interpreter)
        if isinstance(output, Tensor):
            return _add_batch_dim(output, 0, self.level)
        return tree_map(output, lambda part: _add_batch_dim(part, 0, self.level))

    def operand(self, x: Tensor) -> Tensor:
        """An input in autocast's dtype and contiguous, inside `run_batched`; the last one is kept."""
        dtype = autocast_dtype(x)
        if x.dtype == dtype and x.is_contiguous():
            return x
        if x.is_inference():  # which has no version
            return x.to(dtype).contiguous()
        if self._last_operand is not None:
            last, version, operand = self._last_operand
            # the last one is alive, so no other tensor is at its address
            if last is x and version == x._version and operand.dtype == dtype:
                return operand
        operand = x.detach().to(dtype).contiguous()
        self._last_operand = x, x._version, operand
        return operand

    def capture(self, layer: Layer, *inputs: Tensor) -> Any:
        """The layer's output, inside `run_batched`; its backward pass appends the weights' terms."""
        if _are_functorch_transforms_active():
            raise NotVectorized("the model applies a torch.func transform to a layer that is trained")
        return _LayerFunction.apply(layer, self._anchor, *inputs)  # type: ignore[attr-defined]

    def per_sample(self, value: Tensor) -> Tensor:
        """A copy for each record of a value that all share, if it has a gradient."""
        if is_batchedtensor(value) or not value.requires_grad:
            return value
        if id(value) not in self._copies:
            copy = PerSampleCopy(value, self.records)
            copy.output = self.run_batched(partial(self.capture, copy))
            self._copies[id(value)] = copy
        return self._copies[id(value)].output

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass, and raise if a gradient reaches a parameter past the tape."""
        if not losses.requires_grad:
            return
        # a gradient that reaches a parameter itself, or its shard, was summed over records
        names, parameters = list(self.terms), list(self._parameters.values())
        parameters += self._modules.shards(names)
        with determinism_restored():
            _, *escaped = torch.autograd.grad(
                losses.sum(), [self._anchor, *parameters], allow_unused=True
            )
        for copy in self._copies.values():
            if copy.value._version != copy.version:
                raise NotVectorized(
                    "the model changes a value in place that it derives from its parameters, after it "
                    "was used (w = self.weight * 2, then w[0] = 0). Make a new tensor instead."
                )
            if self._modules.sharded and id(copy.value) not in self._names:
                raise Unsupported(
                    "the model derives a value from its parameters alone (as torch's weight_norm does), "
                    "and they are sharded over ranks: the weights that its gradient needs are freed by "
                    "then. Leave fully_shard out, or freeze what it is derived from."
                )
            copy.append_terms(self._parameters, self.terms)
        unseen = [name for name, part in zip(names * 2, escaped, strict=False) if part is not None]
        if unseen:
            raise NotVectorized(
                f"the tape does not see how {', '.join(unseen)} enter(s) the loss, and so cannot clip "
                "the gradient record by record: is it used in compiled or scripted code, or in an "
                "autograd.Function? Use plain torch operations there, or freeze it with "
                "requires_grad_(False)."
            )


class _LayerFunction(_SingleLevelFunction):
    """A `Layer` as an autograd function: `autograd.Function` less its dispatch to transforms."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, anchor: Tensor, *inputs: Tensor) -> Any:
        output, saved = layer.forward(*inputs)
        ctx.layer = layer
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads if len(grads) > 1 else grads[0]
        # tensors that the tape keeps must not keep the graph
        saved = tuple([value.detach() for value in ctx.saved_tensors])
        return None, None, *ctx.layer.backward(grad, saved, ctx.needs_input_grad[2:])


_AS_BATCH_OF_ONE = methodcaller("unsqueeze", 1)


def _pack(value: Tensor) -> tuple[Tensor, int]:
    return value.detach(), value._version  # the tensor itself would hold the graph that holds it


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    value, version = packed
    if value._version != version:
        raise RuntimeError("a tensor to be differentiated was modified by an inplace operation")
    return value


def _of_records_or_shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a call takes a tensor of the record, and a shared one that has a gradient."""
    batched = shared = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
            if is_batchedtensor(leaf):
                batched = True
            elif leaf.requires_grad:
                shared = True
    return batched, shared


_FLOAT32 = {
    getattr(space, name)
    for space in (torch, Tensor, nn.functional)
    for name in (
        *("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "prod", "sum", "logsumexp"),
        *("layer_norm", "group_norm", "norm", "normalize", "cosine_similarity", "dist", "cdist"),
        *("pdist", "cross_entropy", "nll_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("mse_loss", "binary_cross_entropy_with_logits", "poisson_nll_loss", "cosine_embedding_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss", "multilabel_margin_loss", "multi_margin_loss"),
        *("soft_margin_loss", "triplet_margin_loss", "softplus"),
    )
    if hasattr(space, name)
}
"""Functions that autocast computes in single precision; under `vmap` they are taken apart before it."""

_CONVOLUTIONS = {
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
}
"""Functions that autocast does not reach under `vmap`."""


@contextmanager
def vmap_errors_translated(model: nn.Module) -> Iterator[None]:
    """Context that turns errors of `torch.vmap` into `NotVectorized`, and data errors likewise."""
    try:
        with data_errors_translated(model):
            yield
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if isinstance(error, HushError) or not _OF_VMAP.search(str(error)):
            raise
        raise NotVectorized(
            "torch.vmap cannot run the model or the loss for all records at once, and each record's own "
            f"gradient is clipped: {str(error).splitlines()[0]}"
        ) from error


_OF_VMAP = re.compile(
    r"vmap|functorch|storage|Batching rule|not require grad|setup_context|modified (by an )?in-?place"
    r"|in-?place operation"
)


@contextmanager
def data_errors_translated(model: nn.Module) -> Iterator[None]:
    """Context that names dtypes, shapes or indices that do not fit, without a record's values."""
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, HushError):
            raise
        # Python's own errors, and those on dimensions, are of the code
        of_code = re.match("(list|tuple|string|range object|Dimension|pop) .*out of range", str(error))
        if re.search("out of (bounds|range)|not in the valid range", str(error)) and not of_code:
            raise DataError(
                "an index of some record is out of range: a label that is no class, a token that is not "
                "in the embedding, or a sequence longer than its positions (the value is private and "
                "not shown). Check the labels and inputs against the model's sizes."
            ) from None
        text = str(error).split("\n", maxsplit=1)[0]
        reasons = [reason for pattern, reason in _MISMATCHES.items() if re.search(pattern, text)]
        if not reasons:
            raise
        kind = str(next(model.parameters()).dtype)
        raise DataError(reasons[0].format(text=text, kind=kind)) from error


_MISMATCHES = {
    "same (dtype|datatype)|mixed dtype|expected scalar type|[Ii]nput type": (
        "the inputs, or class weights of the loss, are of another type than the model, which computes "
        "in {kind} ({text}): torch does not convert them. Pass inputs.to({kind}), or a model of the "
        "inputs' type; of weights, loss.to({kind})."
    ),
    "target dtype|Expected dtype int32/int64 for index": (
        "the labels are of a type that numbers no classes ({text}). Pass targets.long(), or "
        "floating-point probabilities of shape (records, classes)."
    ),
    "can't be cast to the desired output type": (
        "the targets are of another type than the outputs ({text}): a loss of differences needs "
        "floating-point ones. Pass targets.float()."
    ),
    "scalar types: Long, Int": (
        "numbers of an embedding's rows are of a type that numbers nothing ({text}). Pass inputs.long()."
    ),
    "arget size[^s]": (
        "the outputs and the targets of a record have different shapes ({text}): broadcast against "
        "each other they would compare records. Pass targets of the outputs' shape, e.g. "
        "targets.unsqueeze(1) for outputs of shape (records, 1)."
    ),
    "cannot be multiplied|Given (groups|normalized_shape)|must match the (existing )?size": (
        "the shapes of a record's tensors do not fit each other or the model ({text}). Check the "
        "model's sizes against the data's, without the first dimension, which is the records."
    ),
}
"""Patterns of torch's errors on dtypes and shapes, which are not private, and their meaning here."""
