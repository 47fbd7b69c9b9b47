"""Rule for LSTM, GRU and RNN layers: each time step is a position of two matrix products.

The gates at a step are `P + W_hh h`, with `P = W_ih x + b` and the previous state h. The gradient of P
is therefore the left factor for both weights, and the right factors are x and h. PyTorch's kernel runs
the recurrence on P, with the identity instead of W_ih, and its backward pass returns the gradient of P.
On a CPU, `LSTMScan` is faster for LSTMs. Sequences have shape (steps, sequences, size).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.gradients.rules.linear import outer_product_term
from hush.gradients.terms import Dense
from hush.gradients.tree import Gradients

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight

_BLOCK = 2**18
"""Number of gates processed at a time; 1 MiB fits the cache of a core."""
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


@dataclass(frozen=True, eq=False)
class LSTMScan:
    """One LSTM layer, from (steps, sequences, inputs) to (steps, sequences, directions * size).

    Additional inputs are the initial states and cells, of shape (directions, sequences, size). The
    second output contains the final cells.
    """

    records: int
    directions: "list[tuple[Weight, Weight, Weight | None, Weight | None]]"
    """Input weight, state weight, input bias and state bias of each direction."""

    def forward(
        self, x: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        steps, sequences, inputs = x.shape
        directions, _, size = hidden.shape
        # operands of each step: input and previous state
        reads = x.new_empty(steps + 1, directions, sequences, inputs + size)
        reads[:-1, 0, :, :inputs] = x
        if directions == 2:
            reads[:-1, 1, :, :inputs] = x.flip(0)
        reads[0, ..., inputs:] = hidden
        cells = x.new_empty(steps + 1, directions, sequences, size)
        cells[0] = cell
        tanh_cells = torch.empty_like(cells[1:])
        gates = x.new_empty(steps, directions, sequences, 4 * size)
        weight, none = self._weight().mT.contiguous(), x.new_zeros(4 * size)
        sums = [sum((b.value for b in own[2:] if b is not None), start=none) for own in self.directions]
        bias = torch.stack(sums).unsqueeze(1)
        for part in (weight, bias):
            part[..., 2 * size : 3 * size] *= 2  # the cell gate uses tanh
        # use tensors, because converting Python numbers in each call is slow
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
    ) -> Gradients:
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
            # overwrites the gates with derivatives; the loop overwrites these with gradients
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
        for number, weights in enumerate(self.directions):
            left = by_record(gates[:, number], self.records)
            right = by_record(reads[:-1, number], self.records).split([inputs, size], dim=2)
            _append_terms(weights, (left, left), right)
        if not needed[0]:
            return None, d_state, d_cell
        return sum((own.flip(0) for own in d_x[:, 1:].unbind(1)), start=d_x[:, 0]), d_state, d_cell

    def _weight(self) -> Tensor:
        """Concatenated weights of input and state: (directions, 4 * size, inputs + size)."""
        return torch.stack([torch.cat([own[0].value, own[1].value], dim=1) for own in self.directions])


def by_record(sequences: Tensor, records: int) -> Tensor:
    """Reshape (steps, sequences, size) to (records, positions, size)."""
    return sequences.transpose(0, 1).reshape(records, -1, sequences.shape[-1])


def _append_terms(
    weights: Sequence["Weight | None"], lefts: Sequence[Tensor], rights: Sequence[Tensor]
) -> None:
    """Append the terms of the input and state weights and their biases."""
    total = lefts[0].sum(1)
    totals = total, total if lefts[1] is lefts[0] else lefts[1].sum(1)
    for weight, left, right in zip(weights[:2], lefts, rights, strict=True):
        if weight is not None and weight.terms is not None:
            weight.terms.append(outer_product_term(left, right, weight.value.shape))
    for bias, total in zip(weights[2:], totals, strict=True):
        if bias is not None and bias.terms is not None:
            bias.terms.append(Dense(total))


def _derivatives(gates: Tensor, cells: Tensor, tanh_cells: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative of the state with respect to the cell, and a copy of the forget gate, per step.

    Overwrites each gate with a derivative with respect to its pre-activation: the derivative of the
    state for the output gate, and the derivative of the cell for the other gates.
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


_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


@dataclass(eq=False)
class Gates:
    """Input part of the gates, `W_ih x + b`, for one direction of a layer."""

    kind: str
    records: int
    input_weight: "Weight"
    state_weight: "Weight"
    input_bias: "Weight | None"
    state_bias: "Weight | None"
    previous: Tensor = field(init=False)
    """Previous state at each step; set after the recurrence."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        bias = None if self.input_bias is None else self.input_bias.value
        if self.kind != "gru" and bias is not None and self.state_bias is not None:
            bias = bias + self.state_bias.value
        gates = functional.linear(x.flatten(0, 1), self.input_weight.value, bias)
        return gates, (x, gates) if self.kind == "gru" else (x,)

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        x, *gates = saved
        grad = grad.unflatten(0, x.shape[:2])
        left = state_left = by_record(grad, self.records)
        if gates:  # GRU: the reset gate multiplies the state part of the new state
            size = self.state_weight.value.shape[1]
            bias = None if self.state_bias is None else self.state_bias.value[:size]
            reset = functional.linear(self.previous, self.state_weight.value[:size], bias)
            reset += gates[0].view_as(grad)[..., :size]
            new = grad[..., 2 * size :] * reset.sigmoid_()
            state_left = by_record(torch.cat([grad[..., : 2 * size], new], dim=-1), self.records)
        weights = self.input_weight, self.state_weight, self.input_bias, self.state_bias
        rights = by_record(x, self.records), by_record(self.previous, self.records)
        _append_terms(weights, (left, state_left), rights)
        return (grad @ self.input_weight.value if needed[0] else None,)


