"""Interception of the torch calls of a forward pass, by which layers leave per-sample gradients.

`Recording`, a torch function mode in place of the module hooks of other libraries, sees every call. A
layer with a rule (`rules`) is computed for all records at once and leaves the factors of its weights'
per-sample gradients; any other use of a parameter, or of a value derived from parameters alone, goes
through a per-sample copy (a view, not memory), whose gradient autograd returns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_batched,
    current_level,
    is_batchedtensor,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch.overrides import TorchFunctionMode

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import (
    Path,
    SharedWrite,
)
from hush.gradients.checks.isolation import check_call, is_custom_operator, shares_memory
from hush.gradients.checks.torch_errors import translate_vmap_errors
from hush.gradients.forward.checkpointing import checkpointed_segments
from hush.gradients.forward.layer_function import Operands, apply_layer
from hush.gradients.forward.value_reads import VALUE_READS
from hush.gradients.rules import RULES, Casts, Layer, PerSampleCopy, Weight, general
from hush.gradients.rules.attention import determinism_restored
from hush.gradients.terms import Term
from hush.gradients.tree import (
    Loss,
    Views,
    call_loss,
    call_model,
    sharded_models,
    submodules,
    tree_leaves,
    tree_map,
    uncompiled,
)


class Recording(TorchFunctionMode):
    """Intercepts every torch call of one forward pass, and collects the per-sample gradients' terms."""

    def __init__(
        self,
        model: nn.Module,
        trainable: dict[str, nn.Parameter],
        records: int,
        device: torch.device,
        path: Path,
        *,
        losses_only: bool = False,
    ) -> None:
        super().__init__()
        self.losses_only = losses_only
        """Whether rules serve without gradients: some layers have no batching rule of torch's own."""
        self.records = records
        self.device = device
        self.terms: dict[str, list[Term]] = {name: [] for name in trainable}
        """For each parameter, a term for each of its uses."""
        self.path = path
        self.constants: list[Tensor | None] = []
        """New memory that the model has made in this pass, None where it is a record's own."""
        self._model = model
        self._state = [
            value
            for module in submodules(model)
            for value in (*module._parameters.values(), *module._buffers.values())
            if value is not None
        ]
        self._parameters = trainable
        self._shards = sharded_models.get(model)
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._casts: dict[str, Casts] = {name: {} for name in trainable}
        self._operands = Operands()
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        """An input of every captured layer, so that its backward pass always runs."""
        self._copies: dict[int, PerSampleCopy] = {}
        self.level = 0
        """Which of the `vmap`s that may be nested is the one over records."""

    def losses(self, loss: Loss, inputs: Any, targets: Any, views: Views | None = None) -> Tensor:
        """Per-sample losses, each the mean over the record's views; raises `DataDependentBranch`."""
        written = [(value, value._version) for value in tree_leaves((inputs, targets, self._state))]

        def one_loss(x: Any, y: Any) -> Tensor:
            self.level = current_level()
            with self:
                viewed = views(x) if views else tree_map(x, lambda value: value.unsqueeze(0))
                count = len(next(tree_leaves(viewed)))
                repeated = tree_map(y, lambda value: value.unsqueeze(0).expand(count, *value.shape))
                values = call_loss(loss, call_model(self._model, viewed), repeated, count)
            return values.mean()

        with (
            translate_vmap_errors(self._model, lambda: self.path.reads_values),
            checkpointed_segments(self),
            uncompiled(self._model),
        ):
            try:
                losses = torch.vmap(one_loss, randomness="different")(inputs, targets)
                self.path.note_caught_error()
                self.path.check_not_seeded()
                return losses
            finally:
                self._operands.forget()
                self.path.end(any(value._version != before for value, before in written))

    @property
    def place(self) -> tuple[int, int]:
        """How far the forward pass has come: values read and constants made."""
        return self.path.read, len(self.constants)

    def run_again(self, part: Callable[[], object], place: tuple[int, int]) -> None:
        """Run a part of the forward pass again, in the backward pass, for its activations.

        What it copies for each record serves this run alone; copies that were made before it are there.

        Args:
            part: of the model, called again.
            place: `place` when it was called first: it takes the same decisions.
        """

        def one_record(place: Tensor) -> Tensor:
            self.check_level("gradient checkpointing")
            with self:
                part()
            return place

        read, made = place
        constants, self.constants = self.constants, self.constants[:made]
        with (
            self.copies_released(),
            self.path.recomputing(read),
            temporarily_clear_interpreter_stack(),  # of a derived value's vmap over its gradients
            checkpointed_segments(self),
            uncompiled(self._model),
        ):
            torch.vmap(one_record, randomness="different")(torch.empty(self.records))
        self.constants = constants

    @contextmanager
    def copies_released(self) -> Iterator[None]:
        """Context after which the copies that were made in it are gone.

        Each holds the graph that holds it; without this, nothing would be freed.
        """
        before, self._copies = self._copies, dict(self._copies)
        try:
            yield
        finally:
            for key, copy in self._copies.items():
                if key not in before:
                    copy.release()
            self._copies = before

    def check_level(self, what: str) -> None:
        """Raise inside of a transform that the model itself applies, of which `what` knows nothing."""
        if current_level() != self.level:
            raise Unsupported(
                f"{what} inside of a torch.func transform (vmap, grad) that the model applies itself: "
                "it would be run again outside of it. Leave one of the two out."
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.path.error_raised:
            self.path.note_caught_error()
        # once a value was read, it could be what is written into the model's own tensors
        try:
            check_call(func, args, kwargs, self._state if self.path.reads_values else ())
        except SharedWrite as error:
            self.interrupt(error)
        try:
            return self._call(func, args, kwargs)
        except (torch.OutOfMemoryError, NotImplementedError, Unsupported):
            raise  # whatever the values are
        except (RuntimeError, IndexError, ValueError):
            if any(map(is_batchedtensor, tree_leaves((args, kwargs)))):
                self.path.note_error(self.records)
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = VALUE_READS.get(func)
        if rule is None and (self.losses_only or torch.is_grad_enabled()):
            rule = RULES.get(func)
        if rule is not None:
            first = (kwargs.pop("input"),) if "input" in kwargs else ()
            args = (*first, *args)
            output = rule(self, *args, **kwargs)
            if output is not NotImplemented:
                return output
        if is_custom_operator(func) and any(map(is_batchedtensor, tree_leaves((args, kwargs)))):
            self.path.check_alone(self.records)  # it sees plain tensors, and may read what it likes
        return general.call(self, func, args, kwargs)

    def interrupt(self, error: SharedWrite) -> NoReturn:
        """End the pass, to run it again with copies of the constant that is written, if it is one."""
        constants = ((i, value) for i, value in enumerate(self.constants) if value is not None)
        shared = (i for i, value in constants if shares_memory(error.target, value))
        error.constant = next(shared, None)
        self.path.interrupt(error)

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
        """The arguments of a layer as weights; None where its rule does not apply.

        That is where none of them is trained, or one was itself derived from parameters.
        """
        weights: list[Weight | None] = []
        trained = False
        for value in values:
            name = self._names.get(id(value))
            if value is None:
                weights.append(None)
            elif name is not None:
                # a cast that is kept would be a copy of weights that are freed after each use
                casts = self._casts[name] if self._shards is None else None
                weights.append(Weight(value.detach(), self.terms[name], casts))
                trained = True
            elif value.requires_grad or is_batchedtensor(value):
                return None
            else:
                weights.append(Weight(value))
        return weights if trained else None

    def of_records_and_constants(self, x: Tensor, *constants: Tensor | None) -> bool:
        """Whether x is the records' own and the rest constants that they share: a frozen layer.

        Such a layer can be computed for all records at once too, where `vmap` would take it apart. Not
        inside of a `vmap` of the model's own, whose tensors are not by record.
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
        """An input as a product takes it, inside `run_batched`; products of one input share it."""
        return self._operands(x)

    def capture(self, layer: Layer, *inputs: Tensor) -> Any:
        """The layer's output, inside `run_batched`; its backward pass leaves the weights' terms."""
        return apply_layer(layer, self._anchor, *inputs)

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
        """Run the backward pass, and check that no use of a parameter escaped."""
        escaped: Sequence[Tensor | None] = [None] * len(self._parameters)
        if losses.requires_grad:
            # what reaches a parameter itself, summed over records, came by neither a rule nor a copy
            # (of sharded ones, the whole parameter or this rank's shard)
            shards = (
                [] if self._shards is None else [self._shards.parameters[name] for name in self.terms]
            )
            with determinism_restored():
                _, *escaped = torch.autograd.grad(
                    losses.sum(), [self._anchor, *self._parameters.values(), *shards], allow_unused=True
                )
        if any(copy.value._version != copy.version for copy in self._copies.values()):
            raise Unsupported(
                "the model changes a value in place that it derives from its parameters, after it was "
                "used (w = self.weight * 2, then w[0] = 0): each record's gradient would be of other "
                "weights. Make a new tensor instead."
            )
        for copy in self._copies.values():
            if self._shards is not None and id(copy.value) not in self._names:
                raise Unsupported(
                    "the model derives a value from its parameters alone (as torch's weight_norm does), "
                    "and they are sharded over ranks: the weights that its gradient needs are freed by "
                    "then. Leave fully_shard out, or freeze what it is derived from."
                )
            copy.append_terms(self._parameters, self.terms)
        names = [*self.terms, *self.terms]
        unseen = [name for name, part in zip(names, escaped, strict=False) if part is not None]
        if unseen:
            raise Unsupported(
                f"the tape does not see how {', '.join(unseen)} enter(s) the loss, and so cannot clip "
                "the gradient record by record: is it used in compiled or scripted code, or in an "
                "autograd.Function? Use plain torch operations there, or freeze it with "
                "requires_grad_(False)."
            )
