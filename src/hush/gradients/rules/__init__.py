"""Layer rules: how to compute the per-sample gradients of weights, by torch function.

**Adding a rule** takes one file here and one line in `RULES`. Layers without a rule also work, but their
parameters use per-sample copies, which need more memory.

A *rule* is called inside `torch.vmap`, with the recording and the arguments of the torch function. Its
tensors are batches of one record. A *layer* computes all records at once:

    def linear(recording, x, weight, bias=None):              # the signature of F.linear
        weights = recording.as_weights(weight, bias)
        if weights is None:
            return NotImplemented                             # no weight is trained

        def work(x):                                          # outside of vmap: (records, 1, ...)
            return recording.capture(Linear(*weights), x)

        return recording.run_batched(work, x)

- `recording.as_weights(*parameters)` returns a `Weight` for each, or None if the rule does not apply.
- `recording.run_batched(work, *tensors)` calls `work` on tensors with records along the first dimension,
  and returns its result inside `vmap`. Record r of the output of `work` must depend on record r of the
  inputs alone (docs/guarantees/tape.md, 1). The second dimension is the batch (1, or more if the model
  folds time into it): `x.flatten(0, 1)` and `.unflatten(0, x.shape[:2])` merge and restore the two.
- `recording.operand(x)` returns the input of a matrix product: contiguous, in autocast's precision, and
  cached for several products of the same input.
- `recording.capture(layer, *inputs)` runs a `Layer`. Its `backward` runs in the backward pass of the
  tape.

A rule for an operation that only lacks a batching rule for `vmap` needs no layer: it calls other
operations inside `with recording:` (`decompositions`). `tests/gradients/test_layers.py` compares each
layer with gradients that are computed one record at a time, and fails if a rule has no test case.
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
from hush.gradients.tree import Gradients


@dataclass(frozen=True, eq=False)
class Weight:
    """Value of a parameter and the list of its terms, which is None if the parameter is not trained."""

    value: Tensor
    terms: list[Term] | None = None


class Layer(Protocol):
    """Layer whose backward pass appends terms to the lists of its weights."""

    @property
    def forward(self) -> Callable[..., tuple[Any, tuple[Tensor, ...]]]:
        """Function from the inputs to the output and the tensors saved for the backward pass.

        Records are the first dimension. The output must not be a view of an input. Several outputs are a
        tuple, and so are their gradients.
        """

    def backward(self, grad: Any, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        """Append the terms of the weights, and return the gradients of the inputs.

        Append one term per trained weight, without summing over records: `linear.outer_product_term` of
        output gradients and inputs for a matrix product, `embedding.RowFactors` for a lookup,
        `convolution.convolution_term` for a convolution, or `terms.Dense` for materialised per-sample
        gradients. Return None for inputs that are not `needed`.
        """


class PerSampleCopy:
    """Layer without inputs that expands a shared value to all records."""

    output: Tensor

    def __init__(self, value: Tensor, records: int) -> None:
        self.value = value
        self.version = value._version
        self.records = records
        self.gradients: Tensor | None = None

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.value.detach().expand(self.records, *self.value.shape), ()

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        self.gradients = grad
        return ()

    def append_terms(self, parameters: dict[str, nn.Parameter], terms: dict[str, list[Term]]) -> None:
        """Append per-sample gradients to the terms of the parameters that the value is computed from."""
        if self.gradients is None:
            return
        for name, parameter in parameters.items():
            if parameter is self.value:
                terms[name].append(Dense(self.gradients))
                return
        options = {"is_grads_batched": True, "retain_graph": True, "allow_unused": True}
        inputs = list(parameters.values())
        gradients = torch.autograd.grad(self.value, inputs, self.gradients, **options)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                terms[name].append(Dense(gradient))

    def release(self) -> None:
        """Release the value and the output. The graph of the output refers to this copy."""
        del self.value, self.output, self.gradients


RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: linear.linear,
    torch.addmm: linear.addmm,
    torch.matmul: linear.matmul,
    torch.Tensor.matmul: linear.matmul,  # also `@`
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), convolution.convolution),
    functional.embedding: embedding.embedding,
    functional.layer_norm: normalisation.layer_norm,
    functional.group_norm: normalisation.group_norm,
    functional.batch_norm: normalisation.batch_norm,
    functional.rms_norm: normalisation.rms_norm,
    functional.multi_head_attention_forward: attention.multi_head,
    functional.scaled_dot_product_attention: attention.dot_product,
    torch._VF.lstm: partial(recurrent.recurrent, "lstm"),
    torch._VF.gru: partial(recurrent.recurrent, "gru"),
    torch._VF.rnn_tanh: partial(recurrent.recurrent, "rnn_tanh"),
    torch._VF.rnn_relu: partial(recurrent.recurrent, "rnn_relu"),
    torch._VF.lstm_cell: partial(decompositions.cell, "lstm"),
    torch._VF.gru_cell: partial(decompositions.cell, "gru"),
    torch._VF.rnn_tanh_cell: partial(decompositions.cell, "tanh"),
    torch._VF.rnn_relu_cell: partial(decompositions.cell, "relu"),
    functional.cross_entropy: decompositions.cross_entropy,
    functional.bilinear: decompositions.bilinear,
    torch.Tensor.requires_grad_: decompositions.requires_grad,
}
"""Rules by torch function. If a rule returns NotImplemented, per-sample copies are used."""
