"""Interception of every torch call of a forward pass, which collects per-sample gradients by layer.

`Recording` is a torch function mode, in place of the module hooks of other libraries. A layer with a
rule (`rules/`) is computed for all records at once and leaves the outer-product factors of its weights'
per-sample gradients; any other use of a parameter, or of a value derived from parameters alone, goes
through a per-sample copy (a view, not memory), whose gradient autograd returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, _unwrap_batched, current_level, is_batchedtensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from hush.core.errors import Unsupported
from hush.gradients.checks.calls import call_loss
from hush.gradients.checks.data_dependence import (
    CONDITIONS,
    NUMBERS,
    DataDependentBranch,
    common_truth_value,
    single_record_number,
)
from hush.gradients.checks.isolation import check_call, translate_vmap_errors
from hush.gradients.rules import RULES
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import call_model, tree_leaves, tree_map

if TYPE_CHECKING:
    from hush.gradients.recording import Loss, Views


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter's value, and the list its terms are appended to (None: it is not trained)."""

    value: Tensor
    terms: list[Term] | None = None


class Layer(Protocol):
    """A layer with a backward pass of its own, without the gradient of its weights."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
        """From the inputs, records first: the output, no view of an input, and tensors to save."""

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Append the terms of the weights' per-sample gradients; return the inputs' gradients.

        Args:
            grad: gradient of the output.
            saved: what `forward` saved.
            needed: whether each input's gradient is needed; None is returned where it is not.
        """


