"""Branches, numbers, shapes and draws of a record: each its own, whatever the others do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.core.errors import Unsupported
from hush.gradients.checks.data_dependence import Path
from hush.gradients.recording import per_sample_losses, record
from tests.gradients.oracle import check_tape, one_at_a_time

Work = Callable[["Made", Tensor], Tensor]


class Made(nn.Module):
    """A module of one function, a weight of five entries and a buffer."""

    kept: Tensor

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.register_buffer("kept", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.reshape(len(targets), -1).sum(1)


def gradients(model: nn.Module, inputs: Tensor) -> Tensor:
    """(records, 5): per-sample gradients of the weight, with draws from the same state each time."""
    torch.manual_seed(0)
    whole = torch.full((len(inputs), 5), torch.nan)
    for rows, parts in record(model, total, inputs, torch.zeros(len(inputs))).chunks():
        whole[rows] = parts["w"]
    return whole


def dropped_by_chance(self: "Made", x: Tensor) -> Tensor:
    """Layer drop: a decision by chance, between draws that others depend on."""
    hidden: Tensor = functional.dropout(x * self.w, 0.5)
    if torch.rand(()) < 0.3:
        return hidden
    return functional.dropout(hidden * 3, 0.5)


def decided_by_both(self: "Made", x: Tensor) -> Tensor:
    """A decision by a record and by chance together, after which one of the ways draws more."""
    hidden: Tensor = x * self.w
    if x.mean() + torch.rand(()) > 0.5:
        hidden = functional.dropout(hidden, 0.5)
    return functional.dropout(hidden * (1 if torch.rand(()) < 0.5 else 2), 0.5)


def decided_by_record(self: "Made", x: Tensor) -> Tensor:
    """A decision by the record, before it draws."""
    return functional.dropout(x * self.w if x.sum() > 0 else x * self.w * 2, 0.5)


def read_as_number(self: "Made", x: Tensor) -> Tensor:
    """A number that some records are read as, before they draw."""
    return functional.dropout(x * self.w * (x.sum().item() if x.sum() > 0 else 1.0), 0.5)


@pytest.mark.parametrize("shift", [0.5, 1.0], ids=["some positive", "all negative"])
@pytest.mark.parametrize("work", [dropped_by_chance, decided_by_both, decided_by_record, read_as_number])
def test_a_decision_is_the_record_s_own(work: Work, shift: float) -> None:
    """Another record in slot 2 or 9, which decides otherwise and draws more or less, moves nobody."""
    model, inputs = Made(work), torch.rand(20, 5, generator=torch.Generator().manual_seed(1)) - shift
    before = gradients(model, inputs)
    for slot in (2, 9):
        for content in (-3.0, 3.0):
            changed = inputs.clone()
            changed[slot] = content
            others = torch.arange(20) != slot
            assert torch.equal(gradients(model, changed)[others], before[others])


def test_layers_are_dropped_as_often_as_the_model_says() -> None:
    def work(self: "Made", x: Tensor) -> Tensor:
        hidden: Tensor = x * self.w
        return hidden if torch.rand(()) < 0.3 else hidden * 2

    kept = (gradients(Made(work), torch.ones(2000, 5))[:, 0] == 1).double().mean()
    assert abs(float(kept) - 0.3) < 5 * (0.3 * 0.7 / 2000) ** 0.5


def drawn_numbers(inputs: Tensor) -> Tensor:
    """The last of what a record draws after its decisions: it draws more the later one is against."""

    def work(self: "Made", x: Tensor) -> Tensor:
        decisions = [bool(value > 0) for value in x[0, :3]]
        drawn = torch.rand(1 + decisions.index(False))
        return drawn[-1:] * self.w[:1]

    model = Made(work)
    with torch.no_grad():
        model.w.fill_(1.0)
    torch.manual_seed(0)
    return per_sample_losses(model, total, inputs, torch.zeros(len(inputs)))


def test_records_that_decide_otherwise_share_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they to, the law of a sum would tell how far apart two records are, and so who was drawn."""
    against = (torch.arange(5) == torch.arange(60)[:, None] % 3).float()
    inputs = 1 - 2 * against
    assert len(drawn_numbers(inputs).unique()) == 60
    monkeypatch.setattr(Path, "reseed", lambda self, *label: None)
    assert len(drawn_numbers(inputs).unique()) < 60, "from the same state for both, some draw the same"


def test_records_that_are_read_as_numbers_share_no_draw() -> None:
    def work(self: "Made", x: Tensor) -> Tensor:
        drawn = torch.rand(1).item() if x.sum() > 0 else torch.rand(2)[0].item()
        return drawn * (x.square() * self.w)[:, :1]

    inputs = torch.ones(30, 5) * torch.tensor([1.0, -1.0]).repeat(15)[:, None]
    assert len(gradients(Made(work), inputs)[:, 0].unique()) == 30


