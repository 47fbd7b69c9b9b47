"""An LSTM's recurrence over gates that are known up to the state's part, for the CPU.

PyTorch's fused kernel wants the layer's input, not its gates, and is twice as slow when it is given
those through an identity. Here each step is one matrix product and a few passes over small buffers. The
hyperbolic tangent of x is 2 sigmoid(2 x) - 1, which torch computes four times as fast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def lstm_scan(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The states at all steps and the last cell, from gates (steps, sequences, 4 * size).

    The gates are overwritten.
    """
    states, last = _LSTMScan.apply(gates, hidden, cell, weight)  # type: ignore[no-untyped-call]
    return states, last


class _LSTMScan(Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        gates = gates.detach()
        steps, sequences, _ = gates.shape
        size = hidden.shape[-1]
        cells = gates.new_empty(steps + 1, sequences, size)
        cells[0] = cell
        tanh_cells = gates.new_empty(steps, sequences, size)
        states = torch.empty_like(tanh_cells)
        transposed = weight.t().contiguous()
        previous = hidden
        for t in range(steps):
            input_gate, forget_gate, cell_gate, output_gate = gates[t].split(size, dim=-1)
            gates[t].addmm_(previous, transposed)
            cell_gate.mul_(2)
            gates[t].sigmoid_()
            cell_gate.mul_(2).sub_(1)
            torch.mul(forget_gate, cells[t], out=cells[t + 1]).addcmul_(input_gate, cell_gate)
            torch.mul(cells[t + 1], 2, out=tanh_cells[t]).sigmoid_().mul_(2).sub_(1)
            previous = torch.mul(output_gate, tanh_cells[t], out=states[t])
        ctx.saved = gates, cells, tanh_cells, weight
        return states, cells[steps].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gates, cells, tanh_cells, weight = ctx.saved
        steps, sequences, size = grad.shape
        derivatives = torch.empty_like(gates)
        d_cell, d_state = last.clone(), torch.zeros_like(last)
        for stop in range(steps, 0, -_BLOCK):
            start = max(0, stop - _BLOCK)
            block = slice(start, stop)
            to_cell = _derivatives(gates[block], cells[block], tanh_cells[block], derivatives[block])
            by_gate = derivatives[block].view(-1, sequences, 4, size)
            for t in range(stop - 1, start - 1, -1):
                d_state = d_state + grad[t]
                d_cell.addcmul_(d_state, to_cell[t - start])
                by_gate[t - start, :, :3].mul_(d_cell.unsqueeze(1))
                by_gate[t - start, :, 3].mul_(d_state)
                d_cell.mul_(gates[t, :, size : 2 * size])
                d_state = derivatives[t] @ weight
        return derivatives, d_state, d_cell, None


def _derivatives(gates: Tensor, cells: Tensor, tanh_cells: Tensor, out: Tensor) -> Tensor:
    """Derivative of the state with respect to the cell, at each step.

    To `out` are written those of the cell (for the output gate: of the state) with respect to the gates.
    """
    input_gate, _, cell_gate, output_gate = gates.split(tanh_cells.shape[-1], dim=-1)
    torch.mul(gates, gates, out=out)
    torch.sub(gates, out, out=out)
    to_input, to_forget, to_cell_gate, to_output = out.split(tanh_cells.shape[-1], dim=-1)
    to_input.mul_(cell_gate)
    to_forget.mul_(cells)
    torch.mul(cell_gate, cell_gate, out=to_cell_gate).neg_().add_(1).mul_(input_gate)
    to_output.mul_(tanh_cells)
    return torch.mul(tanh_cells, tanh_cells).neg_().add_(1).mul_(output_gate)


_BLOCK = 8
"""Steps whose derivatives are computed together, few enough to stay in the cache."""
