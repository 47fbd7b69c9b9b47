import torch
from torch import nn

import hush
from hush.gradients.recording import record


def test_it_is_the_l_p_clipping_of_order_two() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(9, 4) * torch.logspace(-2, 2, 9)[:, None]
    loss = nn.CrossEntropyLoss(reduction="none")
    tape = record(nn.Linear(4, 3), loss, inputs, torch.randint(0, 3, (9,)))
    ours, general = hush.L2(norm=0.7).clip(tape), hush.Lp(p=2.0, norm=0.7).clip(tape)
    assert all(torch.equal(ours.total[name], general.total[name]) for name in ours.total)
    assert hush.L2(norm=0.7).unit == hush.Lp(p=2.0, norm=0.7).unit == 0.7
