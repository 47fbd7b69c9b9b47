"""The recurrence of an LSTM, beside PyTorch's own."""

import pytest
import torch
from torch import nn

from hush.gradients.rules import Weight, recurrent

STEPS, RECORDS, INPUTS, SIZE = 7, 5, 4, 3


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("steps_at_once", [1, 3, 100])
def test_outputs_and_gradients_are_those_of_torch(
    steps_at_once: int, bidirectional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    directions = 2 if bidirectional else 1
    monkeypatch.setattr(recurrent, "_BLOCK", steps_at_once * directions * RECORDS * 4 * SIZE)
    lstm = nn.LSTM(INPUTS, SIZE, bidirectional=bidirectional).double()
    x = torch.randn(STEPS, RECORDS, INPUTS).double().requires_grad_()
    start = [torch.randn(directions, RECORDS, SIZE).double().requires_grad_() for _ in range(2)]
    output, (_, cells) = lstm(x, (start[0], start[1]))
    grads = torch.randn_like(output), torch.randn_like(cells)
    named = dict(lstm.named_parameters())
    inputs = [x, *start, *named.values()]
    expected = torch.autograd.grad([output, cells], inputs, grads)

    weights = [Weight(value.detach(), []) for value in named.values()]
    runs = [weights[i : i + 4] for i in range(0, len(weights), 4)]
    layer = recurrent.LSTMScan(RECORDS, [(run[0], run[1], run[2], run[3]) for run in runs])
    (found, last), saved = layer.forward(*(value.detach() for value in (x, *start)))
    to_inputs = layer.backward(grads, saved, (True, True, True))
    summed = [weight.terms[0].dense().sum(0) for weight in weights if weight.terms]

    torch.testing.assert_close((found, last), (output.detach(), cells.detach()))
    torch.testing.assert_close((*to_inputs, *summed), expected)
