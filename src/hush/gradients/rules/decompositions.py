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
        gates = sum(_gates(x, hidden, *weights)).chunk(4, dim=-1)
        keep, add, output = (torch.sigmoid(gates[gate]) for gate in (1, 0, 3))
        cell = keep * cell + add * torch.tanh(gates[2])
        return output * torch.tanh(cell), cell


def gru_cell(recording: "Recording", x: Tensor, hidden: Tensor, *weights: Any) -> Any:
    """The rule for `torch.nn.GRUCell`."""
    with recording:
        inputs, states = (part.chunk(3, dim=-1) for part in _gates(x, hidden, *weights))
        reset, update = (torch.sigmoid(inputs[gate] + states[gate]) for gate in (0, 1))
        new = torch.tanh(inputs[2] + reset * states[2])
        return new + update * (hidden - new)


def rnn_cell(
    activation: Callable[[Tensor], Tensor],
    recording: "Recording",
    x: Tensor,
    hidden: Tensor,
    *weights: Any,
) -> Any:
    """The rule for `torch.nn.RNNCell` with an activation."""
    with recording:
        return activation(sum(_gates(x, hidden, *weights)))


def _gates(x: Tensor, hidden: Tensor, *weights: Any) -> list[Any]:
    """The parts of a cell's gates from its input and from its state."""
    biases = weights[2:] or (None, None)
    operands = zip((x, hidden), weights[:2], biases, strict=True)
    return [functional.linear(*each) for each in operands]


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
        flat = scores.flatten(0, 1), target.flatten(0, 1)
        losses: Tensor = functional.cross_entropy(*flat, ignore_index=ignore_index, reduction="none")
        return losses.unflatten(0, scores.shape[:2])  # type: ignore[no-any-return]

    return recording.run_batched(work, scores, target)


def requires_grad(recording: "Recording", value: Tensor, requires_grad: bool = True) -> Any:
    """The rule for `Tensor.requires_grad_`, which `vmap` does not support and the tape does not need.

    Gradient checkpointing of the transformers library calls it on the outputs of embeddings.
    """
    return value if requires_grad and is_batchedtensor(value) else NotImplemented


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
