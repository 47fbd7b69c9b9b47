import math

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.per_example import record

LOSS = nn.CrossEntropyLoss(reduction="none")


def one_at_a_time(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The oracle: each record's whole gradient by ordinary autograd on a batch of that record."""
    gradients = []
    for x, y in zip(inputs, targets, strict=True):
        parameters = [p for p in model.parameters() if p.requires_grad]
        value = nn.functional.cross_entropy(model(x[None]), y[None])
        parts = torch.autograd.grad(value, parameters)
        gradients.append(torch.cat([part.reshape(-1) for part in parts]))
    return gradients


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    tied = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    tied[2].weight = tied[0].weight
    frozen = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    frozen[0].requires_grad_(False)
    used_twice = nn.Linear(6, 6)
    return {
        "mlp": (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (6,)),
        "conv": (
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)),
            (2, 5, 5),
        ),
        "tied": (tied, (6,)),
        "frozen": (frozen, (6,)),
        "used twice": (nn.Sequential(used_twice, nn.Tanh(), used_twice, nn.Linear(6, 3)), (6,)),
        "in-place": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (6,)),
        "layer norm": (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), (6,)),
    }


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("records", [0, 1, 7])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_and_sums_equal_one_record_at_a_time(name: str, records: int, order: float) -> None:
    torch.manual_seed(0)
    model, shape = networks()[name]
    model.double()
    inputs = torch.randn(records, *shape, dtype=torch.float64)
    targets = torch.randint(0, 3, (records,))
    tape = record(model, LOSS, inputs, targets)
    each = one_at_a_time(model, inputs, targets)

    expected = torch.tensor([g.norm(order) for g in each], dtype=torch.float64)
    torch.testing.assert_close(tape.norms(order), expected, rtol=1e-10, atol=1e-12)

    weights = torch.rand(records, dtype=torch.float64)
    total = torch.cat([part.reshape(-1) for part in tape.weighted_sum(weights).values()])
    wanted = sum((w * g for w, g in zip(weights, each, strict=True)), torch.zeros_like(total))
    torch.testing.assert_close(total, wanted, rtol=1e-10, atol=1e-12)


def test_a_record_of_weight_zero_adds_exactly_zero_even_if_not_finite() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    inputs[1] = math.nan
    tape = record(model, LOSS, inputs, targets)
    total = tape.weighted_sum(torch.tensor([1.0, 0.0, 1.0]))
    without = record(model, LOSS, inputs[[0, 2]], targets[[0, 2]]).weighted_sum(torch.ones(2))
    for name in total:
        torch.testing.assert_close(total[name], without[name])


@pytest.mark.parametrize("records", [1, 2, 5])
def test_a_loss_that_is_already_reduced_is_refused(records: int) -> None:
    inputs, targets = torch.randn(records, 4), torch.zeros(records, dtype=torch.long)
    with pytest.raises(Unsupported, match=r"returned shape \(\).*reduction=.none."):
        record(nn.Linear(4, 3), nn.functional.cross_entropy, inputs, targets)


class Counting(nn.Module):
    """Keeps a running mean of its inputs, which would leak them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        mean.mul_(0.9).add_(inputs.detach().mean(0))
        scores: Tensor = self.linear(inputs)
        return scores


def test_a_model_that_keeps_what_it_saw_is_refused() -> None:
    with pytest.raises(Unsupported, match="buffers: mean"):
        record(Counting(), LOSS, torch.randn(3, 4), torch.zeros(3, dtype=torch.long))


def test_clipping_bounds_every_record_and_spares_the_small() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    inputs = torch.randn(20, 4, dtype=torch.float64) * torch.logspace(-3, 3, 20).double()[:, None]
    targets = torch.randint(0, 3, (20,))
    for i in range(20):
        tape = record(model, LOSS, inputs[i : i + 1], targets[i : i + 1])
        clipped = hush.L2(norm=0.5).clip(tape).total
        norm = torch.cat([part.reshape(-1) for part in clipped.values()]).norm()
        assert norm <= 0.5 * (1 + 1e-12)
        torch.testing.assert_close(norm, tape.norms(2.0)[0].clamp(max=0.5))


def influence(records: int, dtype: torch.dtype, autocast: bool) -> float:
    """How many clipping norms the last of so many equal records moves the clipped sum by."""
    width = 256
    ends = []
    for count in (records - 1, records):
        model = nn.Linear(width, 1, bias=False).to(dtype)
        nn.init.zeros_(model.weight)
        inputs = torch.full((count, width), 1 / 16, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            tape = record(model, lambda outputs, _: outputs[:, 0], inputs, torch.zeros(count))
            ends.append(hush.L2(norm=1.0).clip(tape).total["weight"].double())
    return float((ends[1] - ends[0]).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_does_not_raise_a_records_influence(dtype: torch.dtype, autocast: bool) -> None:
    assert influence(4113, dtype, autocast) <= 1 + 1e-3


class Scaled(nn.Module):
    """A linear layer with a learned temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(inputs) * self.temperature
        return scores


def test_a_parameter_without_dimensions_takes_part() -> None:
    torch.manual_seed(0)
    model = Scaled()
    inputs, targets = torch.randn(5, 4), torch.randint(0, 3, (5,))
    tape = record(model, LOSS, inputs, targets)
    each = one_at_a_time(model, inputs, targets)
    torch.testing.assert_close(tape.norms(2.0), torch.stack([g.norm() for g in each]))
    assert tape.weighted_sum(torch.ones(5))["temperature"].shape == ()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(inputs if float(inputs.sum()) > 0 else -inputs)
        return scores


def test_what_cannot_be_done_record_by_record_is_explained() -> None:
    with pytest.raises(Unsupported, match="for each record on its own"):
        record(Branching(), LOSS, torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
