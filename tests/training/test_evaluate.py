import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from hush.core.errors import DataError
from hush.training.evaluate import check_held_out, evaluate


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
        kept = targets != loss.ignore_index
        right = (outputs.argmax(1) == targets)[kept]
        assert result["accuracy"] == pytest.approx(float(right.double().mean()))


def test_nothing_is_measured_where_every_record_is_ignored() -> None:
    targets = torch.ones(5, dtype=torch.int64)
    result = evaluate(nn.Linear(3, 2), nn.CrossEntropyLoss(ignore_index=1), (torch.randn(5, 3), targets))
    assert math.isnan(result["loss"])
    assert math.isnan(result["accuracy"])


def test_regression_has_no_accuracy() -> None:
    result = evaluate(nn.Linear(3, 1), nn.MSELoss(), (torch.randn(5, 3), torch.randn(5, 1)))
    assert set(result) == {"loss"}


X, Y = torch.randn(10, 3), torch.arange(10) % 2
SET = TensorDataset(X, Y)


class Wrapped:
    """A map-style data set around another one, or around tensors."""

    def __init__(self, held: Any, targets: Tensor | None = None) -> None:
        self.held, self.targets = held, targets

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return self.held[index]


class Picked(Wrapped):
    """Some rows of a tensor, by their numbers."""

    def __init__(self, held: Tensor, numbers: list[int]) -> None:
        super().__init__(held)
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)


TRAINING = [
    (X, Y),
    SET,
    ({"x": X}, Y),
    ((X, X[:, :1]), Y),
    Wrapped(SET),
    Wrapped(X, Y),
    Subset(SET, range(10)),
]
SAME = [
    *TRAINING,
    (X[:], Y.clone()),
    (X[4:5], Y[4:5]),
    (X.view(5, 2, 3), Y[:5]),
    (X.detach(), Y),
    TensorDataset(X[9:], Y[9:]),
    Subset(SET, [9]),
    Subset(Subset(SET, [1, 2]), [0]),
    ConcatDataset([TensorDataset(X.clone(), Y), SET]),
    (torch.from_numpy(X.numpy()[3:]), Y[3:]),
]


@pytest.mark.parametrize("data", TRAINING)
@pytest.mark.parametrize("evaluation", SAME)
def test_records_of_the_training_data_are_found_in_any_wrapping(evaluation: Any, data: Any) -> None:
    with pytest.raises(DataError, match="without being charged"):
        check_held_out(evaluation, data)


HALVES = random_split(SET, [6, 4])


@pytest.mark.parametrize(
    ("data", "evaluation"),
    [
        ((X[:8], Y[:8]), (X[8:], Y[8:])),
        ((X[8:], Y[8:]), (X[:8], Y[:8])),
        ((X[::2], Y[::2]), (X[1::2], Y[1::2])),
        (TensorDataset(X[:8], Y[:8]), ({"x": X[8:]}, Y[8:])),
        ((X, Y), (X.clone(), Y)),
        (HALVES[0], HALVES[1]),
        (Subset(SET, [0, 1]), (X[2:], Y[2:])),
        (Wrapped(HALVES[0]), Wrapped(HALVES[1])),
        (Picked(X, [0, 1]), Picked(X, [2, 3])),
    ],
)
def test_parts_of_one_tensor_or_data_set_without_a_common_record_are_apart(
    data: Any, evaluation: Any
) -> None:
    check_held_out(evaluation, data)
