import pytest
import torch
from torch import nn

from hush.core.errors import Unsupported
from hush.gradients.admissible import check_model, check_optimizer, per_record


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d()])
def test_batch_normalisation_is_refused_with_its_replacement(layer: nn.Module) -> None:
    with pytest.raises(Unsupported, match=r"1 is a .*BatchNorm.*mixes the records.*GroupNorm"):
        check_model(nn.Sequential(nn.Linear(4, 4), layer))


def test_frozen_batch_normalisation_is_allowed_and_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    check_model(model)
    model.train()
    with pytest.raises(Unsupported):
        check_model(model)


def test_batch_statistics_in_evaluation_mode_are_refused() -> None:
    layer = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.raises(Unsupported, match="mixes the records"):
        check_model(nn.Sequential(nn.Linear(4, 4), layer))


def test_running_statistics_are_refused() -> None:
    check_model(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4)))
    with pytest.raises(Unsupported, match="track_running_stats=False"):
        check_model(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True)))


def test_complex_parameters_are_refused() -> None:
    """Complex noise has half the variance in each part, or none, of what is charged."""
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(Unsupported, match=r"weight holds complex numbers.*view_as_complex"):
        check_model(model)
    check_model(nn.Sequential(model.requires_grad_(False), nn.Linear(2, 2)))


def test_a_frozen_model_has_nothing_to_train() -> None:
    with pytest.raises(Unsupported, match="nothing to train"):
        check_model(nn.Linear(2, 2).requires_grad_(False))


def test_an_optimizer_holds_exactly_the_trainable_parameters() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(Unsupported, match="not trainable parameters of the model"):
        check_optimizer(torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), model)
    with pytest.raises(Unsupported, match=r"does not hold 0\.weight, 0\.bias"):
        check_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    model[0].requires_grad_(False)
    check_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    next(model.parameters()).grad = torch.ones(2, 2)
    with pytest.raises(Unsupported, match="not trainable"):
        check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_an_optimizer_that_evaluates_more_than_once_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(Unsupported, match="LBFGS"):
        check_optimizer(torch.optim.LBFGS(model.parameters()), model)


def test_a_loss_that_says_how_it_reduces_is_taken_apart() -> None:
    outputs, targets = torch.randn(5, 3), torch.randint(0, 3, (5,))
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    for reduction in ("none", "mean", "sum"):
        loss = nn.CrossEntropyLoss(reduction=reduction)
        torch.testing.assert_close(per_record(loss)(outputs, targets), each)
        assert loss.reduction == reduction, "the caller's loss stays as it was"
    wide = torch.randn(5, 3)
    torch.testing.assert_close(
        per_record(nn.MSELoss())(outputs, wide), (outputs - wide).square().mean(1)
    )
    torch.testing.assert_close(
        per_record(nn.MSELoss(reduction="sum"))(outputs, wide), (outputs - wide).square().sum(1)
    )
