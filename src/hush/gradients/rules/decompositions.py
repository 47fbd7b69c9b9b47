"""Operations without a batching rule, decomposed into others; and max pooling with channels last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import current_level, is_batchedtensor
from torch.nn import functional
from torch.nn.modules.utils import _pair

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


def rnn_cell(activation: Callable[[Tensor], Tensor]) -> Any:
    """The rule for `torch.nn.RNNCell` with an activation."""

    def rule(recording: "Recording", x: Tensor, hidden: Tensor, *weights: Any) -> Any:
        with recording:
            from_input, from_state = _gates(x, hidden, *weights)
            return activation(from_input + from_state)

    return rule


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
    """The rule for `F.cross_entropy` of class numbers, which `vmap` would decompose in Python."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not plain or reduction != "none" or scores.dim() < 2 or target.dtype != torch.int64:
        return NotImplemented
    if current_level() != recording.level or not is_batchedtensor(scores):
        return NotImplemented

    def work(scores: Tensor, target: Tensor) -> Tensor:
        losses: Tensor = functional.cross_entropy(
            scores.flatten(0, 1), target.flatten(0, 1), ignore_index=ignore_index, reduction="none"
        )
        by_record: Tensor = losses.unflatten(0, scores.shape[:2])
        return by_record

    return recording.run_batched(work, scores, target)


def requires_grad(recording: "Recording", value: Tensor, requires_grad: bool = True) -> Any:
    """The rule for `Tensor.requires_grad_`, which `vmap` does not support and the tape does not need.

    Gradient checkpointing of the transformers library calls it on the outputs of embeddings.
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


_CHANNELS = 4
"""Channels from which on the changes of order take less time than they save."""


@dataclass(frozen=True, eq=False)
class MaxPool:
    """Max pooling of (images, channels, height, width): the numbers of torch's kernel for that order."""

    kernel_size: int | Sequence[int]
    stride: int | Sequence[int]
    padding: int | Sequence[int]
    dilation: int | Sequence[int]
    ceil_mode: bool

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        images = x.contiguous(memory_format=torch.channels_last)
        output, indices = functional.max_pool2d_with_indices(images, **vars(self))
        # other layers work on channels first
        return output.contiguous(), (x, indices.contiguous())

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        if not needed[0]:
            return (None,)
        x, indices = saved
        sizes = (_pair(value) for value in (self.kernel_size, self.stride, self.padding, self.dilation))
        gradient: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            grad.contiguous(), x.contiguous(), *sizes, self.ceil_mode, indices
        )
        return (gradient,)


def max_pool2d(
    recording: "Recording",
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The rule for `F.max_pool2d`."""
    few = x.dim() != 4 or x.shape[1] < _CHANNELS
    if x.is_cuda or not is_batchedtensor(x) or few or return_indices:
        return NotImplemented
    layer = MaxPool(kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode)

    def work(x: Tensor) -> Tensor:
        output: Tensor = recording.capture(layer, x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return output

    return recording.run_batched(work, x)
