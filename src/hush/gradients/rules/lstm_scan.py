"""An LSTM layer on the CPU: the recurrence, in all its directions at once, and its backward pass.

PyTorch's fused kernel keeps its gates to itself. Here a step is one matrix product of the weights with
the input and the state side by side, and a few passes over buffers that stay in the cache; a direction
that reads a sequence from its end runs beside the other, at the same step of its own. The hyperbolic
tangent of x is 2 sigmoid(2 x) - 1, which torch computes four times as fast.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hush.gradients.rules.linear import OuterFactors, materialising_pays, outer_product_term
from hush.gradients.terms import Dense, Term

if TYPE_CHECKING:
    from hush.gradients.rules import Weight

_BLOCK = 2**18
"""Gates whose derivatives are computed together: as many as stay in the cache of a core, 1 MiB."""
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


@dataclass(frozen=True, eq=False)
class LSTMScan:
    """One layer of an LSTM: (steps, sequences, inputs) to (steps, sequences, directions * size).

    Its other inputs are the first states and cells, (directions, sequences, size); its second output is
    the last cells.
    """

    records: int
    directions: "list[tuple[Weight, Weight, Weight | None, Weight | None]]"
    """Weight of the input and of the state, bias of the input and of the state."""

    def forward(
        self, x: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        steps, sequences, inputs = x.shape
        directions, _, size = hidden.shape
        # what the product of each step reads: its input and the state before it
        reads = x.new_empty(steps + 1, directions, sequences, inputs + size)
        reads[:-1, 0, :, :inputs] = x
        if directions == 2:
            reads[:-1, 1, :, :inputs] = x.flip(0)
        reads[0, ..., inputs:] = hidden
        cells = x.new_empty(steps + 1, directions, sequences, size)
        cells[0] = cell
        tanh_cells = torch.empty_like(cells[1:])
        gates = x.new_empty(steps, directions, sequences, 4 * size)
        weight, bias = self._weight().mT.contiguous(), self._bias(x)
        for part in (weight, bias):
            part[..., 2 * size : 3 * size] *= 2  # the cell's gate is a hyperbolic tangent
        # tensors: a Python number is converted anew by every call
        one, two = x.new_tensor(1.0), x.new_tensor(2.0)
        read, gate, c, tanh_c = (part.unbind(0) for part in (reads, gates, cells, tanh_cells))
        state = reads[..., inputs:].unbind(0)
        by_gate = (part.unbind(0) for part in gates.split(size, dim=-1))
        for t, (input_gate, forget_gate, cell_gate, output_gate) in enumerate(
            zip(*by_gate, strict=True)
        ):
            torch.baddbmm(bias, read[t], weight, out=gate[t]).sigmoid_()
            cell_gate.mul_(two).sub_(one)
            torch.mul(forget_gate, c[t], out=c[t + 1]).addcmul_(input_gate, cell_gate)
            torch.mul(c[t + 1], two, out=tanh_c[t]).sigmoid_().mul_(two).sub_(one)
            torch.mul(output_gate, tanh_c[t], out=state[t + 1])
        states = reads[1:, ..., inputs:]
        output = torch.cat([states[:, 0], *(own.flip(0) for own in states[:, 1:].unbind(1))], dim=-1)
        return (output, cells[-1].clone()), (reads, gates, cells, tanh_cells)

    def backward(
        self, grad: tuple[Tensor, Tensor], saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        reads, gates, cells, tanh_cells = saved
        steps, directions, sequences, size = tanh_cells.shape
        inputs = reads.shape[-1] - size
        skipped = 0 if needed[0] else inputs
        weight = self._weight()[..., skipped:].contiguous()
        first, *flipped = grad[0].chunk(directions, dim=-1)
        outer = torch.stack([first, *(part.flip(0) for part in flipped)], dim=1).unbind(0)
        d_x = gates.new_empty(steps, directions, sequences, inputs - skipped)
        d_cell, d_read = grad[1].clone(), gates.new_zeros(directions, sequences, weight.shape[-1])
        d_input, d_state = d_read.split([inputs - skipped, size], dim=-1)
        gate, d_inputs = gates.unbind(0), d_x.unbind(0)
        to_input, to_forget, to_cell_gate, to_output = (
            part.unbind(0) for part in gates.split(size, dim=-1)
        )
        block = max(1, _BLOCK // max(1, gates[0].numel()))
        for stop in range(steps, 0, -block):
            part = slice(max(0, stop - block), stop)
            # the gates are overwritten: by derivatives here, and by their gradients below
            to_cell, forget = _derivatives(gates[part], cells[part], tanh_cells[part])
            for t in range(stop - 1, part.start - 1, -1):
                d_state.add_(outer[t])
                d_cell.addcmul_(d_state, to_cell[t - part.start])
                to_input[t].mul_(d_cell)
                to_forget[t].mul_(d_cell)
                to_cell_gate[t].mul_(d_cell)
                to_output[t].mul_(d_state)
                d_cell.mul_(forget[t - part.start])
                torch.bmm(gate[t], weight, out=d_read)
                if needed[0]:
                    d_inputs[t].copy_(d_input)
        for number in range(directions):
            self._append_terms(number, gates[:, number], reads[:-1, number])
        if not needed[0]:
            return None, d_state, d_cell
        return sum((own.flip(0) for own in d_x[:, 1:].unbind(1)), start=d_x[:, 0]), d_state, d_cell

    def _append_terms(self, number: int, grad: Tensor, reads: Tensor) -> None:
        """Append the terms of one direction from its gates' gradients, the inputs and the states."""
        left, right = by_record(grad, self.records), by_record(reads, self.records)
        weights, biases = self.directions[number][:2], self.directions[number][2:]
        shapes = [weight.value.shape for weight in weights]
        widths = [shape[1] for shape in shapes]
        if all(materialising_pays(left, width) for width in widths):
            # one product for both: it reads the gradients once
            whole = OuterFactors(left, right, torch.Size((left.shape[2], sum(widths)))).dense()
            terms: list[Term] = [Dense(part.contiguous()) for part in whole.split(widths, dim=2)]
        else:
            left = left.contiguous()
            factors = (part.contiguous() for part in right.split(widths, dim=2))
            terms = [outer_product_term(left, *own) for own in zip(factors, shapes, strict=True)]
        total = Dense(left.sum(1))
        for weight, term in (*zip(weights, terms, strict=True), *((bias, total) for bias in biases)):
            if weight is not None and weight.terms is not None:
                weight.terms.append(term)

    def _weight(self) -> Tensor:
        """(directions, 4 * size, inputs + size): the weights of input and state side by side."""
        return torch.stack([torch.cat([own[0].value, own[1].value], dim=1) for own in self.directions])

    def _bias(self, x: Tensor) -> Tensor:
        """(directions, 1, 4 * size)."""
        none = x.new_zeros(len(self.directions[0][0].value))
        sums = [sum((b.value for b in own[2:] if b is not None), start=none) for own in self.directions]
        return torch.stack(sums).unsqueeze(1)