def _run_layer(
    recording: "Recording", kind: str, directions: Any, x: Tensor, start: list[Tensor]
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """States of a layer at all steps, and its final states in each direction."""
    if kind == "lstm" and not x.is_cuda:
        scan = LSTMScan(recording.records, [tuple(weights) for weights in directions])
        states, cells = recording.capture(scan, x, *start)
        parts = states.chunk(len(directions), dim=-1)
        last = [part[0] if backwards else part[-1] for backwards, part in enumerate(parts)]
        return states, list(zip(last, cells, strict=True))
    outputs, ends = [], []
    for backwards, weights in enumerate(directions):
        gates, own = Gates(kind, recording.records, *weights), [state[backwards] for state in start]
        rows = x.flip(0) if backwards else x
        inputs = recording.capture(gates, rows).unflatten(0, x.shape[:2])
        weight, bias = gates.state_weight.value, gates.state_bias
        kernel = [torch.eye(len(weight), dtype=inputs.dtype, device=inputs.device), weight]
        if kind == "gru" and bias is not None:
            kernel += [torch.zeros_like(bias.value), bias.value]
        if x.is_cuda:
            kernel = [part.clone() for part in kernel]
            sizes = len(kernel), len(weight), _CUDNN_MODES[kind], weight.shape[1]
            torch._cudnn_rnn_flatten_weight(kernel, *sizes, 0, 1, False, False)
        hidden = [state.unsqueeze(0).contiguous() for state in own]
        options = (len(kernel) == 4, 1, 0.0, True, False, False)
        initial = hidden if kind == "lstm" else hidden[0]
        states, *end = getattr(torch._VF, kind)(inputs, initial, kernel, *options)
        gates.previous = torch.cat([own[0].unsqueeze(0), states[:-1]]).detach()
        outputs.append(states.flip(0) if backwards else states)
        ends.append(tuple([state.squeeze(0) for state in end]))
    return torch.cat(outputs, dim=-1), ends


def recurrent(
    kind: str,
    recording: "Recording",
    x: Tensor,
    states: Any,
    parameters: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """Rule for `torch.nn.LSTM`, `GRU` and `RNN`, by kind."""
    if isinstance(parameters, bool):  # a packed sequence runs one record at a time
        return NotImplemented
    weights = recording.as_weights(*parameters)
    if weights is None and recording.of_records_and_constants(x, *parameters):
        from hush.gradients.rules import Weight

        weights = [Weight(value) for value in parameters]  # frozen: only input gradients
    directions, count = 2 if bidirectional else 1, 4 if has_biases else 2
    if weights is None or len(weights) != num_layers * directions * count or not x.numel():
        return NotImplemented  # proj_size adds a third weight; torch rejects empty sequences
    runs = [[*weights[i : i + count], None, None][:4] for i in range(0, len(weights), count)]
    layers = [runs[i : i + directions] for i in range(0, len(runs), directions)]

    def work(*tensors: Tensor) -> tuple[Tensor, ...]:
        """Outputs and final states; the input is (records, count, steps, size) or, without
        `batch_first`, (records, steps, count, size)."""
        # under autocast, recurrences run in the precision of the weights
        first, *initial = (part.to(parameters[0].dtype) for part in tensors)
        first = first.permute(2, 0, 1, 3) if batch_first else first.transpose(0, 1)
        flow, sequences = first.flatten(1, 2), first.shape[1:3]
        starts = [state.transpose(0, 1).flatten(1, 2) for state in initial]
        ends: list[tuple[Tensor, ...]] = []
        with torch.autocast(x.device.type, enabled=False):
            for layer in layers:
                start = [state[len(ends) : len(ends) + directions] for state in starts]
                flow, last = _run_layer(recording, kind, layer, flow, start)
                ends += last
                if train and dropout and layer is not layers[-1]:
                    flow = functional.dropout(flow, dropout)
        outputs = flow.unflatten(1, sequences)
        outputs = outputs.permute(1, 2, 0, 3) if batch_first else outputs.transpose(0, 1)
        stacked = (torch.stack(part).unflatten(1, sequences) for part in zip(*ends, strict=True))
        return outputs, *(part.transpose(0, 1) for part in stacked)

    return recording.run_batched(work, x, *(states if kind == "lstm" else (states,)))
