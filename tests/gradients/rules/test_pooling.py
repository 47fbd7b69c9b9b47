"""Max pooling with channels last, beside torch's pooling of one record at a time."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.gradients.recording import record


class ScaledPooling(nn.Module):
    """A weight of each pixel shows which one of equal pixels is the largest."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 6, 7))

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = functional.max_pool2d(x * self.scale, (3, 2), (2, 1), (1, 0), ceil_mode=True)
        return pooled.flatten(1)


@pytest.mark.parametrize("channels", [3, 4, 17])
def test_the_same_pixel_of_equal_ones_is_the_largest(channels: int) -> None:
    torch.manual_seed(0)
    model = ScaledPooling(channels)
    x = torch.randint(0, 2, (9, channels, 6, 7)).float()
    x[0, 0, 2, 3] = torch.nan
    tape = record(model, lambda o, _: (o * o.detach()).sum(1) + o.sum(1), x, torch.zeros(9))
    ((_, gradients),) = tape.chunks()
    for own, image in zip(gradients["scale"], x, strict=True):
        output = model(image.unsqueeze(0))
        loss = (output * output.detach()).sum() + output.sum()
        (expected,) = torch.autograd.grad(loss, model.scale)
        torch.testing.assert_close(own, expected, equal_nan=True, rtol=0, atol=0)
