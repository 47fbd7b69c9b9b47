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


def scan(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The states at all steps and the last cell, from gates (steps, sequences, 4 * size).

    The gates are overwritten.
    """
    states, last = _Scan.apply(gates, hidden, cell, weight)  # type: ignore[no-untyped-call]
    return states, last


class _Scan(Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        gates = gates.detach()
        steps, sequences, _ = gates.shape
        size = hidden.shape[-1]
        cells = gates.new_empty(steps + 1, sequences, size)
        cells[0] = cell
        bent = gates.new_empty(steps, sequences, size)
        states = torch.empty_like(bent)
        transposed = weight.t().contiguous()
        before = hidden
        for t in range(steps):
            enter, keep, new, leave = gates[t].split(size, dim=-1)
            gates[t].addmm_(before, transposed)
            new.mul_(2)
            gates[t].sigmoid_()
            new.mul_(2).sub_(1)
            torch.mul(keep, cells[t], out=cells[t + 1]).addcmul_(enter, new)
            torch.mul(cells[t + 1], 2, out=bent[t]).sigmoid_().mul_(2).sub_(1)
            before = torch.mul(leave, bent[t], out=states[t])
        ctx.kept = gates, cells, bent, weight
        return states, cells[steps].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gates, cells, bent, weight = ctx.kept
        steps, sequences, size = grad.shape
        slopes = torch.empty_like(gates)
        d_cell, d_state = last.clone(), torch.zeros_like(last)
        for stop in range(steps, 0, -_BLOCK):
            start = max(0, stop - _BLOCK)
            block = slice(start, stop)
            to_cell = _slopes(gates[block], cells[block], bent[block], slopes[block])
            by_gate = slopes[block].view(-1, sequences, 4, size)
            for t in range(stop - 1, start - 1, -1):
                d_state = d_state + grad[t]
                d_cell.addcmul_(d_state, to_cell[t - start])
                by_gate[t - start, :, :3].mul_(d_cell.unsqueeze(1))
                by_gate[t - start, :, 3].mul_(d_state)
                d_cell.mul_(gates[t, :, size : 2 * size])
                d_state = slopes[t] @ weight
        return slopes, d_state, d_cell, None


def _slopes(gates: Tensor, cells: Tensor, bent: Tensor, out: Tensor) -> Tensor:
    """What the cell's gradient (for the last gate: the state's) is multiplied by on its way to a gate.

    Written to `out`; returned is the factor from the state's gradient to the cell's.
    """
    enter, _, new, leave = gates.split(bent.shape[-1], dim=-1)
    torch.mul(gates, gates, out=out)
    torch.sub(gates, out, out=out)
    to_enter, to_keep, to_new, to_leave = out.split(bent.shape[-1], dim=-1)
    to_enter.mul_(new)
    to_keep.mul_(cells)
    torch.mul(new, new, out=to_new).neg_().add_(1).mul_(enter)
    to_leave.mul_(bent)
    return torch.mul(bent, bent).neg_().add_(1).mul_(leave)


_BLOCK = 8
"""Steps whose slopes are worked out together, few enough to stay in the cache."""
