"""`hush.fix`: its replacements, and the private steps of the models that it changed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.models import check_model
from hush.gradients.probe import probe


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.Dropout2d(0.1, inplace=True),
        nn.Flatten(),
        nn.Linear(128, 16),
        nn.BatchNorm1d(16),
        nn.Linear(16, 2),
    )


def test_a_model_with_every_layer_to_replace_trains_afterwards() -> None:
    model = convolutional()
    with pytest.raises(Unsupported, match=r"BatchNorm2d.*hush\.fix\(model\)"):
        check_model(model)
    fixed, changes = hush.fix(model)
    assert fixed is model
    assert changes == [
        "layer '1': BatchNorm2d(8) -> GroupNorm(2, 8)",
        "layer '2': ReLU(inplace=True) -> inplace=False",
        "layer '4': InstanceNorm2d(track_running_stats=True) -> track_running_stats=False",
        "layer '5': Dropout2d(inplace=True) -> inplace=False",
        "layer '8': BatchNorm1d(16) -> GroupNorm(1, 16)",
    ]
    assert hush.fix(model) == (model, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = hush.plans.dpsgd(rate=0.5, clip_norm=1.0, multiplier=1.0)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=8)
    for batch in step.batches((torch.randn(8, 3, 8, 8), torch.arange(8) % 2), steps=2):
        step(batch)
    assert step.steps == 2


@pytest.mark.parametrize("affine", [True, False])
def test_a_group_norm_has_the_parameters_of_its_batch_norm(affine: bool) -> None:
    norm = nn.BatchNorm2d(64, eps=0.1, affine=affine, dtype=torch.float64)
    if affine:
        nn.init.normal_(norm.weight)
        norm.bias.requires_grad_(False)
    model, _ = hush.fix(nn.Sequential(norm))
    group: Any = model[0]  # type: ignore[index]
    assert (group.num_groups, group.num_channels, group.eps, group.affine) == (16, 64, 0.1, affine)
    assert group.weight is norm.weight
    assert group.bias is norm.bias
    inputs = torch.randn(2, 64, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(
        model(inputs), nn.functional.group_norm(inputs, 16, norm.weight, norm.bias, 0.1)
    )


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (3, 1), (8, 2), (16, 4), (20, 4), (64, 16), (96, 16), (2048, 32)]
)
def test_groups_divide_the_channels_and_have_four_or_more(channels: int, groups: int) -> None:
    """A group of one channel is constant on a map of one pixel."""
    group: Any = hush.fix(nn.BatchNorm2d(channels))[0]
    assert group.num_groups == groups
    if channels >= 4:
        assert len(group(torch.randn(1, channels, 1, 1)).unique()) > 2


def test_records_do_not_mix_and_vectors_keep_their_information() -> None:
    model, _ = hush.fix(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(model(inputs)[:2], model(inputs[:2]))
    assert len(model(inputs[:1]).unique()) == 8


def test_a_shared_layer_stays_shared_and_a_model_may_be_one_layer() -> None:
    norm = nn.BatchNorm1d(4)
    model, changes = hush.fix(nn.Sequential(norm, nn.Linear(4, 4), norm))
    assert len(changes) == 1
    assert model[0] is model[2]  # type: ignore[index]
    alone, changes = hush.fix(nn.BatchNorm1d(4))
    assert isinstance(alone, nn.GroupNorm)
    assert changes == ["the model: BatchNorm1d(4) -> GroupNorm(1, 4)"]


def test_a_frozen_batch_norm_stays_unless_the_whole_model_is_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].eval()
    assert hush.fix(model)[1] == []
    fixed, changes = hush.fix(model.eval())
    assert len(changes) == 1
    check_model(fixed.train())


class _WithActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize("norm", [_WithActivation(4), nn.LazyBatchNorm2d()])
def test_other_batch_norms_raise_and_leave_the_model_as_it_was(norm: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), norm)
    before = copy.copy(model._modules)
    with pytest.raises(Unsupported, match=r"layer '2' is a .*only torch's own batch norms"):
        hush.fix(model)
    assert model._modules == before
    assert model[1].inplace


def test_embeddings_stop_rescaling() -> None:
    model, changes = hush.fix(nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1)))
    assert changes == ["layer '0': Embedding(max_norm=0.5) -> max_norm=None"]
    check_model(model)


def test_a_model_that_writes_into_its_inputs_is_named_and_fixed() -> None:
    model = nn.Sequential(nn.ELU(inplace=True), nn.Linear(4, 1))
    records = torch.randn(2, 4), torch.zeros(2, 1)
    with pytest.raises(Unsupported, match=r"writes into its inputs.*hush\.fix\(model\)"):
        probe(model, nn.MSELoss(), records[0].clone(), records[1])
    model, _ = hush.fix(model)  # type: ignore[assignment]
    assert not probe(model, nn.MSELoss(), *records).one_by_one
