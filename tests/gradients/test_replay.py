import pytest
import torch
from torch import nn

import hush
from hush.core.errors import Unsupported
from hush.core.parts import Clipping
from hush.gradients.recording import record
from hush.gradients.replay import Replay

LOSS = nn.CrossEntropyLoss(reduction="none")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")


def test_without_a_gpu_there_is_nothing_to_replay_on() -> None:
    with pytest.raises(Unsupported, match="CUDA graphs and the model is not on a GPU"):
        Replay(nn.Linear(2, 2), LOSS, hush.L2(norm=1.0))


@needs_cuda
@pytest.mark.parametrize(
    "clipping", [hush.L2(norm=0.1), hush.Linf(norm=0.01), hush.L2Linf(l2=0.1, linf=0.02)]
)
def test_a_replayed_sum_is_the_sum(clipping: Clipping) -> None:
    first, last = nn.Linear(4, 8), nn.Linear(8, 3)
    model = nn.Sequential(first, nn.Tanh(), last).cuda()
    replay = Replay(model, LOSS, clipping)
    for records in (1, 63, 64, 65, 200, 3):
        inputs, targets = torch.randn(records, 4).cuda(), torch.randint(0, 3, (records,)).cuda()
        inputs[0] = torch.nan if records == 65 else inputs[0]
        ours = replay(inputs, targets)
        expected = clipping.clip(record(model, LOSS, inputs, targets))
        assert int(ours.skipped) == int(expected.skipped) == (records == 65)
        for name, part in expected.total.items():
            torch.testing.assert_close(ours.total[name], part, rtol=1e-4, atol=1e-6)
        first.weight.data.add_(0.01)
    last.requires_grad_(False)
    assert set(replay(inputs, targets).total) == {"0.weight", "0.bias"}


@needs_cuda
def test_blocks_are_not_replayed() -> None:
    model, batch = nn.Linear(4, 3).cuda(), (torch.randn(5, 4).cuda(), torch.zeros(5).long().cuda())
    with pytest.raises(Unsupported, match="blocks of a gradient are not replayed"):
        Replay(model, LOSS, hush.Subspaces(ranks=(7, 8), l2=(1.0, 1.0)))(*batch)


@needs_cuda
def test_replayed_coordinates_are_drawn_anew() -> None:
    """A record's gradient, masked at 1/4, again and again: the share kept, and no two masks alike."""
    torch.manual_seed(0)
    model, sampling = nn.Linear(100, 50, bias=False).cuda(), hush.Coordinate(rate=0.25)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, targets = torch.randn(1, 100).cuda(), torch.zeros(1).long().cuda()

    def mask(values: torch.Tensor) -> torch.Tensor:
        return sampling.mask_coordinates(values, generator)

    replay = Replay(model, LOSS, hush.L2(norm=1.0))
    masks = [replay(inputs, targets, mask, generator).total["weight"] != 0 for _ in range(50)]
    masks_drawn = torch.stack([mask.flatten() for mask in masks]).double()
    # 250,000 independent coordinates: five deviations of the share are .0043
    assert abs(masks_drawn.mean().item() - 0.25) < 0.0044
    joint = (masks_drawn @ masks_drawn.T / masks_drawn.shape[1]).fill_diagonal_(1 / 16)
    # shares of pairs: 5,000 coordinates each, six deviations of 1/16
    assert (joint - 1 / 16).abs().max() < 6 * (1 / 16 * 15 / 16 / 5000) ** 0.5

    state = generator.get_state()
    once = replay(inputs, targets, mask, generator).total["weight"].clone()
    generator.set_state(state)
    assert torch.equal(once, replay(inputs, targets, mask, generator).total["weight"])
    generator.set_state(state)
    fresh = Replay(model, LOSS, hush.L2(norm=1.0))
    assert torch.equal(once, fresh(inputs, targets, mask, generator).total["weight"])
