"""Losses of many kinds in a loop of one's own, against gradients of one record at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hush

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
PRICES = 3 * torch.randn(RECORDS, generator=SEED)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes, self.price = nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.classes(x), self.price(x).squeeze(-1)


class Tagger(nn.Module):
    """Scores of classes for every position, classes first, as torch's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).movedim(-1, 1)  # type: ignore[no-any-return]


def both(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """Several losses: what a record's are, in a sum of public weights."""
    classes = functional.cross_entropy(outputs[0], targets["class"], reduction="none")
    return classes + 0.3 * functional.huber_loss(outputs[1], targets["price"], reduction="none")


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
    "regression": (
        lambda: nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)),
        nn.MSELoss(),
        X,
        PRICES,
        lambda out, y: (out - y).square(),
    ),
    "several losses": (
        TwoHeads,
        both,
        X,
        {"class": CLASSES, "price": PRICES},
        lambda out, y: (
            -out[0].log_softmax(1)[torch.arange(len(y["class"])), y["class"]]
            + 0.3
            * torch.where(
                (out[1] - y["price"]).abs() < 1,
                (out[1] - y["price"]).square() / 2,
                (out[1] - y["price"]).abs() - 0.5,
            )
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


class Records:
    """The same records as a data set."""

    def __init__(self, inputs: Tensor, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if isinstance(self.targets, dict):
            return self.inputs[index], {name: rows[index] for name, rows in self.targets.items()}
        return self.inputs[index], self.targets[index]


@pytest.mark.parametrize("case", CASES)
def test_a_step_clips_the_gradient_of_each_record_s_loss(case: str) -> None:
    make, loss, inputs, targets, one_value_a_record = CASES[case]
    torch.manual_seed(0)
    model = make()
    gradients = []
    for record in range(RECORDS):
        input_, target = Records(inputs, targets)[record]
        row = (
            {name: part[None] for name, part in target.items()}
            if isinstance(target, dict)
            else target[None]
        )
        (value,) = one_value_a_record(model(input_[None]), row)
        parts = torch.autograd.grad(value, list(model.parameters()))
        gradients.append(torch.cat([part.reshape(-1) for part in parts]).double())
    lengths = torch.stack(gradients).norm(dim=1)
    clip = float(lengths.median())  # so that some are clipped and some are not
    expected = sum(part * min(1.0, clip / max(float(part.norm()), 1e-30)) for part in gradients)

    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=clip), noise=hush.Gaussian(multiplier=1.0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = hush.PrivateStep(
        model, loss, optimizer, plan, records=RECORDS, execution=hush.Execution(physical_batch=5)
    )
    batch = next(step.batches((inputs, targets)))
    torch.testing.assert_close(step.clipped_sum(batch), expected, rtol=1e-4, atol=1e-4)
    assert step(batch)


def test_class_weights_of_another_type_are_named() -> None:
    model, loss = nn.Linear(5, 3), nn.CrossEntropyLoss(weight=WEIGHTS.double())
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    step = hush.PrivateStep(model, loss, torch.optim.SGD(model.parameters()), plan, records=RECORDS)
    with pytest.raises(hush.errors.DataError, match=r"class weights of .*loss\.to\(torch\.float32\)"):
        next(step.batches((X, CLASSES)))
