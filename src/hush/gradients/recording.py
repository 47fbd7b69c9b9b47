"""Recording of per-sample gradients on a gradient tape, with one forward and one backward pass.

The model runs under `torch.vmap` with each record in a batch of one, so its loss does not depend on
other records. `Recording`, a torch function mode, intercepts every torch call. A layer with a rule
(`rules`) is computed for all records at once and stores the factors of its weights' per-sample
gradients. Other uses of a parameter, or of a value that depends only on parameters, use a per-sample
copy (a view without memory), and autograd computes its gradient. The backward pass does not sum a
weight's gradient over records.

Some models do not support `torch.vmap`, e.g. because they branch on a value. Autograd then processes one
record at a time (`one_by_one`, determined by `probe`).

The hooks of gradient checkpointing would run outside of `torch.vmap`. Checkpointed activations are
therefore stored instead of recomputed: gradients are unchanged, but no memory is saved.
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
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from hush.core.errors import DataError, HushError, Unsupported
from hush.gradients.direct import direct_chain, direct_tape, runs_directly
from hush.gradients.models import WHOLE, WholeModules, is_frozen_quantized
from hush.gradients.precision import autocast_dtype, precise_under_autocast, to_autocast_dtype
from hush.gradients.rules import RULES, Layer, PerSampleCopy, Weight
from hush.gradients.rules.attention import determinism_restored
from hush.gradients.tape import GradientTape, tape_of_uses
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import Loss, Views, call_loss, call_model, tree_leaves, tree_map


class NotVectorized(Unsupported):
    """Raised if `torch.vmap` does not support a model or loss."""


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
    """Record the per-sample gradients of a batch on a gradient tape.

    Args:
        model: Model; only trainable parameters are recorded.
        loss: Loss with one value per record.
        inputs: A tensor, or a tuple or dictionary of tensors, with records along the first dimension.
        targets: Targets, with records along the first dimension.
        views: Function that returns augmented views of a record. Its loss is the mean over the views.
        one_by_one: Whether to process each record separately with autograd (`Probed.one_by_one`).
        modules: Access to the parameters, which may be sharded over ranks.
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
    """Per-sample losses of a batch, computed as in `record`: (records,)."""
    records, device = len(next(tree_leaves(inputs))), next(model.parameters()).device
    if records == 0:
        return torch.zeros(0, device=device)
    if one_by_one:
        with torch.enable_grad():  # for models that compute gradients in forward()
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
    """Gradient tape of materialised gradients, from one forward and one backward pass per record."""
    if modules.sharded:
        raise Unsupported(
            "torch.vmap does not support the model (e.g. it branches on a value), and its parameters "
            "are sharded: ranks would gather weights in different orders and deadlock. Use "
            "torch.where instead of branches, or leave fully_shard out."
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
                    rows[name][row] = gradient.to_dense()  # embeddings may have sparse gradients
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
    """Loss of each record, with a separate random seed per record."""
    seeds = torch.randint(2**62, (len(next(tree_leaves(inputs))),)).tolist()
    for row, seed in enumerate(seeds):
        x, y = (tree_map(part, lambda value: value[row]) for part in (inputs, targets))  # noqa: B023
        with draws_from(seed, device), uncompiled(), data_errors_translated(model):
            value = _loss_of_record(model, loss, x, y, views)
        yield value


@contextmanager
def draws_from(seed: int, *devices: torch.device) -> Iterator[None]:
    """Context that seeds the generators of torch, NumPy and Python, and restores their states."""
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
    """States of the generators of Python and NumPy."""
    kind, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), kind, np.asarray(words).tobytes(), *rest


def _loss_of_record(model: nn.Module, loss: Loss, x: Any, y: Any, views: Views | None) -> Tensor:
    """Loss of one record: the mean over its views."""
    viewed = views(x) if views else tree_map(x, lambda value: value.unsqueeze(0))
    count = len(next(tree_leaves(viewed)))
    repeated = tree_map(y, lambda value: value.unsqueeze(0).expand(count, *value.shape))
    return call_loss(loss, call_model(model, viewed), repeated, count).mean()


