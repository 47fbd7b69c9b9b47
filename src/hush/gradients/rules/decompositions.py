"""Rules for operations without a batching rule in `vmap`, decomposed into other operations."""

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
    """Rule for `torch.nn.Bilinear`."""
    with recording:
        output = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
        return output if bias is None else output + bias


def cell(kind: str, recording: "Recording", x: Tensor, states: Any, *weights: Any) -> Any:
    """Rule for `torch.nn.LSTMCell`, `GRUCell` and `RNNCell` (tanh, relu), by kind."""
    hidden = states[0] if kind == "lstm" else states
    weight, state_weight, bias, state_bias = (*weights, None, None)[:4]
    with recording:
        inputs = functional.linear(x, weight, bias)
        own = functional.linear(hidden, state_weight, state_bias)
        if kind == "gru":
            pairs = list(zip(inputs.chunk(3, dim=-1), own.chunk(3, dim=-1), strict=True))
            reset, update = (torch.sigmoid(first + second) for first, second in pairs[:2])
            new = torch.tanh(pairs[2][0] + reset * pairs[2][1])
            return new + update * (hidden - new)
        gates: Any = sum((inputs, own))
        if kind != "lstm":
            return getattr(torch, kind)(gates)
        gates = gates.chunk(4, dim=-1)
        keep, add, output = (torch.sigmoid(gates[gate]) for gate in (1, 0, 3))
        memory = keep * states[1] + add * torch.tanh(gates[2])
        return output * torch.tanh(memory), memory


def cross_entropy(
    recording: "Recording",
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Rule for `F.cross_entropy` with class indices, which `vmap` would decompose in Python."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    numbers = reduction == "none" and scores.dim() >= 2 and target.dtype == torch.int64
    if not (plain and numbers and recording.of_records_and_constants(scores)):
        return NotImplemented

    def work(scores: Tensor, target: Tensor) -> Tensor:
        flat = scores.flatten(0, 1), target.flatten(0, 1)
        losses = functional.cross_entropy(*flat, ignore_index=ignore_index, reduction="none")
        return torch.unflatten(losses, 0, scores.shape[:2])

    return recording.run_batched(work, scores, target)


def requires_grad(recording: "Recording", value: Tensor, requires_grad: bool = True) -> Any:
    """Rule for `Tensor.requires_grad_`, which `vmap` does not support.

    Gradient checkpointing of the transformers library calls it on the outputs of embeddings.
    """
    return value if requires_grad and is_batchedtensor(value) else NotImplemented
