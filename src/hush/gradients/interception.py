"""A function mode that sees every torch call of a forward pass and keeps what each record adds.

A layer it has a rule for is worked out for all records at once and keeps the factors of its weights'
gradients; any other use of a parameter, or of a value worked out from parameters alone, goes through a
copy for each record (a view, not memory), whose gradient autograd returns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._functorch import _add_batch_dim, _unwrap_batched, current_level, is_batchedtensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.overrides import TorchFunctionMode

from hush.core.errors import Unsupported
from hush.gradients.capture import Weight, capture
from hush.gradients.checks.data_dependence import CONDITIONS, NUMBERS, DataDependentBranch, agreed, alone
from hush.gradients.checks.isolation import check_written, translate_vmap_errors
from hush.gradients.rules import RULES
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import call_model, tree_leaves, tree_map

if TYPE_CHECKING:
    from hush.gradients.recording import Loss, Views


class Recording(TorchFunctionMode):
    """Sees every torch call of one forward pass and decides how parameters enter it."""

    def __init__(
        self,
        trainable: dict[str, nn.Parameter],
        records: int,
        device: torch.device,
        own_state: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.records = records
        self.level = 0
        """Which of the `vmap`s that may be nested is the one over records."""
        self.terms: dict[str, list[Term]] = {name: [] for name in trainable}
        self._parameters = trainable
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._copies: dict[int, _Copies] = {}
        self._own_state = own_state
        """The model's parameters and buffers."""
        self.decided = False
        self.undecided: DataDependentBranch | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        check_written(func, args, self._own_state if self.decided else ())
        if kwargs.get("generator") is not None:
            raise Unsupported(
                "the model draws from a generator of its own: what a record gets from it depends on who "
                "else is in the batch. Leave it out; dropout and its like draw from the step's."
            )
        if func in CONDITIONS and is_batchedtensor(args[0]):
            return func(self._decided(agreed, _unwrap_batched(args[0], self.level)[0]))
        if func in NUMBERS and is_batchedtensor(args[0]):
            return func(self._decided(alone, _unwrap_batched(args[0], self.level)[0]))
        if torch.is_grad_enabled():
            rule = RULES.get(func)
            if rule is not None:
                first = (kwargs.pop("input"),) if "input" in kwargs else ()
                args = (*first, *args)
                output = rule(self, *args, **kwargs)
                if output is not NotImplemented:
                    return output
            found = list(tree_leaves((args, kwargs)))
            if any(map(is_batchedtensor, found)):
                args, kwargs = tree_map((args, kwargs), self._own)
        return func(*args, **kwargs)

    def losses(
        self, model: nn.Module, loss: "Loss", inputs: Any, targets: Any, views: "Views"
    ) -> Tensor:
        """Loss of each record of a batch, the mean over its views; raises `Undecided`."""
        written = (inputs, targets, list(self._own_state))
        given = [(value, value._version) for value in tree_leaves(written)]

        def one_loss(x: Any, y: Any) -> Tensor:
            self.level = current_level()
            with self:
                shown = views(x)
                count = len(next(tree_leaves(shown)))
                values = loss(call_model(model, shown), tree_map(y, partial(_repeated, count)))
            if values.dim() == 0:
                raise Unsupported(
                    "the loss returned shape () for a batch of one record, not (1,): each record's own "
                    "gradient is clipped, and a loss that is already reduced has no such thing. Pass "
                    'one with reduction="none", e.g. torch.nn.CrossEntropyLoss(reduction="none"), or a '
                    "loss module that says how it reduces."
                )
            if values.shape != (count,):
                raise Unsupported(
                    f"the loss returned shape {tuple(values.shape)} for a batch of one record, not "
                    "(1,): sum or average its values within the record, e.g. with .flatten(1).mean(1)."
                )
            return values.mean()

        with translate_vmap_errors(model, lambda: self.decided):
            try:
                return torch.vmap(one_loss, randomness="different")(inputs, targets)
            finally:
                if self.undecided is not None:
                    if any(value._version != before for value, before in given):
                        raise Unsupported(
                            "the model writes into its inputs or buffers and then decides by a value: "
                            "records that decide differently are worked out again, and what is written "
                            "twice would tell that there are some. Decide first, or write nothing."
                        )
                    raise self.undecided

    def _decided(self, rule: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """What the records decide by, where the rule says that they do so together."""
        self.decided = True
        try:
            return rule(value)
        except DataDependentBranch as choice:
            self.undecided = choice
            raise

    def weights(self, *values: Tensor | None) -> list[Weight | None] | None:
        """The values as a rule wants them; None where no rule applies.

        That is where none of them is trained, or one was itself worked out from parameters.
        """
        found: list[Weight | None] = []
        for value in values:
            name = self._names.get(id(value))
            if value is None:
                found.append(None)
            elif name is not None:
                found.append(Weight(value.detach(), self.terms[name]))
            elif value.requires_grad or is_batchedtensor(value):
                return None
            else:
                found.append(Weight(value))
        return found if any(weight and weight.terms is not None for weight in found) else None

    def run_batched(self, work: Callable[..., Any], *operands: Tensor | None) -> Any:
        """`work(anchor, *operands)` on tensors whose first dimension is the records."""
        own = [value if value is None else self._unwrapped(self._own(value)) for value in operands]
        with temporarily_pop_interpreter_stack():
            output = work(self._anchor, *own)
        return tree_map(output, lambda part: _add_batch_dim(part, 0, self.level))

    def _unwrapped(self, value: Tensor) -> Tensor:
        inner, place = _unwrap_batched(value, self.level)
        with temporarily_pop_interpreter_stack():
            return inner.expand(self.records, *inner.shape) if place is None else inner.movedim(place, 0)

    def _own(self, value: Tensor) -> Tensor:
        """A copy for each record of a value that all share, if there is a gradient to be had for it."""
        if is_batchedtensor(value) or not value.requires_grad:
            return value
        if id(value) not in self._copies:
            copies = _Copies(value, self.records)
            copies.output = self.run_batched(partial(capture, copies))
            self._copies[id(value)] = copies
        return self._copies[id(value)].output

    def run_back(self, losses: Tensor) -> None:
        """Run the backward pass, and check that every parameter was seen."""
        parameters = list(self._parameters.values())
        direct: Sequence[Tensor | None] = [None] * len(parameters)
        if losses.requires_grad:
            _, *direct = torch.autograd.grad(
                losses.sum(), [self._anchor, *parameters], allow_unused=True
            )
        if any(copies.value._version != copies.version for copies in self._copies.values()):
            raise Unsupported(
                "the model changes a value in place that it derives from its parameters, after it was "
                "used (w = self.weight * 2, then w[0] = 0): each record's gradient would be of other "
                "weights. Make a new tensor instead."
            )
        for copies in self._copies.values():
            self._trace(copies)
            del copies.output, copies.gradients
        unseen = [name for name, part in zip(self.terms, direct, strict=True) if part is not None]
        if unseen:
            raise Unsupported(
                f"the tape does not see how {', '.join(unseen)} enter(s) the loss, and so cannot clip "
                "the gradient record by record: is it used in compiled or scripted code, or in an "
                "autograd.Function? Use plain torch operations there, or freeze it with "
                "requires_grad_(False)."
            )
        # Each holds the graph that holds it; without this, nothing would be freed.
        self._copies.clear()

    def _trace(self, copies: "_Copies") -> None:
        """Hand the gradients of a value on to the parameters that it was worked out from."""
        if copies.gradients is None:
            return
        name = self._names.get(id(copies.value))
        if name is not None:
            self.terms[name].append(Dense(copies.gradients))
            return
        parts = torch.autograd.grad(
            copies.value,
            list(self._parameters.values()),
            copies.gradients,
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        for terms, part in zip(self.terms.values(), parts, strict=True):
            if part is not None:
                terms.append(Dense(part))


class _Copies:
    """A layer without inputs whose output is one value for each record."""

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
    return tree_map(inputs, partial(_repeated, 1))


def _repeated(count: int, value: Tensor) -> Tensor:
    return value.unsqueeze(0).expand(count, *value.shape)