def test_a_decision_by_something_else_is_refused() -> None:
    def work(self: "Made", x: Tensor) -> Tensor:
        signs.append(-signs[-1])
        return x * self.w * (2 if x.sum() * signs[-1] > 0 else 1)

    signs = [1]
    with pytest.raises(Unsupported, match="decides otherwise"):
        gradients(Made(work), torch.tensor([[1.0], [-1.0]]).expand(2, 5))


def selected(self: "Made", x: Tensor) -> Tensor:
    return (x * self.w)[x > 0].square().sum().reshape(1)


def assigned_mask(self: "Made", x: Tensor) -> Tensor:
    hidden = x * self.w
    hidden[x > 0.5] = 0.25
    hidden[x[:, 0] > 0] = self.w * 2
    hidden[x < -1] = hidden[x < -1] * self.w[0]
    return hidden.square()


def counted(self: "Made", x: Tensor) -> Tensor:
    rows, columns = torch.where(x > 0)
    return (self.w[columns] * x[rows, columns]).sum().reshape(1) * torch.nonzero(x).sum()


def made_as_long(self: "Made", x: Tensor) -> Tensor:
    counts: Any = (x > 0).sum()  # a tensor, which torch takes as a number
    return (torch.arange(counts, dtype=x.dtype).sum() * x * self.w).square()


def listed(self: "Made", x: Tensor) -> Tensor:
    scale = torch.tensor(x.abs().tolist(), dtype=x.dtype)
    return scale * (x * self.w).square()


def written_constant(self: "Made", x: Tensor) -> Tensor:
    padded = torch.zeros(1, 7, dtype=x.dtype)
    padded[:, 1:6] = x * self.w
    shifted = torch.zeros_like(padded)
    shifted[:, :-1] = padded[:, 1:]
    weights = self.kept.clone()
    weights[:2] = x[0, :2]
    return (padded * shifted)[:, 1:6] + weights


@pytest.mark.parametrize(
    "work", [selected, assigned_mask, counted, made_as_long, listed, written_constant]
)
def test_values_may_decide_on_shapes_and_be_written_into_constants(
    work: Work,
) -> None:
    model = Made(work).double()
    inputs = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = one_at_a_time(model, total, inputs, torch.zeros(6), 6)
    check_tape(record(model, total, inputs, torch.zeros(6)), expected, 1e-10)
    losses = torch.cat([total(model(row[None]), torch.zeros(1)) for row in inputs]).detach()
    torch.testing.assert_close(per_sample_losses(model, total, inputs, torch.zeros(6)), losses)
    assert model.kept.tolist() == [0, 0, 0, 0, 0]


def written_out(self: "Made", x: Tensor) -> Tensor:
    torch.masked_select(x, x > -100, out=self.kept)
    return x * self.w


def written_list(self: "Made", x: Tensor) -> Tensor:
    torch._foreach_add_([self.kept], [x[0]])
    return x * self.w


@pytest.mark.parametrize("work", [written_out, written_list])
@pytest.mark.parametrize("records", [1, 3])
def test_a_record_that_is_alone_is_not_written_into_the_model_either(work: Work, records: int) -> None:
    model = Made(work)
    with pytest.raises((Unsupported, RuntimeError)):
        gradients(model, torch.ones(records, 5))
    assert model.kept.tolist() == [0, 0, 0, 0, 0]


def test_dropout_of_a_parameter_is_each_record_s_own() -> None:
    """What enters the loss is a mask by record, though the parameter is shared."""
    by_record = gradients(Made(lambda self, x: x * functional.dropout(self.w, 0.5)), torch.ones(50, 5))
    assert by_record.unique().tolist() == [0, 2]
    assert len(by_record.unique(dim=0)) > 10


def stochastic_depth(self: "Made", x: Tensor) -> Tensor:
    """As torchvision's: a draw into memory of its own."""
    keep = torch.empty(x.shape[0], 1, dtype=x.dtype).bernoulli_(0.5)
    return x * self.w * keep.div_(0.5)


def from_distribution(self: "Made", x: Tensor) -> Tensor:
    return torch.distributions.Normal(x * self.w, 1.0).rsample() * self.w


@pytest.mark.parametrize("work", [stochastic_depth, from_distribution])
def test_draws_into_new_memory_are_each_record_s_own(work: Work) -> None:
    by_record = gradients(Made(work), torch.ones(50, 5))
    assert len(by_record.unique(dim=0)) == (2 if work is stochastic_depth else 50)
