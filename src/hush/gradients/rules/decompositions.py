"""Decompositions of operations without a batching rule into operations with one or a layer rule."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

if TYPE_CHECKING:
    from hush.gradients.recording import Recording


def bilinear(
    recording: "Recording", input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """The rule for `torch.nn.Bilinear`."""
    with recording:
        output = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
        return output if bias is None else output + bias


def lstm_cell(recording: "Recording", x: Tensor, states: Any, *weights: Any) -> Any:
    """The rule for `torch.nn.LSTMCell`."""
    hidden, cell = states
    with recording:
        from_input, from_state = _gates(x, hidden, *weights)
        input_gate, forget_gate, cell_gate, output_gate = (from_input + from_state).chunk(4, dim=-1)
        cell = torch.sigmoid(forget_gate) * cell + torch.sigmoid(input_gate) * torch.tanh(cell_gate)
        return torch.sigmoid(output_gate) * torch.tanh(cell), cell


def gru_cell(recording: "Recording", x: Tensor, hidden: Tensor, *weights: Any) -> Any:
    """The rule for `torch.nn.GRUCell`."""
    with recording:
        from_input, from_state = (part.chunk(3, dim=-1) for part in _gates(x, hidden, *weights))
        reset, update = (
            torch.sigmoid(a + b) for a, b in zip(from_input[:2], from_state[:2], strict=True)
        )
        new = torch.tanh(from_input[2] + reset * from_state[2])
        return new + update * (hidden - new)


def rnn_tanh_cell(recording: "Recording", x: Tensor, hidden: Tensor, *weights: Any) -> Any:
    """The rule for `torch.nn.RNNCell`."""
    with recording:
        from_input, from_state = _gates(x, hidden, *weights)
        return torch.tanh(from_input + from_state)


def rnn_relu_cell(recording: "Recording", x: Tensor, hidden: Tensor, *weights: Any) -> Any:
    """The rule for `torch.nn.RNNCell` with relu."""
    with recording:
        from_input, from_state = _gates(x, hidden, *weights)
        return torch.relu(from_input + from_state)


def requires_grad(recording: "Recording", value: Tensor, requires_grad: bool = True) -> Any:
    """The rule for `Tensor.requires_grad_`, which `vmap` refuses; the tape asks for parameters alone.

    Gradient checkpointing of the transformers library marks the outputs of embeddings so.
    """
    return value if requires_grad and is_batchedtensor(value) else NotImplemented


def _gates(
    x: Tensor,
    hidden: Tensor,
    input_weight: Tensor,
    state_weight: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return functional.linear(x, input_weight, input_bias), functional.linear(
        hidden, state_weight, state_bias
    )
