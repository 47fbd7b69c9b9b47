"""Ordinary losses, optimizers and loops: they train, on gradients of one record at a time."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import hush
from tests.training.helpers import plan_of
from tests.training.ordinary import (
    RECORDS,
    Case,
    Of,
    check,
    labels,
    masks,
    mlp,
    mlp_of,
    step_of,
    unet,
    vectors,
)


class AdaptiveSoftmax(nn.Module):
    """Its loss is a layer of the model; clusters without a label of the record have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layer = nn.Linear(6, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8], 2.0)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return -self.layer(self.body(x), y).output


def vectors_and_classes() -> tuple[Any, Tensor]:
    y = torch.tensor([0, 5, 10, 1])
    return (torch.randn(RECORDS, 6), y), y


def single() -> nn.Module:
    return mlp_of(6, 1)


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 6), torch.randn(RECORDS, 1)


def coins(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(RECORDS, 6), torch.randint(0, 2, (RECORDS, *shape)).float())


def shares() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 6), torch.randn(RECORDS, 3).softmax(1)


def speech() -> tuple[Any, Any]:
    lengths = torch.tensor([2, 1, 2, 2])
    return torch.randn(RECORDS, 7, 6), {"letters": torch.randint(1, 5, (RECORDS, 2)), "lengths": lengths}


def alignment(scores: Tensor, targets: Any) -> Tensor:
    steps = torch.full((len(scores),), scores.shape[1])
    log_shares = scores.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_shares, targets["letters"], steps, targets["lengths"], reduction="none")


def embeddings() -> tuple[Any, Tensor]:
    return tuple(torch.randn(RECORDS, 6) for _ in range(3)), labels()


def triplet() -> nn.Module:
    return Of(lambda m, *parts: tuple(map(m.net, parts)), net=mlp())


def dice(scores: Tensor, targets: Tensor) -> Tensor:
    shares, truth = scores.softmax(1)[:, 1].flatten(1), targets.flatten(1).to(scores.dtype)
    return 1 - 2 * (shares * truth).sum(1) / (shares.sum(1) + truth.sum(1) + 1)


WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
# fmt: off
LOSSES: dict[str, Case] = {
    "class weights": (mlp, nn.CrossEntropyLoss(WEIGHTS, reduction="none"), vectors),
    "reduced": (mlp, F.cross_entropy, vectors),
    "reduced, squared": (single, F.mse_loss, numbers),
    "label smoothing": (mlp, nn.CrossEntropyLoss(label_smoothing=0.1), vectors),
    "soft labels": (mlp, nn.CrossEntropyLoss(), shares),
    "negative log-likelihood": (lambda: nn.Sequential(mlp(), nn.LogSoftmax(1)), nn.NLLLoss(), vectors),
    "binary": (single, nn.BCEWithLogitsLoss(), coins(1)),
    "binary, of shares": (lambda: nn.Sequential(single(), nn.Sigmoid()), nn.BCELoss(), coins(1)),
    "squared": (single, nn.MSELoss(), numbers),
    "absolute": (single, nn.L1Loss(), numbers),
    "Huber": (single, nn.HuberLoss(), numbers),
    "Poisson": (single, lambda o, y: F.poisson_nll_loss(o, y, reduction="none")[:, 0], coins(1)),
    "Gaussian": (lambda: mlp_of(6, 2), lambda o, y: F.gaussian_nll_loss(o[:, :1], y, F.softplus(o[:,
        1:]), reduction="none")[:, 0], numbers),
    "divergence": (mlp, lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="none").sum(1), shares),
    "connectionist": (lambda: mlp_of(6, 5), alignment, speech),
    "triplet": (triplet, lambda o, _: F.triplet_margin_loss(o[0], o[1], o[2], reduction="none"),
        embeddings),
    "several margins": (mlp, lambda o, y: F.multilabel_soft_margin_loss(o, y, reduction="none"),
        coins(3)),
    "adaptive softmax": (AdaptiveSoftmax, lambda o, _: o, vectors_and_classes),
    "dice": (unet, dice, masks),
}
# fmt: on


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    check(LOSSES[name])


def test_a_mask_of_a_public_weight_per_class_is_drawn_for_each_record() -> None:
    """docs/class-imbalance.md: a record counts by the weight of its class."""

    def rarely(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0] * (torch.rand(len(targets)) < torch.tensor([0.25, 1.0])[targets])

    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    classes = (torch.arange(400) >= 200).long()
    plan = plan_of(clipping=hush.L2(0.5))
    step = hush.PrivateStep(
        model, rarely, torch.optim.SGD(model.parameters(), lr=0.1), plan, records=400
    )
    sums = []
    for batch in step.batches((torch.ones(400, 1), classes), steps=8):
        sums.append(float(step.clipped_sum(batch)) / 0.5)
        step(batch)
    assert len(set(sums)) > 1  # two draws agree once in 22, eight once in 10^9
    assert all(220 < value < 280 for value in sums)  # 200 of one class, a quarter of 200 of the other


# loops


def test_poisson_sampling_with_a_moving_average_and_an_evaluation_between_steps() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(mlp(), nn.Dropout(0.1)), vectors()
    average = torch.optim.swa_utils.AveragedModel(model)
    step = step_of(model, nn.CrossEntropyLoss(), plan=plan_of(hush.Poisson(0.5)))
    for batch in step.batches(data, steps=3):
        step(batch)
        average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            model(data[0])
        model.train()
    assert step.steps == 3
    assert int(average.n_averaged) == 3


def test_quantization_aware_training() -> None:
    quantization = torch.ao.quantization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(quantization.QuantStub(), mlp(), quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
    x, y = vectors()
    step = step_of(model, nn.CrossEntropyLoss())
    with pytest.raises(hush.core.errors.Unsupported, match="disable_observer"):
        next(step.batches((x, y)))
    model(torch.randn(20, 6))  # public records
    model.apply(quantization.disable_observer)
    case = (lambda: model, nn.CrossEntropyLoss(), lambda: (x, y))
    check(case, dtype=torch.float32)
