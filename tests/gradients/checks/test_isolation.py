from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError, Unsupported
from hush.gradients.checks.isolation import check_independent_losses
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
            scores: Tensor = self.linear(torch.from_numpy(inputs.numpy()))
            return scores

    with pytest.raises(Unsupported, match="for each record on its own"):
        record(Listing(), LOSS, INPUTS, TARGETS)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    losses: Tensor = LOSS(outputs @ outputs.mT, torch.arange(len(outputs)))
    return losses


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
        check_independent_losses(nn.Linear(4, 3), contrastive, INPUTS, TARGETS)


def test_a_model_with_batch_statistics_is_refused() -> None:
    with pytest.raises(Unsupported, match="who else is in the batch"):
        check_independent_losses(Centred(), LOSS, INPUTS, TARGETS)


def test_ordinary_models_pass_and_keep_their_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    check_independent_losses(model, LOSS, INPUTS, TARGETS)
    assert model.training
    assert model[1].training
    check_independent_losses(model, LOSS, torch.full((2, 4), torch.nan), TARGETS)


def test_a_loss_of_the_whole_batch_as_a_list_of_one_is_refused() -> None:
    def averaged(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets).reshape(1)

    # alone it looks like one value for each record; a test of several would clip their mean
    with pytest.raises(Unsupported, match="who else is in the batch"):
        check_independent_losses(nn.Linear(4, 3), averaged, INPUTS, TARGETS)


class Autoencoder(nn.Module):
    """A variational one, which draws in evaluation mode as well."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)
        self.mixing = mixing

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x - x.mean(0) if self.mixing else x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def evidence_bound(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    decoded, mean, log_variance = outputs
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return (decoded - targets).square().sum(1) + divergence


def test_a_model_that_draws_is_compared_under_the_same_draws() -> None:
    check_independent_losses(Autoencoder(), evidence_bound, INPUTS, INPUTS)
    with pytest.raises(Unsupported, match="who else is in the batch"):
        check_independent_losses(Autoencoder(mixing=True), evidence_bound, INPUTS, INPUTS)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_no_layer_with_batch_statistics_is_missed(autocast: bool) -> None:
    """Whatever its weights, and though some change a loss by little; low precision hides none."""
    for seed in range(60):
        torch.manual_seed(seed)
        model, inputs = Centred(), torch.randn(2, 4)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            pytest.raises(Unsupported, match="who else is in the batch"),
        ):
            check_independent_losses(model, LOSS, inputs, TARGETS)


class Rounding(nn.Linear):
    """Rounds by the size of the batch, as kernels in low precision do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.004 * len(x))


def test_rounding_by_the_size_of_a_batch_is_not_mixing() -> None:
    check_independent_losses(Rounding(4, 3), LOSS, INPUTS, TARGETS)


class Chance(nn.Module):
    """Draws in evaluation mode too: row by row, or once for the whole batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        if self.kind == "gumbel":
            return nn.functional.gumbel_softmax(scores)
        rows = len(x) if self.kind == "row" else 1
        return scores * torch.empty(rows, 1).bernoulli_(0.5).div_(0.5)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("kind", ["row", "batch", "gumbel"])
def test_draws_are_not_mixing(kind: str, autocast: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for _ in range(5):
            check_independent_losses(Chance(kind), LOSS, INPUTS, TARGETS)


def test_a_model_that_runs_under_autocast_alone_is_checked_there() -> None:
    inputs = INPUTS.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_independent_losses(nn.Linear(4, 3), LOSS, inputs, TARGETS)
        with pytest.raises(Unsupported, match="who else is in the batch"):
            check_independent_losses(Centred(), LOSS, inputs, TARGETS)


def test_a_model_that_draws_trains() -> None:
    model = Autoencoder()
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, evidence_bound, optimizer, plan, records=3)
    for batch in step.batches((INPUTS, INPUTS.clone()), steps=2):
        step(batch)
    assert step.steps == 2


class Through(nn.Module):
    """A buffer that is written through a view of it, by a value that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("largest", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("largest").data[:1].fill_(x.max().item())
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_buffer_may_not_be_written_through_a_view_either() -> None:
    model = Through()
    with pytest.raises(Unsupported, match="all records share"):
        record(model, LOSS, INPUTS[:1], TARGETS[:1])
    assert model.get_buffer("largest").tolist() == [0, 0]


class Positions(nn.Linear):
    """Numbers the positions of a sequence from a buffer that is too short, as BERT does."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("positions", torch.arange(3.0)[None])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions.expand(x.shape))


@pytest.mark.parametrize(
    ("model", "loss", "inputs", "targets", "reason"),
    [
        (nn.Linear(4, 3), LOSS, INPUTS.double(), TARGETS, r"inputs\.to\(torch\.float32\)"),
        (nn.Linear(4, 3), LOSS, INPUTS.long(), TARGETS, r"inputs\.to\(torch\.float32\)"),
        (nn.LayerNorm(4), LOSS, INPUTS.double(), TARGETS, r"inputs\.to\(torch\.float32\)"),
        (nn.Linear(4, 3), LOSS, INPUTS, TARGETS.to(torch.uint8), r"targets\.long\(\)"),
        (nn.Linear(5, 3), LOSS, INPUTS, TARGETS, "do not fit each other or the model"),
        (
            nn.Linear(4, 1),
            lambda o, t: nn.functional.binary_cross_entropy_with_logits(o, t, reduction="none"),
            INPUTS,
            TARGETS.float(),
            r"targets\.unsqueeze\(1\)",
        ),
        (nn.Embedding(9, 3), LOSS, TARGETS.float(), TARGETS, r"embedding's rows .*inputs\.long\(\)"),
        (Positions(), LOSS, INPUTS, TARGETS, "do not fit each other or the model .*expanded size"),
    ],
    ids=[
        *("float64", "integers", "layer norm", "bytes", "sizes", "broadcast"),
        *("float tokens", "too long a sequence"),
    ],
)
def test_types_and_shapes_that_do_not_fit_are_named(
    model: nn.Module, loss: Any, inputs: Tensor, targets: Tensor, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        record(model, loss, inputs, targets)


@pytest.mark.parametrize("kind", [torch.bool, torch.int32])
def test_labels_that_only_a_batched_loss_would_take_are_refused(kind: torch.dtype) -> None:
    with pytest.raises(DataError, match=r"targets\.long\(\)"):
        check_independent_losses(nn.Linear(4, 3), LOSS, INPUTS, TARGETS.to(kind))


class Tripled(nn.Module):
    """Uses a value derived from its parameter, then changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 2
        scores = nn.functional.linear(x, weight)
        return scores + nn.functional.linear(x, weight.mul_(3))


def test_a_derived_value_may_not_be_changed_in_place_after_its_use() -> None:
    with pytest.raises(Unsupported, match=r"in place .* Make a new tensor"):
        record(Tripled(), LOSS, INPUTS, TARGETS)


def test_a_tensor_that_is_kept_outside_of_modules_is_explained() -> None:
    kept = [torch.zeros(1)]

    class Keeping(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs = super().forward(inputs) + kept[-1].sum()
            kept.append(inputs)
            return outputs

    model = Keeping(4, 3)
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=4)
    with pytest.raises(Unsupported, match="outside of its modules"):
        next(step.batches((torch.randn(4, 4), torch.zeros(4, dtype=torch.long))))