def by_record(sequences: Tensor, records: int) -> Tensor:
    """(steps, sequences, size) as (records, positions, size): all steps of a record's sequences."""
    return sequences.transpose(0, 1).reshape(records, -1, sequences.shape[-1])


def _derivatives(gates: Tensor, cells: Tensor, tanh_cells: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative of the state with respect to the cell, and the forget gate, at each step.

    Gates are replaced by the derivative of the cell (for the output gate: of the state) with respect to
    what they are the sigmoid or hyperbolic tangent of.
    """
    input_gate, forget_gate, cell_gate, output_gate = gates.split(tanh_cells.shape[-1], dim=-1)
    to_cell, to_cell_gate = (torch.empty_like(tanh_cells) for _ in range(2))
    _tanh_backward(output_gate, tanh_cells, grad_input=to_cell)
    _tanh_backward(input_gate, cell_gate, grad_input=to_cell_gate)
    forget = forget_gate.clone(memory_format=torch.contiguous_format)
    _sigmoid_backward(cell_gate, input_gate, grad_input=input_gate)
    _sigmoid_backward(cells, forget, grad_input=forget_gate)
    _sigmoid_backward(tanh_cells, output_gate, grad_input=output_gate)
    cell_gate.copy_(to_cell_gate)
    return to_cell, forget
