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
- `recording.capture(layer, *inputs)` returns the layer's output; its `backward` runs in the tape's.

A layer (`interception.Layer`) has two methods:

- `forward(*inputs) -> (output, saved)`. Args: inputs, records first. Returns: the output, which is no
  view of an input, and the tensors that `backward` needs.
- `backward(grad, saved, needed) -> gradients`. Args: the output's gradient, what was saved, whether each
  input's gradient is needed. Returns: a gradient or None for each input. It appends one `Term` to
  `weight.terms` of each trained weight: `linear.outer_product_term` of output gradients and inputs for a
  matrix product, `embedding.RowFactors` for a lookup, `convolution.convolution_term`, or `terms.Dense`
  of materialised per-sample gradients, never anything summed over records.

An operation without a batching rule for `vmap` needs no layer: a rule may call others, `with recording:`
(`decompositions`). Tests: add the layer to `tests/gradients/test_layers.py`, which compares every layer
with gradients computed one record at a time, and fails where no case runs a rule.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hush.gradients.rules import (
    convolution,
    decompositions,
    embedding,
    linear,
    normalisation,
    recurrent,
)

RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: linear.linear,
    torch.addmm: linear.addmm,
    torch.matmul: linear.matmul,
    torch.Tensor.matmul: linear.matmul,  # `@` too
    torch.conv1d: convolution.convolution,
    torch.conv2d: convolution.convolution,
    torch.conv3d: convolution.convolution,
    functional.embedding: embedding.embedding,
    functional.embedding_bag: embedding.embedding_bag,
    functional.layer_norm: normalisation.layer_norm,
    functional.group_norm: normalisation.group_norm,
    functional.instance_norm: normalisation.instance_norm,
    functional.rms_norm: normalisation.rms_norm,
    functional.multi_head_attention_forward: decompositions.attention,
    functional.scaled_dot_product_attention: decompositions.dot_product,
    torch._VF.lstm: recurrent.lstm,
    torch._VF.gru: recurrent.gru,
    torch._VF.rnn_tanh: recurrent.rnn_tanh,
    torch._VF.rnn_relu: recurrent.rnn_relu,
    torch._VF.lstm_cell: decompositions.lstm_cell,
    torch._VF.gru_cell: decompositions.gru_cell,
    torch._VF.rnn_tanh_cell: decompositions.rnn_tanh_cell,
    torch._VF.rnn_relu_cell: decompositions.rnn_relu_cell,
    functional.bilinear: decompositions.bilinear,
}
"""Torch function to rule; one that returns NotImplemented leaves the call to the general way."""
