"""Layer rules: per-sample gradients of weights, by torch function.

**Adding a rule** takes one file here and one line in `RULES`. Layers without a rule also work, but their
parameters use per-sample copies, which need more memory.

A *rule* is called with the recording and the arguments of the torch function, inside `torch.vmap`:
tensors have a batch of one record. A *layer* computes all records:

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
- `recording.operand(x)` returns an input as a product takes it: contiguous, in autocast's precision, and
  shared by products of one input.
- `recording.capture(layer, *inputs)` returns the output of a `Layer`, whose `backward` runs in the
  backward pass of the tape.

An operation without a batching rule for `vmap` needs no layer: a rule may call other operations, `with
recording:` (`decompositions`). Tests: `tests/gradients/test_layers.py` compares each layer with
gradients that are computed one record at a time, and fails if no case runs a rule.
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
    """Value of a parameter, and the list of its terms (None if it is not trained)."""

    value: Tensor
    terms: list[Term] | None = None


class Layer(Protocol):
    """A layer and its backward pass, which appends the weights' terms to their lists."""

    @property
    def forward(self) -> Callable[..., tuple[Any, tuple[Tensor, ...]]]:
        """Function from the inputs (records first) to the output (not a view of an input) and saved
        tensors.

        Several outputs, and their gradients, are tuples."""

    def backward(self, grad: Any, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        """Append the terms of the weights' per-sample gradients; return the inputs' gradients.

        Append one term per trained weight: `linear.outer_product_term` of output gradients and inputs
        for a matrix product, `embedding.RowFactors` for a lookup, `convolution.convolution_term`, or
        `terms.Dense` for materialised per-sample gradients. Do not sum over records. The gradient of an
        input that is not `needed` is None.
        """


class PerSampleCopy:
    """A layer without inputs whose output is one shared value, expanded to all records."""

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
        """Append the per-sample gradients to the terms of the parameters behind the value."""
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
        """Release the value and the output, whose graph refers to this copy."""
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
"""Torch function to rule; a rule that returns NotImplemented falls back to per-sample copies."""
