import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hush.core.errors import Unsupported
from hush.gradients.models import check_model, check_optimizer


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d()])
def test_batch_normalisation_is_refused_with_its_replacement(layer: nn.Module) -> None:
    with pytest.raises(Unsupported, match=r"^layer '1' is a .*BatchNorm.*mixes the records.*GroupNorm"):
        check_model(nn.Sequential(nn.Linear(4, 4), layer))


def test_frozen_batch_normalisation_is_allowed_and_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    check_model(model)
    model.train()
    with pytest.raises(Unsupported):
        check_model(model)


def test_running_statistics_are_refused() -> None:
    check_model(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4)))
    with pytest.raises(Unsupported, match="track_running_stats=False"):
        check_model(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True)))


def test_an_optimizer_holds_exactly_the_trainable_parameters() -> None:
    model, uncovered = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    shapes = r"shapes \(2, 2\), \(2,\), \(2, 2\), \.\.\.\)"
    with pytest.raises(Unsupported, match=rf"was built from another model, .*: 4 of its .*{shapes}"):
        check_optimizer(torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1), model)
    with pytest.raises(Unsupported, match=r"2 of its parameters \(shapes \(2, 2\), \(2,\)\) would move"):
        check_optimizer(torch.optim.SGD([*model.parameters(), *uncovered.parameters()], lr=0.1), model)
    with pytest.raises(Unsupported, match=r"does not hold 0\.weight, 0\.bias"):
        check_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    model[0].requires_grad_(False)
    check_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), model)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    next(model.parameters()).grad = torch.ones(2, 2)
    with pytest.raises(Unsupported, match=r"frozen parameters that have a gradient: 1 of .*zero_grad"):
        check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_rescales_its_rows_is_refused_before_it_does(
    kind: type[nn.Embedding] | type[nn.EmbeddingBag], frozen: bool
) -> None:
    table = kind(9, 5, max_norm=0.5).requires_grad_(not frozen)
    with pytest.raises(Unsupported, match=r"^layer '0' is an Embedding.* max_norm"):
        check_model(nn.Sequential(table, nn.Linear(5, 3)))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_for_other_gradients_are_refused(kind: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(Unsupported, match=kind.__name__):
        check_optimizer(kind(model.parameters()), model)


@pytest.mark.parametrize("where", ["accelerate", "lightning"])
def test_an_optimizer_whose_steps_go_through_a_gradient_scaler_is_refused(where: str) -> None:
    """It would divide the private gradient by a factor that nothing was multiplied by."""
    model = nn.Linear(4, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = SimpleNamespace() if where == "lightning" else optimizer
    if where == "lightning":
        optimizer._strategy = SimpleNamespace(precision_plugin=keeper)
    keeper.scaler = None
    check_optimizer(optimizer, model)
    keeper.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(Unsupported, match=r"with a gradient scaler.*bf16"):
        check_optimizer(optimizer, model)


def test_models_that_average_over_processes_or_devices_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"DataParallel, which averages .* before they are clipped"):
        check_model(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(Unsupported, match=r"^layer '0' is wrapped in DataParallel"):
        check_model(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))


def test_a_distributed_module_is_refused_by_its_own_class(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        check_model(nn.Linear(2, 2))
        with pytest.raises(Unsupported, match="wrapped in DistributedDataParallel"):
            check_model(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        torch.distributed.destroy_process_group()
