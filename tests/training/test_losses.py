"""Losses of many kinds in a loop of one's own, against gradients of one record at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hush
from tests.training.helpers import plan_of, step_of

RECORDS = 12
SEED = torch.Generator().manual_seed(0)
X = torch.randn(RECORDS, 5, generator=SEED)
CLASSES = torch.arange(RECORDS) % 3
SEQUENCES = torch.randn(RECORDS, 4, 5, generator=SEED)
TAGS = torch.randint(0, 3, (RECORDS, 4), generator=SEED)
TAGS[0] = -100
TAGS[3, 1:] = -100
WEIGHTS = torch.tensor([1.0, 5.0, 0.25])
MANY = (torch.rand(RECORDS, 3, generator=SEED) < 0.5).float()


class Tagger(nn.Module):
    """Scores of classes for every position, classes first, as torch's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).movedim(-1, 1)  # type: ignore[no-any-return]


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the positions of each record that are not ignored."""
    losses = functional.cross_entropy(outputs, targets, ignore_index=-100, reduction="none")
    return losses.sum(1) / (targets != -100).sum(1).clamp(min=1)


Case = tuple[Callable[[], nn.Module], Any, Tensor, Any, Callable[[Any, Any], Tensor]]
CASES: dict[str, Case] = {
    "class weights": (
        lambda: nn.Linear(5, 3),
        nn.CrossEntropyLoss(weight=WEIGHTS),
        X,
        CLASSES,
        lambda out, y: WEIGHTS[y] * -out.log_softmax(1)[torch.arange(len(y)), y],
    ),
    "multi-label": (
        lambda: nn.Linear(5, 3),
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        X,
        MANY,
        lambda out, y: (
            -(WEIGHTS * y * out.sigmoid().log() + (1 - y) * (1 - out.sigmoid()).log()).mean(1)
        ),
    ),
    "ignored positions": (Tagger, nn.CrossEntropyLoss(), SEQUENCES, TAGS, masked),
    "ignored records": (
        lambda: nn.Linear(5, 3),
        nn.CrossEntropyLoss(ignore_index=1),
        X,
        CLASSES,
        lambda out, y: torch.where(y == 1, 0.0, functional.cross_entropy(out, y, reduction="none")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_clips_the_gradient_of_each_record_s_loss(case: str) -> None:
    make, loss, inputs, targets, one_value_a_record = CASES[case]
    torch.manual_seed(0)
    model = make()
    gradients = []
    for record in range(RECORDS):
        row = slice(record, record + 1)
        (value,) = one_value_a_record(model(inputs[row]), targets[row])
        parts = torch.autograd.grad(value, list(model.parameters()))
        gradients.append(torch.cat([part.reshape(-1) for part in parts]).double())
    lengths = torch.stack(gradients).norm(dim=1)
    clip = float(lengths.median())  # so that some are clipped and some are not
    expected = sum(part * min(1.0, clip / max(float(part.norm()), 1e-30)) for part in gradients)

    plan, execution = plan_of(clipping=hush.L2(clip)), hush.Execution(physical_batch=5)
    step = step_of(model, plan, loss, records=RECORDS, execution=execution)
    batch = next(step.batches((inputs, targets)))
    torch.testing.assert_close(step.clipped_sum(batch), expected, rtol=1e-4, atol=1e-4)
    assert step(batch)


def test_class_weights_of_another_type_are_named() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHTS.double())
    step = step_of(nn.Linear(5, 3), loss=loss, records=RECORDS)
    with pytest.raises(hush.errors.DataError, match=r"class weights of .*loss\.to\(torch\.float32\)"):
        next(step.batches((X, CLASSES)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_of_a_functional_loss_with_a_dimension_too_many_are_named(reduction: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction=reduction)

    step = step_of(nn.Linear(5, 3), loss=loss, records=RECORDS)
    with pytest.raises(hush.errors.DataError, match=r"labels of shape \(records,\): targets\.squeeze"):
        next(step.batches((X, CLASSES[:, None])))
