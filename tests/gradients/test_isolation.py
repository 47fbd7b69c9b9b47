import pytest
import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.gradients.isolation import check_apart
from hush.gradients.recording import record

LOSS = nn.CrossEntropyLoss(reduction="none")
INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.zeros(3, dtype=torch.long)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Now and then a random model tells two records apart so well that a contrastive loss is 0."""
    torch.manual_seed(0)


class Counting(nn.Module):
    """Keeps a running mean of its inputs, which would leak them."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.replaced = replaced

    def forward(self, inputs: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        with torch.no_grad():
            if self.replaced:
                self.mean = 0.9 * mean + inputs.mean(0)
            else:
                mean.mul_(0.9).add_(inputs.mean(0))
        scores: Tensor = self.linear(inputs)
        return scores


@pytest.mark.parametrize(
    ("replaced", "reason"), [(False, "all records share"), (True, "buffer.s. mean")]
)
def test_a_model_that_keeps_what_it_saw_is_refused(replaced: bool, reason: str) -> None:
    model = Counting(replaced)
    with pytest.raises(Unsupported, match=reason):
        record(model, LOSS, INPUTS, TARGETS)
    assert model.get_buffer("mean").tolist() == [0, 0, 0, 0], "nothing of the records stays behind"


def test_what_cannot_be_done_record_by_record_is_explained() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = self.linear(torch.tensor(inputs.tolist()))
            return scores

    with pytest.raises(Unsupported, match="for each record on its own"):
        record(Listing(), LOSS, INPUTS, TARGETS)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    each: Tensor = LOSS(outputs @ outputs.mT, torch.arange(len(outputs)))
    return each


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.linear(inputs - inputs.mean(0))
        return scores


def test_a_loss_that_compares_records_is_refused() -> None:
    with pytest.raises(Unsupported, match="who else is in the batch"):
        check_apart(nn.Linear(4, 3), contrastive, INPUTS, TARGETS)


def test_a_model_with_batch_statistics_is_refused() -> None:
    with pytest.raises(Unsupported, match="who else is in the batch"):
        check_apart(Centred(), LOSS, INPUTS, TARGETS)


def test_ordinary_models_pass_and_keep_their_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    check_apart(model, LOSS, INPUTS, TARGETS)
    assert model.training
    assert model[1].training
    check_apart(model, LOSS, torch.full((2, 4), torch.nan), TARGETS)


def test_a_loss_of_the_whole_batch_as_a_list_of_one_is_refused() -> None:
    def averaged(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets).reshape(1)

    # alone it looks like one value for each record; a test of several would clip their mean
    with pytest.raises(Unsupported, match="who else is in the batch"):
        check_apart(nn.Linear(4, 3), averaged, INPUTS, TARGETS)
