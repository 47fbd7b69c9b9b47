import math

import torch
from torch import Tensor, nn

from hush.training.methods.public_gradients import finite, gradient_rows
from tests.gradients.oracle import one_at_a_time

EACH = nn.CrossEntropyLoss(reduction="none")


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        both = self.a(x) * self.b(x) if x.sum() > 0 else self.a(x) - self.b(x)
        return torch.as_tensor(both)


def test_rows_are_in_the_order_of_the_records_and_columns_in_that_of_the_names() -> None:
    torch.manual_seed(0)
    model, x, y = Deciding(), torch.randn(150, 3), torch.randint(0, 2, (150,))
    expected = one_at_a_time(model, EACH, x, y, 150)
    torch.testing.assert_close(gradient_rows(model, nn.CrossEntropyLoss(), (x, y)), expected)
    some = gradient_rows(model, EACH, (x, y), ["a.bias", "b.weight"])
    torch.testing.assert_close(some, expected[:, 6:14])


def test_low_precision_is_written_out_in_single() -> None:
    model = nn.Sequential(nn.Linear(3, 2)).bfloat16()
    rows = gradient_rows(model, EACH, (torch.randn(4, 3).bfloat16(), torch.tensor([0, 1, 0, 1])))
    assert rows.dtype == torch.float32


def test_rows_that_are_not_finite_are_left_out() -> None:
    rows = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [3.0, math.inf], [5.0, 6.0]])
    assert finite(rows).tolist() == [[1.0, 2.0], [5.0, 6.0]]
    whole = torch.ones(3, 2)
    assert finite(whole) is whole