class Recording(TorchFunctionMode):
    """Intercepts every torch call of one forward pass, and collects the per-sample gradients' terms."""

    def __init__(
        self,
        model: nn.Module,
        trainable: dict[str, nn.Parameter],
        records: int,
        device: torch.device,
        *,
        losses_only: bool = False,
    ) -> None:
        super().__init__()
        self._losses_only = losses_only
        """Whether rules serve without gradients: some layers have no batching rule of torch's own."""
        self.records = records
        self.terms: dict[str, list[Term]] = {name: [] for name in trainable}
        """For each parameter, a term for each of its uses."""
        self.reads_values = False
        """Whether the model turned a tensor into a truth value or a number."""
        self._model = model
        self._state = [*model.parameters(), *model.buffers()]
        self._parameters = trainable
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        """An input of every captured layer, so that its backward pass always runs."""
        self._copies: dict[int, _PerSampleCopy] = {}
        self._level = 0
        """Which of the `vmap`s that may be nested is the one over records."""
        self._branch: DataDependentBranch | None = None

    def losses(self, loss: "Loss", inputs: Any, targets: Any, views: "Views") -> Tensor:
        """Per-sample losses, each the mean over the record's views; raises `DataDependentBranch`."""
        written = [(value, value._version) for value in tree_leaves((inputs, targets, self._state))]

        def one_loss(x: Any, y: Any) -> Tensor:
            self._level = current_level()
            with self:
                viewed = views(x)
                count = len(next(tree_leaves(viewed)))
                outputs = call_model(self._model, viewed)
                values = call_loss(loss, outputs, tree_map(y, partial(_repeat, count)))
            if values.shape != (count,):
                raise Unsupported(_not_per_record(values))
            return values.mean()

        with translate_vmap_errors(self._model, lambda: self.reads_values):
            try:
                return torch.vmap(one_loss, randomness="different")(inputs, targets)
            finally:
                if self._branch is not None:
                    if any(value._version != before for value, before in written):
                        raise Unsupported(
                            "the model writes into its inputs or buffers and then decides by a value: "
                            "records that decide differently are worked out again, and what is written "
                            "twice would tell that there are some. Decide first, or write nothing."
                        )
                    raise self._branch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # once a value was read, it could be what is written into the model's own tensors
        check_call(func, args, self._state if self.reads_values else ())
        if kwargs.get("generator") is not None:
            raise Unsupported(
                "the model draws from a generator of its own: what a record gets from it depends on who "
                "else is in the batch. Leave it out; dropout and its like draw from the step's."
            )
        if func in CONDITIONS and is_batchedtensor(args[0]):
            return func(self._read_value(common_truth_value, args[0]))
        if func in NUMBERS and is_batchedtensor(args[0]):
            return func(self._read_value(single_record_number, args[0]))
        if self._losses_only or torch.is_grad_enabled():
            rule = RULES.get(func)
            if rule is not None:
                first = (kwargs.pop("input"),) if "input" in kwargs else ()
                args = (*first, *args)
                output = rule(self, *args, **kwargs)
                if output is not NotImplemented:
                    return output
            batched = any(map(is_batchedtensor, list(tree_leaves((args, kwargs)))))
            if batched and not self._losses_only:
                args, kwargs = tree_map((args, kwargs), self._per_sample)
        return func(*args, **kwargs)

    def _read_value(self, rule: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """The value that all records share; raises `DataDependentBranch` where they do not."""
        self.reads_values = True
        try:
            return rule(_unwrap_batched(value, self._level)[0])
        except DataDependentBranch as branch:
            self._branch = branch
            raise

    def as_weights(self, *values: Tensor | None) -> list[Weight | None] | None:
        """The arguments of a layer as weights; None where its rule does not apply.

        That is where none of them is trained, or one was itself derived from parameters.
        """
        weights: list[Weight | None] = []
        for value in values:
            name = self._names.get(id(value))
            if value is None:
                weights.append(None)
            elif name is not None:
                weights.append(Weight(value.detach(), self.terms[name]))
            elif value.requires_grad or is_batchedtensor(value):
                return None
            else:
                weights.append(Weight(value))
        return weights if any(weight and weight.terms is not None for weight in weights) else None

    def run_batched(self, work: Callable[..., Any], *operands: Tensor | None) -> Any:
        """`work(*operands)` outside of `vmap`, on tensors whose first dimension is the records."""
        batched = [value if value is None else self._records_first(value) for value in operands]
        with temporarily_pop_interpreter_stack():
            output = work(*batched)
        return tree_map(output, lambda part: _add_batch_dim(part, 0, self._level))

    def _records_first(self, value: Tensor) -> Tensor:
        inner, dim = _unwrap_batched(self._per_sample(value), self._level)
        with temporarily_pop_interpreter_stack():
            return inner.expand(self.records, *inner.shape) if dim is None else inner.movedim(dim, 0)

    def capture(self, layer: Layer, *inputs: Tensor) -> Tensor:
        """The layer's output, inside `run_batched`; its backward pass leaves the weights' terms."""
        output: Tensor = _LayerFunction.apply(layer, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        return output

    def _per_sample(self, value: Tensor) -> Tensor:
        """A copy for each record of a value that all share, if it has a gradient."""
        if is_batchedtensor(value) or not value.requires_grad:
            return value
        if id(value) not in self._copies:
            copy = _PerSampleCopy(value, self.records)
            copy.output = self.run_batched(partial(self.capture, copy))
            self._copies[id(value)] = copy
        return self._copies[id(value)].output

    def backward(self, losses: Tensor) -> None:
        """Run the backward pass, and check that no use of a parameter escaped."""
        escaped: Sequence[Tensor | None] = [None] * len(self._parameters)
        if losses.requires_grad:
            # what reaches a parameter itself, summed over records, came by neither a rule nor a copy
            _, *escaped = torch.autograd.grad(
                losses.sum(), [self._anchor, *self._parameters.values()], allow_unused=True
            )
        if any(copy.value._version != copy.version for copy in self._copies.values()):
            raise Unsupported(
                "the model changes a value in place that it derives from its parameters, after it was "
                "used (w = self.weight * 2, then w[0] = 0): each record's gradient would be of other "
                "weights. Make a new tensor instead."
            )
        for copy in self._copies.values():
            self._backward_through_copy(copy)
            del copy.output, copy.gradients
        unseen = [name for name, part in zip(self.terms, escaped, strict=True) if part is not None]
        if unseen:
            raise Unsupported(
                f"the tape does not see how {', '.join(unseen)} enter(s) the loss, and so cannot clip "
                "the gradient record by record: is it used in compiled or scripted code, or in an "
                "autograd.Function? Use plain torch operations there, or freeze it with "
                "requires_grad_(False)."
            )
        # Each holds the graph that holds it; without this, nothing would be freed.
        self._copies.clear()

    def _backward_through_copy(self, copy: "_PerSampleCopy") -> None:
        """Append the per-sample gradients of a copied value to the parameters it was derived from."""
        if copy.gradients is None:
            return
        name = self._names.get(id(copy.value))
        if name is not None:
            self.terms[name].append(Dense(copy.gradients))
            return
        gradients = torch.autograd.grad(
            copy.value,
            list(self._parameters.values()),
            copy.gradients,
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        for terms, gradient in zip(self.terms.values(), gradients, strict=True):
            if gradient is not None:
                terms.append(Dense(gradient))


class _LayerFunction(Function):
    """A `Layer` as an autograd function; the anchor makes sure that its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, anchor: Tensor, *inputs: Tensor) -> Tensor:
        output, saved = layer.forward(*inputs)
        ctx.layer = layer
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.layer.backward(grad, ctx.saved_tensors, ctx.needs_input_grad[2:])


class _PerSampleCopy:
    """A layer without inputs whose output is one shared value, expanded to each record."""

    output: Tensor

    def __init__(self, value: Tensor, records: int) -> None:
        self.value = value
        self.version = value._version
        self.records = records
        self.gradients: Tensor | None = None

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.value.detach().expand(self.records, *self.value.shape), ()

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        self.gradients = grad
        return ()


def one_view(inputs: Any) -> Any:
    """A record's inputs as the only view of it."""
    return tree_map(inputs, partial(_repeat, 1))


def _repeat(count: int, value: Tensor) -> Tensor:
    return value.unsqueeze(0).expand(count, *value.shape)


def _not_per_record(values: Tensor) -> str:
    if values.dim() == 0:
        return (
            "the loss returned shape () for a batch of one record, not (1,): each record's own "
            "gradient is clipped, and a loss that is already reduced has no such thing. Pass "
            'one with reduction="none", e.g. torch.nn.CrossEntropyLoss(reduction="none"), or a '
            "loss module that says how it reduces."
        )
    return (
        f"the loss returned shape {tuple(values.shape)} for a batch of one record, not "
        "(1,): sum or average its values within the record, e.g. with .flatten(1).mean(1)."
    )