def uncompiled() -> AbstractContextManager[None]:
    """Context that disables `torch.compile`."""
    if "torch._dynamo" not in sys.modules:  # slow import
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class Recording(TorchFunctionMode):
    """Torch function mode that collects the terms of per-sample gradients in one forward pass."""

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
        """Whether to compute losses without gradients. Rules still apply, because `vmap` does not
        support some layers."""
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
        """Additional input of captured layers, which ensures that their backward pass always runs."""
        self._copies: dict[int, PerSampleCopy] = {}
        self._hooks = _top_saved_tensors_default_hooks(True)
        self.level = 0
        """Nesting level of the `vmap` over records."""

    def losses(self, loss: Loss, inputs: Any, targets: Any, views: Views | None = None) -> Tensor:
        """Per-sample losses, averaged over views."""

        if views is None:  # outside of vmap, without interception
            inputs, targets = (tree_map(part, _AS_BATCH_OF_ONE) for part in (inputs, targets))

        def one_loss(x: Any, y: Any) -> Tensor:
            self.level = current_level()
            with self:
                if views is None:
                    return call_loss(loss, call_model(self._model, x), y, 1)
                return _loss_of_record(self._model, loss, x, y, views)

        try:
            with uncompiled(), self._quantized_layers_batched():
                losses = torch.vmap(one_loss, randomness="different")(inputs, targets)
                return losses if views else losses.squeeze(1)
        finally:
            self._last_operand = None

    @contextmanager
    def _quantized_layers_batched(self) -> Iterator[None]:
        """Context in which frozen quantized layers run for all records at once, outside of `vmap`.

        Inside of `vmap`, the input of a bitsandbytes layer does not require a gradient, and the layer
        calls kernels that have no derivative.
        """
        layers = [module for module in self._model.modules() if is_frozen_quantized(module)]
        own = [module.__dict__.get("forward") for module in layers]
        for module in layers:
            module.forward = partial(self._run_quantized, module.forward)
        try:
            yield
        finally:
            for module, forward in zip(layers, own, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def _run_quantized(self, forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.of_records_and_constants(x):
            return forward(x, *args, **kwargs)

        def rows(x: Tensor) -> Tensor:  # kernels may support at most three dimensions
            output: Tensor = forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
            return output

        with _pop_mode_temporarily():  # this mode is for calls inside of vmap
            return self.run_batched(rows, x)

    def release_copies(self) -> None:
        """Release per-sample copies, which form reference cycles with the graph."""
        for copy in self._copies.values():
            copy.release()
        self._copies = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _top_saved_tensors_default_hooks(True) != self._hooks:
            before = self._hooks
            with saved_tensors_hooks(_pack, _unpack):  # see the module docstring
                self._hooks = _top_saved_tensors_default_hooks(True)
                try:
                    return self.__torch_function__(func, types, args, kwargs)
                finally:
                    self._hooks = before
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None and func.__name__ == "__get__":  # attributes such as shape
            return func(*args)
        if rule is not None and (self.losses_only or torch.is_grad_enabled()):
            first = (kwargs.pop("input"),) if "input" in kwargs else ()
            output = rule(self, *first, *args, **kwargs)
            if output is not NotImplemented:
                return output
            args = (*first, *args)
        if func is custom_function_call and args[0].__name__.startswith("_NoopSaveInputs"):
            return torch.empty(0)  # for gradient checkpointing before torch 2.13
        batched, shared = _of_records_or_shared(args, kwargs)
        output = self._call_under_vmap(func, args, kwargs, per_sample=batched and shared)
        if shared and not batched and any(map(is_batchedtensor, tree_leaves(output))):
            # the call draws per record, e.g. dropout of a parameter
            return self._call_under_vmap(func, args, kwargs, per_sample=True)
        return output

    def _call_under_vmap(self, func: Any, args: Any, kwargs: Any, *, per_sample: bool) -> Any:
        """Call a function without a rule, on per-sample copies of shared values."""
        if per_sample and torch.is_grad_enabled() and not self.losses_only:
            args, kwargs = tree_map((args, kwargs), self.per_sample)
        if func in _CONVOLUTIONS:
            args, kwargs = tree_map((args, kwargs), to_autocast_dtype)
        if func in _FLOAT32:
            args, kwargs = tree_map((args, kwargs), precise_under_autocast)
        return func(*args, **kwargs)

    def by_record(self, value: Tensor) -> Tensor:
        """Values of all records, outside of `vmap`: (records, ...)."""
        values, dim = _unwrap_batched(value, self.level)
        if dim == 0:
            return values
        with temporarily_pop_interpreter_stack():
            if dim is None:
                return values.expand(self.records, *values.shape)
            return values.movedim(dim, 0)

    def as_weights(self, *values: Tensor | None) -> list[Weight | None] | None:
        """Arguments of a layer as weights, or None if the rule does not apply.

        The rule does not apply if no argument is a trained parameter, or if an argument is computed from
        parameters.
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
        """Whether x depends on the record and the other arguments are constants, as in a frozen layer.

        Such a layer is computed for all records at once. Returns False inside of a `vmap` of the model.
        """
        if current_level() != self.level or not is_batchedtensor(x):
            return False
        return not any(
            value is not None and (value.requires_grad or is_batchedtensor(value)) for value in constants
        )

    def run_batched(self, work: Callable[..., Any], *operands: Tensor) -> Any:
        """Call `work` outside of `vmap`, on tensors with records along the first dimension."""
        batched = [self.by_record(self.per_sample(value)) for value in operands]
        # faster than torch's context `temporarily_pop_interpreter_stack`
        interpreter = pop_dynamic_layer_stack()
        try:
            output = work(*batched)
        finally:
            push_dynamic_layer_stack(interpreter)
        if isinstance(output, Tensor):
            return _add_batch_dim(output, 0, self.level)
        return tree_map(output, lambda part: _add_batch_dim(part, 0, self.level))

    def operand(self, x: Tensor) -> Tensor:
        """Contiguous copy of an input in autocast's dtype, inside `run_batched`; caches the last."""
        dtype = autocast_dtype(x)
        if x.dtype == dtype and x.is_contiguous():
            return x
        if x.is_inference():  # has no version counter
            return x.to(dtype).contiguous()
        if self._last_operand is not None:
            last, version, operand = self._last_operand
            # the cached tensor is alive, so the identity is unique
            if last is x and version == x._version and operand.dtype == dtype:
                return operand
        operand = x.detach().to(dtype).contiguous()
        self._last_operand = x, x._version, operand
        return operand

    def capture(self, layer: Layer, *inputs: Tensor) -> Any:
        """Run a layer inside `run_batched`; its backward pass appends the terms."""
        if _are_functorch_transforms_active():
            raise NotVectorized("the model applies a torch.func transform to a trained layer")
        return _LayerFunction.apply(layer, self._anchor, *inputs)  # type: ignore[attr-defined]

    def per_sample(self, value: Tensor) -> Tensor:
        """Per-sample copy of a shared value that requires a gradient; other values are unchanged."""
        if is_batchedtensor(value) or not value.requires_grad:
            return value
        if id(value) not in self._copies:
            copy = PerSampleCopy(value, self.records)
            copy.output = self.run_batched(partial(self.capture, copy))
            self._copies[id(value)] = copy
        return self._copies[id(value)].output

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass; raise if a parameter has a gradient that was not recorded."""
        if not losses.requires_grad:
            return
        # a gradient of the parameter itself, or of its shard, would be a sum over records
        names, parameters = list(self.terms), list(self._parameters.values())
        parameters += self._modules.shards(names)
        with determinism_restored():
            _, *escaped = torch.autograd.grad(
                losses.sum(), [self._anchor, *parameters], allow_unused=True
            )
        for copy in self._copies.values():
            if copy.value._version != copy.version:
                raise NotVectorized(
                    "the model computes a value from parameters and modifies it in place (w = "
                    "self.weight * 2, then w[0] = 0). Create a new tensor instead."
                )
            if self._modules.sharded and id(copy.value) not in self._names:
                raise Unsupported(
                    "the model computes a value from sharded parameters alone (e.g. torch's "
                    "weight_norm): the weights are freed before its backward pass. Leave fully_shard "
                    "out, or freeze these parameters."
                )
            copy.append_terms(self._parameters, self.terms)
        unseen = [name for name, part in zip(names * 2, escaped, strict=False) if part is not None]
        if unseen:
            raise NotVectorized(
                f"the per-sample gradients of {', '.join(unseen)} were not recorded, e.g. because of "
                "compiled or scripted code, or an autograd.Function. Use plain torch operations, or "
                "freeze the parameters with requires_grad_(False)."
            )


class _LayerFunction(_SingleLevelFunction):
    """Autograd function of a `Layer`, without dispatch to torch.func transforms."""

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
        # detach, so the tape does not keep the graph alive
        saved = tuple([value.detach() for value in ctx.saved_tensors])
        return None, None, *ctx.layer.backward(grad, saved, ctx.needs_input_grad[2:])


_AS_BATCH_OF_ONE = methodcaller("unsqueeze", 1)


def _pack(value: Tensor) -> tuple[Tensor, int]:
    return value.detach(), value._version  # detach, to avoid a reference cycle with the graph


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    value, version = packed
    if value._version != version:
        raise RuntimeError("a tensor to be differentiated was modified by an inplace operation")
    return value


def _of_records_or_shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a call has per-sample tensors, and whether it has shared tensors with gradients."""
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
"""Functions that autocast computes in single precision; `vmap` decomposes them before autocast."""

_CONVOLUTIONS = {
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
}
"""Functions to which autocast does not apply under `vmap`."""


@contextmanager
def vmap_errors_translated(model: nn.Module) -> Iterator[None]:
    """Context that translates errors of `torch.vmap` to `NotVectorized` and errors about data to
    `DataError`."""
    try:
        with data_errors_translated(model):
            yield
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if isinstance(error, HushError) or not _OF_VMAP.search(str(error)):
            raise
        raise NotVectorized(
            "torch.vmap does not support the model or the loss, and per-sample gradients need it: "
            f"{str(error).splitlines()[0]}"
        ) from error


_OF_VMAP = re.compile(
    r"vmap|functorch|storage|Batching rule|not require grad|setup_context|modified (by an )?in-?place"
    r"|in-?place operation"
)


@contextmanager
def data_errors_translated(model: nn.Module) -> Iterator[None]:
    """Context that translates errors about dtypes, shapes or indices to `DataError`.

    The messages do not contain values of records.
    """
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, HushError):
            raise
        # these errors of Python, and errors about dimensions, are caused by code and not by data
        of_code = re.match("(list|tuple|string|range object|Dimension|pop) .*out of range", str(error))
        if re.search("out of (bounds|range)|not in the valid range", str(error)) and not of_code:
            raise DataError(
                "an index of a record is out of range: a label that is not a class, a token outside "
                "of the vocabulary, or a sequence that is too long (the value is private and not "
                "shown). Check labels and inputs against the model's sizes."
            ) from None
        text = str(error).split("\n", maxsplit=1)[0]
        reasons = [reason for pattern, reason in _MISMATCHES.items() if re.search(pattern, text)]
        if not reasons:
            raise
        kind = str(next(model.parameters()).dtype)
        raise DataError(reasons[0].format(text=text, kind=kind)) from error


_MISMATCHES = {
    "same (dtype|datatype)|mixed dtype|expected scalar type|[Ii]nput type": (
        "the model and the inputs, or the class weights of the loss, have different types ({text}). "
        "Pass inputs.to({kind}), a model of the inputs' type, or loss.to({kind}) for class weights."
    ),
    "target dtype|Expected dtype int32/int64 for index": (
        "the labels do not have an integer type ({text}). Pass targets.long(), or floating-point "
        "probabilities of shape (records, classes)."
    ),
    "can't be cast to the desired output type": (
        "the targets and the outputs have different types ({text}). Pass targets.float()."
    ),
    "scalar types: Long, Int": (
        "the indices of an embedding do not have an integer type ({text}). Pass inputs.long()."
    ),
    "multi-target not supported|spatial targets": (
        "the labels of a record do not have one class index per score vector ({text}). "
        "For outputs of shape (records, classes), pass labels of shape (records,): targets.squeeze(1)."
    ),
    "arget size[^s]": (
        "the outputs and targets of a record have different shapes ({text}), and broadcasting would "
        "compare records. Pass targets of the outputs' shape, e.g. targets.unsqueeze(1) for outputs "
        "of shape (records, 1)."
    ),
    "cannot be multiplied|Given (groups|normalized_shape)|must match the (existing )?size|Kernel size": (
        "the shapes of a record's tensors do not fit each other or the model ({text}). Compare the "
        "model's sizes with the shapes of the data, without the first dimension (records)."
    ),
}
"""Explanations of torch's errors about dtypes and shapes, which are public, by pattern."""
