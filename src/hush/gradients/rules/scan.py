"""An LSTM's recurrence over gates that are known up to the state's part, for the CPU.

PyTorch's fused kernel wants the layer's input, not its gates, and is twice as slow when it is given
those through an identity. Here each step is one matrix product and a few passes over small buffers, and
what the backward pass multiplies with is worked out for all steps at once. The hyperbolic tangent of x
is 2 sigmoid(2 x) - 1, which torch computes four times as fast.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def scan(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The states at all steps and the last cell, from gates (steps, sequences, 4 * size)."""
    states, last = _Scan.apply(gates, hidden, cell, weight)  # type: ignore[no-untyped-call]
    return states, last


class _Scan(Function):
    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps, sequences, _ = gates.shape
        size = hidden.shape[-1]
        active = gates.clone()
        cells = torch.cat([cell.unsqueeze(0), gates.new_empty(steps, sequences, size)])
        bent = gates.new_empty(steps, sequences, size)
        states = torch.empty_like(bent)
        transposed = weight.t().contiguous()
        parts = active.split(size, dim=-1)
        before = hidden
        for t in range(steps):
            enter, keep, new, leave = (part[t] for part in parts)
            active[t].addmm_(before, transposed)
            new.mul_(2)
            active[t].sigmoid_()
            new.mul_(2).sub_(1)
            torch.mul(keep, cells[t], out=cells[t + 1]).addcmul_(enter, new)
            torch.mul(cells[t + 1], 2, out=bent[t]).sigmoid_().mul_(2).sub_(1)
            before = torch.mul(leave, bent[t], out=states[t])
        ctx.save_for_backward(active, cells, bent, weight)
        return states, cells[steps].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        active, cells, bent, weight = ctx.saved_tensors
        steps, sequences, size = grad.shape
        enter, keep, new, leave = active.split(size, dim=-1)
        # d gate = slope * (d cell, or d state for the gate that lets the state out)
        slopes = torch.mul(active, active).neg_().add_(active)
        to_enter, to_keep, to_new, to_leave = slopes.split(size, dim=-1)
        to_enter.mul_(new)
        to_keep.mul_(cells[:-1])
        torch.mul(new, new, out=to_new).neg_().add_(1).mul_(enter)
        to_leave.mul_(bent)
        to_cell = torch.mul(bent, bent).neg_().add_(1).mul_(leave)
        d_cell = last.clone()
        d_states = grad.clone()
        d_state = d_states[steps - 1]
        by_gate = slopes.view(steps, sequences, 4, size)
        for t in range(steps - 1, -1, -1):
            d_cell.addcmul_(d_state, to_cell[t])
            by_gate[t, :, :3].mul_(d_cell.unsqueeze(1))
            to_leave[t].mul_(d_state)
            d_cell.mul_(keep[t])
            d_state = d_states[t - 1].addmm_(slopes[t], weight) if t else slopes[t] @ weight
        return slopes, d_state, d_cell, None
