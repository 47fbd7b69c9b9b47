import pytest
import torch
from torch import nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.recording import record
from hush.gradients.replay import Replay

LOSS = nn.CrossEntropyLoss(reduction="none")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


def test_without_a_gpu_there_is_nothing_to_replay_on() -> None:
    with pytest.raises(Unsupported, match="CUDA graphs and the model is not on a GPU"):
        Replay(nn.Linear(2, 2), LOSS, hush.L2(norm=1.0))


@needs_cuda
def test_a_replayed_sum_is_the_sum() -> None:
    first, last = nn.Linear(4, 8), nn.Linear(8, 3)
    model = nn.Sequential(first, nn.Tanh(), last).cuda()
    clipping = hush.L2(norm=0.1)
    replay = Replay(model, LOSS, clipping)
    for records in (1, 63, 64, 65, 200, 3):
        inputs, targets = torch.randn(records, 4).cuda(), torch.randint(0, 3, (records,)).cuda()
        inputs[0] = torch.nan if records == 65 else inputs[0]
        ours = replay(inputs, targets)
        wanted = clipping.clip(record(model, LOSS, inputs, targets))
        assert int(ours.skipped) == int(wanted.skipped) == (records == 65)
        for name, part in wanted.total.items():
            torch.testing.assert_close(ours.total[name], part, rtol=1e-4, atol=1e-6)
        first.weight.data.add_(0.01)
    last.requires_grad_(False)
    assert set(replay(inputs, targets).total) == {"0.weight", "0.bias"}
