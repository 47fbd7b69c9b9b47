"""Layer rules: how each layer leaves its weights' per-sample gradients, by the torch function it calls.

**Adding a rule** takes one file here and one line in `RULES`. A layer without one still works: its
parameters go through per-sample copies, which costs memory, not correctness.

The file has a *rule*, called with the recording and the arguments of the torch function, inside
`torch.vmap` (each record is a batch of one: tensors have the shapes that the model was written for, the
batch dimension being 1, and no dimension for the records), and a *layer* for all records at once:

    def linear(recording, x, weight, bias=None):              # the signature of F.linear
        weights = recording.as_weights(weight, bias)
        if weights is None:
            return NotImplemented                             # nothing trained here: the ordinary way

        def work(x):                                          # outside of vmap: (records, 1, ...)
            return recording.capture(Linear(*weights), x)

        return recording.run_batched(work, x)

- `recording.as_weights(*parameters)` returns a `Weight` (`value`, and `terms`, the list to append to or
  None where it is not trained) for each, None where the rule does not apply.
- `recording.run_batched(work, *tensors)` returns `work` of the tensors with the records as their first
  dimension, back inside `vmap`. `work` must map record r of its inputs to record r of its output alone:
  that is what docs/guarantees/tape.md, 1, needs of it. The batch dimension is the second (1, or more
  where the model folds time into it): `x.flatten(0, 1)` for a torch function that wants one, and
  `.unflatten(0, x.shape[:2])` of what it returns, as in `normalisation.group_norm`.
- `recording.operand(x)` returns an input as a product takes it: contiguous, in autocast's precision, and
  shared by products of one input.
- `recording.capture(layer, *inputs)` returns the output of a `Layer`; its `backward` runs in the tape's.

An operation without a batching rule for `vmap` needs no layer: a rule may call others, `with recording:`
(`decompositions`). Tests: add the layer to `tests/gradients/test_layers.py`, which compares every layer
with gradients computed one record at a time, and fails where no case runs a rule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.gradients.rules import (
    attention,
    convolution,
    decompositions,
    embedding,
    linear,
    normalisation,
    recurrent,
)
from hush.gradients.terms import Dense, Term

Casts = dict[torch.dtype, tuple[Tensor, int, Tensor]]
"""By dtype: what was cast, its version, and the result."""


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter's value, and the list its terms are appended to (None: it is not trained)."""

    value: Tensor
    terms: list[Term] | None = None
    casts: Casts | None = None
    """Those of earlier uses, where the parameter is trained."""

    def to(self, dtype: torch.dtype) -> Tensor:
        """The value in another precision, cast once for all uses of a trained parameter."""
        if self.value.dtype == dtype:
            return self.value
        if self.casts is None:
            return self.value.to(dtype)
        if dtype in self.casts:
            source, version, cast = self.casts[dtype]
            if version == self.value._version and source.data_ptr() == self.value.data_ptr():
                return cast
        self.casts[dtype] = self.value, self.value._version, self.value.to(dtype)
        return self.casts[dtype][2]


class Layer(Protocol):
    """A layer with a backward pass of its own, without the gradient of its weights."""

    @property
    def forward(self) -> Callable[..., tuple[Any, tuple[Tensor, ...]]]:
        """From the inputs, records first: the output, no view of an input, and tensors to save.

        Several outputs are a tuple, and so are their gradients."""

    def backward(
        self, grad: Any, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Append the terms of the weights' per-sample gradients; return the inputs' gradients.

        One term for each trained weight: `linear.outer_product_term` of output gradients and inputs for
        a matrix product, `embedding.RowFactors` for a lookup, `convolution.convolution_term`, or
        `terms.Dense` of materialised per-sample gradients, never anything summed over records.

        Args:
            grad: gradient of the output.
            saved: what `forward` saved.
            needed: whether each input's gradient is needed; None is returned where it is not.
        """


class PerSampleCopy:
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

    def append_terms(self, parameters: dict[str, nn.Parameter], terms: dict[str, list[Term]]) -> None:
        """Append the per-sample gradients to the terms of the parameters the value is derived from."""
        if self.gradients is None:
            return
        for name, parameter in parameters.items():
            if parameter is self.value:
                terms[name].append(Dense(self.gradients))
                return
        gradients = torch.autograd.grad(
            self.value,
            list(parameters.values()),
            self.gradients,
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                terms[name].append(Dense(gradient))

    def release(self) -> None:
        """Let go of the value and of the output, whose graph holds this copy."""
        del self.value, self.output, self.gradients


RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: linear.linear,
    torch.addmm: linear.addmm,
    torch.matmul: linear.matmul,
    torch.Tensor.matmul: linear.matmul,  # `@` too
    torch.conv1d: convolution.convolution,
    torch.conv2d: convolution.convolution,
    torch.conv3d: convolution.convolution,
    functional.embedding: embedding.embedding,
    functional.layer_norm: normalisation.layer_norm,
    functional.group_norm: normalisation.group_norm,
    functional.batch_norm: normalisation.batch_norm,
    functional.instance_norm: normalisation.instance_norm,
    functional.rms_norm: normalisation.rms_norm,
    functional.max_pool2d: decompositions.max_pool2d,
    functional.multi_head_attention_forward: attention.multi_head,
    functional.scaled_dot_product_attention: attention.dot_product,
    torch._VF.lstm: partial(recurrent.recurrent, "lstm"),
    torch._VF.gru: partial(recurrent.recurrent, "gru"),
    torch._VF.rnn_tanh: partial(recurrent.recurrent, "rnn_tanh"),
    torch._VF.rnn_relu: partial(recurrent.recurrent, "rnn_relu"),
    torch._VF.lstm_cell: decompositions.lstm_cell,
    torch._VF.gru_cell: decompositions.gru_cell,
    torch._VF.rnn_tanh_cell: decompositions.rnn_cell(torch.tanh),
    torch._VF.rnn_relu_cell: decompositions.rnn_cell(torch.relu),
    functional.cross_entropy: decompositions.cross_entropy,
    functional.bilinear: decompositions.bilinear,
    torch.Tensor.requires_grad_: decompositions.requires_grad,
}
"""Torch function to rule; one that returns NotImplemented leaves the call to the general way."""
