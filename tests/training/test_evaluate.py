import math
from typing import Any

import pytest
import torch
from torch import nn

from hush.training.evaluate import evaluate


def test_modes_and_buffers_are_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("written", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training
            self.get_buffer("written").add_(1)
            self.replaced = self.get_buffer("replaced") + 1
            return x

    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9).eval(), Counting())
    modes, before = [module.training for module in model.modules()], dict(model.named_buffers())
    evaluate(model, nn.CrossEntropyLoss(), (torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)))
    assert [module.training for module in model.modules()] == modes
    assert all(buffer is before[name] and not buffer for name, buffer in model.named_buffers())


WEIGHTS = torch.tensor([1.0, 5.0, 0.25])


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (nn.CrossEntropyLoss(ignore_index=1), ()),
        (nn.CrossEntropyLoss(weight=WEIGHTS), ()),
        (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2, label_smoothing=0.1), ()),
        (nn.NLLLoss(weight=WEIGHTS, ignore_index=0), ()),
        (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2), (4,)),
        (nn.CrossEntropyLoss(), ()),
    ],
)
def test_loss_and_accuracy_are_torch_s(loss: Any, shape: tuple[int, ...]) -> None:
    """Over several batches, by torch's own mean of all records at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LogSoftmax(1))
    inputs, targets = torch.randn(2500, 2), torch.randint(0, 3, (2500, *shape))
    if shape:
        model.append(nn.Unflatten(1, (3, 1))).append(nn.Upsample(shape))
    result = evaluate(model, loss, (inputs, targets))
    outputs = model(inputs).detach()
    assert result["loss"] == pytest.approx(float(loss(outputs, targets)), rel=1e-5)
    if not shape:
        stored = targets != loss.ignore_index
        right = (outputs.argmax(1) == targets)[stored]
        assert result["accuracy"] == pytest.approx(float(right.double().mean()))


def test_nothing_is_measured_where_every_record_is_ignored() -> None:
    targets = torch.ones(5, dtype=torch.int64)
    result = evaluate(nn.Linear(3, 2), nn.CrossEntropyLoss(ignore_index=1), (torch.randn(5, 3), targets))
    assert math.isnan(result["loss"])
    assert math.isnan(result["accuracy"])


def test_other_losses_are_means_over_records_and_regression_has_no_accuracy() -> None:
    regression = evaluate(nn.Linear(3, 1), nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 1)))
    assert set(regression) == {"loss"}
    model, data = nn.Linear(4, 3), (torch.randn(7, 4), torch.randint(0, 3, (7,)))
    own = evaluate(model, nn.functional.cross_entropy, data)
    assert own == pytest.approx(evaluate(model, nn.CrossEntropyLoss(), data))


def test_a_model_that_differentiates_in_forward_is_evaluated() -> None:
    class Force(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]

    model, x, y = Force(3, 2), torch.randn(5, 3), torch.randn(5, 3)
    expected = nn.MSELoss()(model(x), y).item()
    assert evaluate(model, nn.MSELoss(), (x, y))["loss"] == pytest.approx(expected)
