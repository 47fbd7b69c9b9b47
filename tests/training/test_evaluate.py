import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hush.training.evaluate import evaluate


def test_it_is_the_mean_loss_and_accuracy_over_all_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9), nn.Linear(4, 2))
    inputs, targets = torch.randn(2500, 3), torch.randint(0, 2, (2500,))
    model[1].eval()
    modes = [module.training for module in model.modules()]
    result = evaluate(model, nn.CrossEntropyLoss(), (inputs, targets))
    assert [module.training for module in model.modules()] == modes
    model.eval()
    outputs = model(inputs)
    torch.testing.assert_close(
        torch.tensor(result["loss"]), nn.functional.cross_entropy(outputs, targets).detach()
    )
    assert result["accuracy"] == (outputs.argmax(1) == targets).double().mean()


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


def test_regression_has_no_accuracy() -> None:
    result = evaluate(nn.Linear(3, 1), nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 1)))
    assert set(result) == {"loss"}


def test_weights_that_moved_inside_autocast_are_the_ones_evaluated() -> None:
    """torch keeps low-precision copies of weights until the outermost context ends."""
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    data = torch.randn(16, 4), torch.randint(0, 2, (16,))
    with torch.autocast("cpu", torch.bfloat16):
        model(data[0])  # whoever called the model before: the copies are made here
        before = evaluate(model, loss, data)["loss"]
        with torch.no_grad():
            model.weight.mul_(-5)
        inside = evaluate(model, loss, data)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        afresh = evaluate(model, loss, data)["loss"]
    assert inside == afresh != before


class Recalling(nn.Linear):
    """Keeps the last outputs of an evaluation, in a buffer that was there and in a new one."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("none", None)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if not self.training:
            self.last = outputs[-1]
            self.register_buffer("new", outputs[0])
        return outputs


@pytest.mark.parametrize("fails", [False, True])
def test_evaluating_leaves_modes_and_buffers(fails: bool) -> None:
    model = nn.Sequential(Recalling(), nn.Dropout())
    model[1].eval()
    before = dict(model.named_buffers())
    targets = torch.zeros(3, dtype=torch.long)
    if fails:
        with pytest.raises((RuntimeError, IndexError)):
            evaluate(model, nn.CrossEntropyLoss(), (torch.ones(3, 4), targets + 5))
    else:
        evaluate(model, nn.CrossEntropyLoss(), (torch.ones(3, 4), targets))
    after = dict(model.named_buffers())
    assert after.keys() == before.keys() == {"0.last"}
    assert after["0.last"] is before["0.last"]
    assert torch.equal(after["0.last"], torch.zeros(2))
    assert [module.training for module in model] == [True, False]
